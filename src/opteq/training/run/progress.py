"""Progress output: a bar on a terminal, one line per epoch elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from opteq.training.metrics import Metrics
from opteq.training.run.records import Line

WIDE = 110
"""Columns in which speed and residual fit beside the bar; narrower terminals would cut the line."""

REFRESH = 0.5
"""Seconds between two updates: each waits for the GPU once."""


class _Tolerant:
    """A file whose writes may fail: a training goes on where its terminal or pipe has been closed."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def training_console() -> Console:
    """Standard output, for as long as somebody reads it."""
    return Console(file=cast("IO[str]", _Tolerant(sys.stdout)))


class ProgressDisplay:
    """The progress of a run; silent where ``shown`` is false, as in all processes but the first.

    Args:
        epochs: number of epochs.
        batches: batches per epoch.
        shown: whether to print anything.
        console: standard output by default.
    """

    def __init__(self, epochs: int, batches: int, shown: bool = True, console: Console | None = None) -> None:
        self.epochs = epochs
        self.batches = batches
        self.shown = shown
        self.console = console or training_console()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._updated = 0.0
        self._began = (0.0, 0.0)

    def __enter__(self) -> ProgressDisplay:
        if self.shown and self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None if self.console.width >= WIDE else 8),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(compact=True),
                console=self.console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self.batches, numbers="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def epoch(self, number: int) -> None:
        """Start an epoch (from 0)."""
        self._began = (time.monotonic(), -1.0)
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, description=f"epoch {number + 1}/{self.epochs}", numbers="")

    def batch(self, number: int, read: Callable[[], Metrics]) -> None:
        """Finish a batch. ``read`` is called at most once per refresh."""
        now = time.monotonic()
        if self._bar is None or self._task is None or now - self._updated < REFRESH:
            return
        counts = read()
        self._updated = time.monotonic()
        began, samples = self._began
        if samples < 0:
            # Speed is measured from the first update on: a resumed epoch has counted images before.
            self._began = (self._updated, counts.samples)
            speed = "- img/s"
        else:
            speed = f"{(counts.samples - samples) / max(self._updated - began, 1e-9):.0f} img/s"
        numbers = f"loss {counts.mean_loss:.3f}  acc {counts.accuracy:.1%}"
        if self.console.width >= WIDE:
            numbers += f"  {speed}"
        if counts.solves:
            numbers += f"  {counts.mean_steps:.1f} steps"
            numbers += f"  worst {counts.worst:.0e}" if self.console.width >= WIDE else ""
        if counts.skipped:
            numbers += f"  {counts.skipped:.0f} skipped"
        self._bar.update(self._task, completed=number, numbers=numbers)

    def line(self, line: Line) -> None:
        """Finish an epoch: print one line."""
        if not self.shown:
            return
        width = len(str(self.epochs))
        text = (
            f"epoch {line['epoch']:{width}}/{self.epochs}  loss {line['train_loss']:.4f}  "
            f"train {line['train_accuracy']:.2%}  test {line['test_accuracy']:.2%}"
        )
        for key, word in (("test_iou", "IoU"), ("unseen_accuracy", "unseen"), ("test_robust_accuracy", "attacked")):
            if key in line:
                text += f"  {word} {line[key]:.2%}"
        text += f"  {line['images_per_second']:.0f} img/s"
        if line["solver_steps"]:
            worst = "not finite" if line["worst_residual"] is None else residual_text(line["worst_residual"])
            text += f"  {line['solver_steps']:.1f} steps  worst residual {worst}"
            text += f"  converged {line['converged']:.1%}"
        if line.get("skipped_steps"):
            text += f"  {line['skipped_steps']} steps skipped"
        self.say(f"{text}  {line['seconds']:.1f} s")

    def say(self, text: str) -> None:
        """Print a line."""
        if self.shown:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def residual_text(value: float) -> str:
    """A residual with three digits; one within 1e-3 does not read 1.00e-03.

    >>> residual_text(0.000421), residual_text(0.0009999), residual_text(0.001), residual_text(0.0)
    ('4.21e-04', '9.99e-04', '1.00e-03', '0.00e+00')
    """
    text = f"{value:.2e}"
    return f"{0.999 * float(text):.2e}" if text.startswith("1.00") and value < float(text) else text
