"""Run all measurements, print tables, write JSON."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from opteq.common.errors import ConvergenceWarning, UserError, unknown_name
from opteq_bench import epoch, record, rivals, stepping, tables, training
from opteq_bench.cases import MODELS, SHAPES, Precision, Shape, layer_case, model_case
from opteq_bench.floor import peak_of
from opteq_bench.timing import Clock

_DEVICES = ("auto", "cpu", "cuda")

Job = tuple[str, str, Callable[[], dict[str, Any]]]
"""The list of the record that a measurement belongs to, its description, and the measurement."""


def run(
    device: str = "auto",
    batch: int | None = None,
    shapes: Sequence[str] = (),
    precisions: Sequence[str] = (),
    models: bool = True,
    repeats: int = 10,
    json: Path | None = None,
    console: Console | None = None,
) -> bool:
    """Measure, print tables, and write JSON. Returns whether our results passed every check.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.
        batch: batch size; None is 128 on a GPU and 8 on a CPU.
        shapes: layers as ``"channels,hidden,side"``; by default the four of the results.
        precisions: of ``float32``, ``tf32``, ``bf16``; by default TF32 and bf16 on a GPU, float32 on a CPU.
        models: whether whole models are measured too.
        repeats: repetitions, of which the median is taken.
        json: file for all figures.
        console: for the tables.
    """
    place = _device(device)
    on_gpu = place.type == "cuda"
    batch = batch if batch is not None else (128 if on_gpu else 8)
    for name, value in (("batch", batch), ("repeats", repeats)):
        if value < 1:
            raise UserError(f"--{name} should be at least 1; got {value}")
    if json is not None:
        record.writable(json)
    layers = [Shape.parse(text) for text in shapes] or list(SHAPES)
    usual = ("tf32", "bf16") if on_gpu else ("float32",)
    chosen = [Precision(name, place) for name in (precisions or usual)]
    found: dict[str, Any] = {
        **record.stamp(),
        "machine": record.machine(place),
        "options": {
            "device": place.type,
            "batch": batch,
            "shapes": [str(shape) for shape in layers],
            "precisions": [precision.name for precision in chosen],
            "models": models,
            "repeats": repeats,
        },
    }
    console = console or _console()
    clock = Clock(place, repeats, warm_up=16 if on_gpu else 1)
    _introduce(console, found)
    found |= _measure(list(_jobs(layers, chosen, models, batch, clock, found["machine"]["device"])), clock, console)
    _print(console, found)
    if json is not None:
        record.write(json, found)
        console.print(f"written: {json}")
    return bool(found["agree"])


def _introduce(console: Console, found: dict[str, Any]) -> None:
    machine, batch = found["machine"], found["options"]["batch"]
    console.print(f"{machine['device']}, torch {machine['torch']}, {machine['threads']} CPU threads, batch {batch}")
    if rivals.version() is None:
        console.print("torchdeq is not installed, so there is no comparison: pip install 'opteq[bench]'")


def _measure(jobs: Sequence[Job], clock: Clock, console: Console) -> dict[str, Any]:
    """All measurements, the errors, and whether all results agree."""
    found: dict[str, Any] = {"steps": [], "training": [], "models": [], "errors": []}
    with _progress(console, len(jobs)) as tick, _quietly():
        for kind, words, job in jobs:
            tick(words)
            try:
                found[kind].append(job())
            except Exception as error:  # the other figures should not be lost
                found["errors"].append({"what": words, "error": f"{type(error).__name__}: {error}"})
            clock.clear()
    answers = [entry["answers"]["agree"] for entry in found["steps"]]
    found["agree"] = not found["errors"] and all(answers) and all(entry["agree"] for entry in found["training"])
    return found


def _jobs(
    shapes: Sequence[Shape], precisions: Sequence[Precision], models: bool, batch: int, clock: Clock, device: str
) -> Iterator[Job]:
    peak = peak_of(device)

    def steps(make: Callable[[Any, int, Precision], Any], what: Any, precision: Precision) -> dict[str, Any]:
        with precision.applied():
            return stepping.measure(make(what, batch, precision), clock, peak)

    def train(shape: Shape, precision: Precision) -> dict[str, Any]:
        with precision.applied():
            return training.measure(shape, batch, precision, clock, peak)

    def whole(precision: Precision) -> dict[str, Any]:
        with precision.applied():
            return epoch.measure(batch, precision, clock)

    for shape, precision in itertools.product(shapes, precisions):
        words = f"{shape} in {precision.name}"
        yield "steps", f"{words}: steps", lambda s=shape, p=precision: steps(layer_case, s, p)  # type: ignore[misc]
        yield "training", f"{words}: training", lambda s=shape, p=precision: train(s, p)  # type: ignore[misc]
    if not models:
        return
    for name, precision in itertools.product(MODELS, precisions):
        words = f"{name} in {precision.name}: steps"
        yield "steps", words, lambda n=name, p=precision: steps(model_case, n, p)  # type: ignore[misc]
    # Models are trained in the lowest precision.
    precision = min(precisions, key=lambda each: each.width)
    yield "models", f"models in {precision.name}: training", lambda: whole(precision)


def _device(name: str) -> torch.device:
    if name not in _DEVICES:
        raise unknown_name("device", name, _DEVICES)
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda needs a GPU, and torch finds none; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _console() -> Console:
    """The terminal; 160 columns in a file."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=160)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total, completed=-1)

        def tick(words: str) -> None:
            progress.update(task, description=words, advance=1)

        yield tick


@contextmanager
def _quietly() -> Iterator[None]:
    """Without warnings about solves that stop early, and without those of torchdeq."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", module="torchdeq")
        warnings.filterwarnings("ignore", message=".*TF32")
        yield


def _print(console: Console, found: dict[str, Any]) -> None:
    console.print(tables.steps_table(found["steps"]))
    console.print(tables.answers_table(found["steps"]))
    console.print(tables.training_table(found["training"]))
    console.print(tables.gradients_table(found["training"]))
    for entry in found["models"]:
        console.print(tables.epoch_table(entry))
    for entry in found["errors"]:
        console.print(f"{entry['what']}: {entry['error']}", markup=False)
    console.print("our results pass every check" if found["agree"] else "OUR RESULTS FAIL A CHECK, see above")
