"""What a person sees: a bar on a terminal, a line an epoch elsewhere."""

from __future__ import annotations

import errno
import io

import pytest
from rich.console import Console

from opteq.training.metrics import Metrics
from opteq.training.run import progress
from opteq.training.run.progress import ProgressDisplay

LINE = {
    "epoch": 2,
    "train_loss": 0.5,
    "train_accuracy": 0.75,
    "test_accuracy": 0.5,
    "images_per_second": 1234.5,
    "solver_steps": 7.25,
    "worst_residual": 3e-4,
    "converged": 0.995,
    "seconds": 1.5,
}


class Numbers:
    """Metrics how often the numbers are looked at: on a GPU each look waits."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> Metrics:
        self.looks += 1
        return Metrics(80.0, 60, 100, 80, 100, 100, 800, 0.1, 100, 0, 2e-3)


def shown(terminal: bool, interval: float, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    monkeypatch.setattr(progress, "REFRESH", interval)
    file, numbers = io.StringIO(), Numbers()
    console = Console(file=file, force_terminal=terminal, width=160)
    with ProgressDisplay(epochs=3, batches=4, console=console) as display:
        display.epoch(1)
        for batch in range(1, 5):
            display.batch(batch, numbers)
        display.line(LINE)
    return file.getvalue(), numbers.looks


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    text, looks = shown(True, 0.0, monkeypatch)
    assert looks == 4
    for part in ("epoch 2/3", "loss 0.800", "acc 60.0%", "img/s", "8.0 steps", "worst 2e-03"):
        assert part in text


def test_numbers_are_looked_at_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(True, 1e9, monkeypatch)[1] <= 1
    assert shown(False, 0.0, monkeypatch)[1] == 0


def test_elsewhere_there_is_a_line_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    text, _ = shown(False, 0.0, monkeypatch)
    assert text == (
        "epoch 2/3  loss 0.5000  train 75.00%  test 50.00%  1234 img/s  7.2 steps  worst residual 3.00e-04  "
        "converged 99.5%  1.5 s\n"
    )


def test_a_network_without_equilibria_and_one_that_lost_them() -> None:
    file = io.StringIO()
    display = ProgressDisplay(3, 4, console=Console(file=file))
    display.line({**LINE, "solver_steps": 0.0})
    display.line({**LINE, "worst_residual": None})
    plain, lost = file.getvalue().splitlines()
    assert "residual" not in plain
    assert "worst residual not finite" in lost
    quiet = io.StringIO()
    ProgressDisplay(3, 4, shown=False, console=Console(file=quiet)).line(LINE)
    assert quiet.getvalue() == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_closed_pipe_or_terminal_ends_no_training(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "nobody reads")

        def isatty(self) -> bool:
            return terminal

    monkeypatch.setattr("sys.stdout", Closed())
    monkeypatch.setattr(progress, "REFRESH", 0.0)
    numbers = Numbers()
    with ProgressDisplay(epochs=3, batches=4) as display:
        assert display.console.is_terminal == terminal
        display.epoch(0)
        display.batch(1, numbers)
        display.line(LINE)
