"""Rows that are judged in Python, on a CPU: how far each has come, and how it ended."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opteq.solvers.loop import Finish, Rule
from opteq.solvers.status import Status


class JudgedRows:
    """What a :class:`~opteq.solvers.loop.Run` notes of every row, as numbers of Python.

    The rules are those of :class:`~opteq.solvers.loop.PlainRun`.
    """

    rule: Rule
    best: Tensor
    """The best points, ``(R, N)``."""

    def _open(self, residual: list[float], best: Tensor) -> None:
        """The start is the best so far."""
        assert not self.rule.to_the_end
        self.best = best
        self.best_residual = [r if math.isfinite(r) else math.inf for r in residual]
        self.dead = [0 if math.isfinite(r) else int(Status.NON_FINITE) for r in residual]
        self.done = [r <= self.rule.tol for r in self.best_residual]
        self.steps = [0] * len(residual)
        self.trace = [residual]

    def _active(self) -> list[bool]:
        return [not done and not dead for done, dead in zip(self.done, self.dead, strict=True)]

    def unfinished(self) -> Tensor:
        """Rows that go on."""
        return torch.tensor(self._active(), dtype=torch.bool, device="cpu")

    def _taken(self, row: int, residual: float) -> bool:
        """Enter a step of a row that went on; whether it is the best one."""
        better = residual < self.best_residual[row]
        if better:
            self.best_residual[row] = residual
        self.done[row] = self.best_residual[row] <= self.rule.tol
        self.steps[row] += 1
        return better

    def _entered(self, active: list[bool], residual: list[float], points: Tensor, chosen: list[int]) -> None:
        """Enter a step of all rows, those of ``chosen`` with the best of their ``points``."""
        self.trace.append([residual[row] if on else self.trace[-1][row] for row, on in enumerate(active)])
        if len(chosen) == len(active):
            self.best = points
        elif chosen:
            rows = numbers_of(chosen)
            self.best = self.best.index_copy(0, rows, points[rows])

    def _finished(self) -> Finish:
        """Where every row stands."""
        ends = zip(self.done, self.dead, strict=True)
        codes = [int(Status.CONVERGED) if done else dead or int(Status.MAX_STEPS) for done, dead in ends]
        return Finish(
            self.best,
            torch.tensor(self.best_residual, dtype=torch.float64, device="cpu"),
            torch.tensor(self.steps, dtype=torch.int64, device="cpu"),
            torch.tensor(codes, dtype=torch.int64, device="cpu"),
            torch.tensor(self.trace, dtype=torch.float64, device="cpu"),
        )


def numbers_of(rows: list[int]) -> Tensor:
    """Numbers of rows as an index, which none of them is, too."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu")
