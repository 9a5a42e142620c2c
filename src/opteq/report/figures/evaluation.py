"""``opteq evaluate RUN --corruptions --curves``: measure, record, draw, and show in the run's page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opteq import report
from opteq.common.errors import UserError
from opteq.common.files import plain_errors
from opteq.report.figures.robust import draw_record
from opteq.training import evaluate_robustness, is_denoiser

if TYPE_CHECKING:
    from rich.console import Console


def command(
    run: Path,
    corruptions: bool,
    curves: bool,
    console: Console,
    *,
    only: Sequence[str] = (),
    reference: Path | None = None,
    images: int | None = None,
    attack: str | None = None,
    attack_steps: int | None = None,
    step_size: str | None = None,
    tol: float | None = None,
    max_steps: int | None = None,
    device: str = "auto",
    precision: str | None = None,
    root: str | None = None,
    corruption_files: Path | None = None,
    batch_size: int | None = None,
    first: bool = True,
) -> dict[str, Any]:
    """Measure what was asked for; the arguments are those of :func:`~opteq.training.evaluate_robustness`.

    Args:
        run: the run's folder.
        corruptions: measure corruptions.
        curves: measure curves.
        console: where progress and results are printed.
        only: corruptions by name.
        reference: a run to compare with.
        images: number of test images.
        attack: radius of the attacks of the curves.
        attack_steps: their steps.
        step_size: refused, as each point of the curves has its own.
        tol: as for :func:`~opteq.training.evaluate`, with those below.
        max_steps: most solver steps.
        device: ``auto``, ``cpu`` or ``cuda``.
        precision: of the model.
        root: folder of the images.
        corruption_files: published files of corrupted images.
        batch_size: images at a time, the recipe's by default.
        first: whether this is the first of several processes, which prints and draws.
    """
    if is_denoiser(run):
        raise UserError("--corruptions and --curves are for classifiers, and this run trained a denoiser")
    if not corruptions and not curves:
        raise UserError("--only, --reference, --corruption-files and --images need --corruptions or --curves; add one")
    if step_size is not None:
        raise UserError("--attack-step-size has no effect on curves: every number of steps has a step size of its own")
    if not curves and (attack is not None or attack_steps is not None):
        raise UserError("--attack beside --corruptions needs --curves; or attack in a call of its own")

    def say(text: str) -> None:
        if first:
            console.print(text, highlight=False, markup=False, soft_wrap=True)

    record = evaluate_robustness(
        run, corruptions, curves, only=only, reference=reference, images=images, attack=attack,
        attack_steps=attack_steps, say=say, tol=tol, max_steps=max_steps, device=device, precision=precision, root=root,
        corruption_files=corruption_files, batch_size=batch_size,
    )  # fmt: skip
    if first:
        if corruptions:
            say(_summary(record["corruptions"]))
        with plain_errors(
            "drawing", f"then run `opteq figures {run}` and `opteq report {run}`: what was measured is kept"
        ):
            drawn, page = draw_record(run), report.write(run)
        say(f"tables: {run / 'robustness.md'}; figure: {drawn}; page: {page}")
    return record


def _summary(record: dict[str, Any]) -> str:
    count = len(record["accuracy"])
    under = "1 corruption" if count == 1 else f"{count} corruptions"
    words = f"accuracy {record['clean']:.2%}, under {under} {record['mean']:.2%} on average"
    relative = record.get("relative")
    if relative is None or relative["mean"] is None:
        return words
    return f"{words}; mean corruption error relative to {relative['reference']}: {relative['mean']:.3f}"
