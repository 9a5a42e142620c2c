"""The command line."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import opteq
from opteq.common.errors import UserError
from opteq.common.files import check_readable

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE = 3.0
"""Seconds that other processes wait for the first one to print an error."""


class _Command(TyperCommand):
    """A command whose ``--help`` is listed as a flag, without a type: so are all flags here, by a blank metavar."""

    def get_help_option(self, ctx: Any) -> Any:
        return _as_flag(super().get_help_option(ctx))


class _Commands(TyperGroup):
    """All of them."""

    def get_help_option(self, ctx: Any) -> Any:
        return _as_flag(super().get_help_option(ctx))


def _as_flag(option: Any) -> Any:
    if option is not None:
        option.metavar = " "
    return option


app = typer.Typer(
    cls=_Commands,
    help="Networks whose output solves an optimisation problem that a person can read and edit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", metavar=" ", help="Print the version and stop.")] = False,
) -> None:
    """Global options."""
    if version:
        typer.echo(f"opteq {opteq.__version__}")
        raise typer.Exit


@app.command(cls=_Command)
def demo(
    samples: Annotated[int, typer.Option(min=4, max=1797, help="How many digits to solve for.")] = 256,
) -> None:
    """Solve one equilibrium layer on the digits of the package and print its objective, term by term."""
    from opteq.analysis.demo import run

    run(samples)


@app.command(cls=_Command)
def train(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="A name that `opteq recipes` lists, or a TOML file; digits by default."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/<name> by default.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key, such as train.epochs=20.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", metavar=" ", help="Continue from the folder's newest checkpoint.")
    ] = False,
) -> None:
    """Train a model by a recipe; weights, metrics and a report go to a folder."""
    with one_line_errors():
        from opteq import training

        stored = (out or Path("runs/digits")) / "recipe.toml"
        if recipe is None and resume:
            check_readable(stored.parent)
        if recipe is None and resume and out is not None and not stored.exists():
            raise UserError(f"{out} holds no run to resume; name a recipe to start one there")
        # A run that is resumed without a recipe uses its own, with the overrides it was started with.
        own = recipe is None and resume and stored.exists()
        chosen = training.load_any_recipe(stored if own else recipe or "digits", set_ or ())
        folder = out or (stored.parent if own else Path("runs") / chosen.name)
        if isinstance(chosen, training.Recipe):
            training.train(chosen, folder, resume=resume)
        else:
            training.train_denoiser(chosen, folder, resume=resume)
        if _rank() == 0:
            _report(folder)


@app.command(cls=_Command)
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    tol: Annotated[float | None, typer.Option(help="Solve to this relative residual, in full precision.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Maximal number of solver steps.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    precision: Annotated[str | None, typer.Option(help="no, bf16 or fp16; as trained by default.")] = None,
    root: Annotated[str | None, typer.Option(help="Folder of the images, if not the recipe's.")] = None,
    attack: Annotated[
        str | None,
        typer.Option(metavar="EPSILON", help="Also attack the images by up to this, such as 8/255; 0 for no attack."),
    ] = None,
    attack_steps: Annotated[int | None, typer.Option(help="Steps of the attack; the recipe's, or 20.")] = None,
    attack_step_size: Annotated[
        str | None, typer.Option(help="Length of a step; 2.5 EPSILON / steps by default.")
    ] = None,
    corruptions: Annotated[
        bool, typer.Option("--corruptions", metavar=" ", help="Accuracy under 19 corruptions at 5 severities.")
    ] = False,
    curves: Annotated[
        bool, typer.Option("--curves", metavar=" ", help="Accuracy by radius and steps of attacks; certified accuracy.")
    ] = False,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="This corruption; may be repeated.")] = None,
    reference: Annotated[Path | None, typer.Option(help="A run that corruption errors are relative to.")] = None,
    corruption_files: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Published files of CIFAR-10-C, in place of generated images.")
    ] = None,
    images: Annotated[int | None, typer.Option(help="Test images for corruptions and curves; all by default.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images at a time, the recipe's by default; fewer take less memory.")
    ] = None,
) -> None:
    """Evaluate a trained model on its test images; writes RUN/evaluation.json, or RUN/robustness.* with its figure."""
    with one_line_errors():
        from opteq import training

        if corruptions or curves or only or reference is not None or corruption_files or images is not None:
            from opteq.report.figures import evaluation

            evaluation.command(
                run, corruptions, curves, _console(), only=only or (), reference=reference, images=images,
                attack=attack, attack_steps=attack_steps, step_size=attack_step_size, tol=tol, max_steps=max_steps,
                device=device, precision=precision, root=root,
                corruption_files=corruption_files, batch_size=batch_size, first=_rank() == 0,
            )  # fmt: skip
            return

        if training.is_denoiser(run):
            if any(given is not None for given in (precision, attack, attack_steps, attack_step_size, batch_size)):
                raise UserError(
                    "--precision, --attack and --batch-size are for classifiers, and this run trained a denoiser"
                )
            from opteq.training.run.tables import denoising_table

            _console().print(denoising_table(str(run), training.evaluate_denoiser(run, tol, max_steps, device, root)))
            return
        result = training.evaluate(
            run, tol, max_steps, device, precision, root, attack, attack_steps, attack_step_size, batch_size
        )
    if _rank() == 0:
        from opteq.training.run.tables import evaluation_table

        _console().print(evaluation_table(str(run), result))


@app.command(cls=_Command)
def unrolling(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe, such as opteq-199k-cifar10.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the rows' runs; runs/<recipe>-unrolling by default.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key, for all rows.")
    ] = None,
    steps: Annotated[list[int] | None, typer.Option(help="K, may be repeated; 5, 10, 20, 40 by default.")] = None,
    threshold: Annotated[
        list[float] | None, typer.Option(help="Residual of the implicit rows, may be repeated; 1e-3, 1e-2 by default.")
    ] = None,
) -> None:
    """Train with K steps unrolled and with the implicit gradient; compare accuracy, times and residuals."""
    with one_line_errors():
        from opteq.training.run.tables import unrolling_rows
        from opteq.training.unrolling import unrolling_table

        folder = out or Path("runs") / f"{Path(recipe).stem}-unrolling"
        rows = unrolling_table(recipe, set_ or (), folder, steps or (5, 10, 20, 40), threshold or (1e-3, 1e-2))
        _console().print(unrolling_rows(rows))


@app.command(cls=_Command)
def predict(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A finished run or saved model, a name such as digits, or owner/name on the hub."
        ),
    ],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE", help="Image files, or folders of them.")],
    top: Annotated[int, typer.Option(min=1, help="How many classes to show.")] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", metavar=" ", help="Print JSON, one object for each image.")
    ] = False,
    explain: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page that explains the predictions, such as why.html.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Classify images with a trained model, prepared as its training images were."""
    with one_line_errors():
        from opteq.inference import predict as predicting

        predicting.command(run, images, top, as_json, explain, device, _console())


@app.command(cls=_Command)
def export(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A finished run or saved model, a name such as digits, or owner/name on the hub."
        ),
    ],
    format: Annotated[str, typer.Option(help="onnx, torchscript or exported (torch.export).")] = "onnx",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of every equilibrium; enough for its tolerance by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file; RUN/model.onnx, .ts or .pt2 by default.")] = None,
) -> None:
    """Write a model for inference elsewhere, with a fixed number of solver steps; says what they cost."""
    with one_line_errors():
        from opteq.inference import export as exporting

        exporting.command(run, format, steps, out, _console())


@app.command(cls=_Command)
def play(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, saved model or denoiser, or a name: digits.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes a free one.")] = 8000,
    browser: Annotated[bool, typer.Option(metavar=" ", help="Open the page in a browser.")] = True,
) -> None:
    """Try a model on a local web page: draw or drop an image, watch the solver, scale terms."""
    with one_line_errors():
        from opteq.play import command

        command.command(run, port, browser, _console())


@app.command(cls=_Command)
def restore(
    image: Annotated[Path, typer.Argument(metavar="IN", help="The image to restore, grey or colour.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where the restored image goes.")],
    model: Annotated[Path, typer.Option(help="The folder of a trained denoiser, or its name.")],
    sigma: Annotated[
        float | None,
        typer.Option(help="Standard deviation of the noise, of 255; 25 or the nearest trained for by default."),
    ] = None,
    blur: Annotated[float, typer.Option(help="Undo a Gaussian blur with this standard deviation in pixels.")] = 0.0,
    mask: Annotated[Path | None, typer.Option(help="Fill in what is black in this image, of the same size.")] = None,
    scale: Annotated[int, typer.Option(help="Enlarge by 2 or 4: pixels of IN are means of as many.")] = 1,
    strength: Annotated[float, typer.Option(help="Factor of the prior; more is smoother.")] = 1.0,
    tol: Annotated[float, typer.Option(help="Relative distance to the minimiser, as estimated.")] = 1e-4,
    tile: Annotated[
        int, typer.Option(min=64, help="Side of the parts solved at a time; less needs less memory.")
    ] = 512,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Restore an image by minimising an energy with a learned prior; says whether it was minimised."""
    from opteq.inference import restore as restoring

    with one_line_errors():
        restoring.command(image, out, model, sigma, blur, mask, scale, strength, tol, tile, device, _console())


@app.command(cls=_Command)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="One run to report on, or several to compare.")],
    out: Annotated[Path | None, typer.Option(help="Where a comparison goes; comparison.html by default.")] = None,
) -> None:
    """Write the report of a run, finished or not, again; or a page that compares several runs."""
    with one_line_errors():
        from opteq import report as reporting

        if len(runs) > 1:
            page = reporting.compare(runs, out or Path("comparison.html"))
        elif out is not None:
            raise UserError("--out belongs to a comparison of several runs; a report lies in the run's folder")
        else:
            page = reporting.write(runs[0])
        typer.echo(f"open {page} in a browser")


@app.command(cls=_Command)
def figures(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="The folder of a finished run, and others beside it.")
    ],
    out: Annotated[Path | None, typer.Option(help="Where the figures go; figures in the first run by default.")] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="This figure; may be repeated.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    root: Annotated[str | None, typer.Option(help="Folder of the images, if not the recipe's.")] = None,
) -> None:
    """Write every figure of the papers that the run can have, as PNG and SVG, with captions."""
    with one_line_errors():
        from opteq.report.figures import write_figures

        write_figures(runs[0], out, only or (), runs[1:], typer.echo, device=device, root=root)


@app.command(cls=_Command)
def recipes() -> None:
    """List the recipes, and what each reproduces."""
    with one_line_errors():
        from opteq.training.run.tables import recipes_table

        console = _console()
        console.print(recipes_table(console.width))


@app.command(cls=_Command, hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def bench() -> None:
    """Say how to run the benchmark."""
    with one_line_errors():
        raise UserError("the benchmark is not part of the installed package: in a clone of opteq run `make bench`")


@app.command(cls=_Command)
def models() -> None:
    """List the models, their sizes, what each reproduces, and which have weights in the package."""
    with one_line_errors():
        from opteq.inference.models_table import models_table

        _console().print(models_table())


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Errors that the user can act on become one line on standard error and an exit status, without a traceback.

    The errors that are meant for the user carry that status: 2, something to correct in the command or its files; 3,
    training stopped itself; 128 + n, signal n stopped it.
    """
    try:
        with _one_line_warnings():
            yield
    except Exception as error:
        status = getattr(error, "exit_status", None)
        if status is None:
            raise
        _stop(error, status)


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Warnings of opteq's own categories become one line, without the place in the source."""
    before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if category.__module__.startswith("opteq."):
            _say(f"warning: {message}")
        else:
            before(message, category, *place, **more)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _stop(error: Exception, status: int) -> None:
    rank = _rank()
    if rank:
        # Several processes may raise the same error. A launcher ends them all when one exits, so the others wait for
        # the first one's message; an error of a single process is still printed.
        time.sleep(PATIENCE)
    _say(f"process {rank}: {error}" if rank else str(error))
    raise typer.Exit(status) from error


def _say(text: str) -> None:
    typer.echo("opteq: " + " ".join(text.split()), err=True)


def _report(folder: Path) -> None:
    """Write the report. If that fails, the run is still complete."""
    from opteq import report

    try:
        page = report.write(folder)
    except Exception as error:
        _say(f"the report could not be written ({error}); the run itself is complete")
        typer.echo(f"done: weights and metrics are in {folder}")
    else:
        typer.echo(f"done: weights and metrics are in {folder}; open {page} in a browser")


def _rank() -> int:
    """The rank of this process; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def _console() -> Console:
    from rich.console import Console

    # Do not wrap lines in a file or a pipe.
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=320 if piped else None)
