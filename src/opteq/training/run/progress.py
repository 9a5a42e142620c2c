"""What a person sees while a run goes on: a bar on a terminal, a line an epoch elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from opteq.training.metrics import Counts
from opteq.training.run.records import Line

REFRESH = 0.5
"""Seconds between two looks at the numbers: each makes a GPU wait once."""


class ProgressDisplay:
    """The display of a run; it shows nothing where ``shown`` is false, as in all processes but the first.

    Args:
        epochs: of the run.
        batches: of an epoch.
        shown: whether to show anything.
        console: where; standard output by default.
    """

    def __init__(self, epochs: int, batches: int, shown: bool = True, console: Console | None = None) -> None:
        self.epochs = epochs
        self.batches = batches
        self.shown = shown
        self.console = console or Console()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._looked = 0.0
        self._began = (0.0, 0.0)

    def __enter__(self) -> ProgressDisplay:
        if self.shown and self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
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
        """An epoch (0 is the first) begins."""
        self._began = (time.monotonic(), -1.0)
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, description=f"epoch {number + 1}/{self.epochs}", numbers="")

    def batch(self, number: int, read: Callable[[], Counts]) -> None:
        """A batch is done. ``read`` is called no more often than the display is refreshed."""
        now = time.monotonic()
        if self._bar is None or self._task is None or now - self._looked < REFRESH:
            return
        counts = read()
        self._looked = time.monotonic()
        began, samples = self._began
        if samples < 0:
            # Speed is measured from the first look on: a resumed epoch has counted pictures of earlier times.
            self._began = (self._looked, counts.samples)
            speed = "- img/s"
        else:
            speed = f"{(counts.samples - samples) / max(self._looked - began, 1e-9):.0f} img/s"
        numbers = f"loss {counts.mean_loss:.3f}  acc {counts.accuracy:.1%}  {speed}"
        if counts.solves:
            numbers += f"  {counts.mean_steps:.1f} steps  worst {counts.worst:.0e}"
        self._bar.update(self._task, completed=number, numbers=numbers)

    def line(self, line: Line) -> None:
        """An epoch is done: one plain line that stays."""
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
            worst = "not finite" if line["worst_residual"] is None else f"{line['worst_residual']:.1e}"
            text += f"  {line['solver_steps']:.1f} steps  worst residual {worst}"
            text += f"  converged {line['converged']:.1%}"
        self.say(f"{text}  {line['seconds']:.1f} s")

    def say(self, text: str) -> None:
        """A line of text that stays."""
        if self.shown:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
