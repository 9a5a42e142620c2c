"""Solves by rough evaluations of a map between full ones. What is returned, and its residual, is always measured."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from opteq._room import Room
from opteq.solvers.guarded import GuardedIteration, Seen
from opteq.solvers.loop import Finish, PlainRun, Process, Rule, Run
from opteq.solvers.method import Method, Task
from opteq.states import all_rows, any_row, row_norms, single, with_rows

Known = tuple[Tensor, ...]
"""All that an evaluation found out, batch first; the point first and its image last."""


class Refinable(Protocol):
    """A map that can be evaluated roughly near a point where it was evaluated in full."""

    room: Room | None
    """Where a solve may work, if anywhere."""

    @property
    def error(self) -> float | None:
        """How far :meth:`near` may be off, relative to the distance; None where only :meth:`exact` is to be used."""
        ...

    def exact(self, z: Tensor, rows: Tensor | None = None) -> Known:
        """The map at z, which holds all samples or those with the numbers ``rows``."""
        ...

    def near(self, known: Known, z: Tensor) -> tuple[Tensor, Tensor]:
        """The image of z, by way of what is known at another point, and the difference of the two points."""
        ...


class Refined(Process, Protocol):
    """A process some of whose residuals are estimates."""

    measured: Tensor
    """Rows whose last residual was measured."""

    def measure(self, point: Tensor, rows: Tensor) -> Tensor:
        """The residuals of the given rows of a matrix of points, in full precision."""
        ...


class RefinedIteration(GuardedIteration):
    """A fixed-point iteration on rough images.

    A rough image is off by at most ``error |z - z0|``, with ``z0`` the row's last fully evaluated point. A row is
    evaluated in full where the change falls below that, for then it tells no more, or within the tolerance, for nothing
    counts as solved that was not measured. Each row decides for itself, so that no answer depends on its neighbours.
    """

    def __init__(self, task: Task, method: Method, floor: float, refinable: Refinable, known: Known, tol: float):
        super().__init__(task, method, floor)
        self.layout = task.layout
        self.refinable = refinable
        self.known = known
        self.tol = tol

    def first(self) -> tuple[Tensor, Tensor]:
        """The start, which was measured."""
        point, residual = super().first()
        self.measured = torch.ones_like(residual, dtype=torch.bool)
        return point, residual

    def measure(self, point: Tensor, rows: Tensor) -> Tensor:
        """Residuals of chosen rows; what is known moves to these points."""
        images = self._evaluate(point, rows)
        return self._seen(point[rows], images).residual

    def _measure(self, proposal: Tensor, active: Tensor) -> Seen:
        error = self.refinable.error
        if error is None:
            self.measured = active
            return self._seen(proposal, self._updated(self.image, proposal))
        near, move = self.refinable.near(self.known, self._picture(proposal))
        seen = self._seen(proposal, self.layout.pack(near))
        distance = row_norms(self.layout.pack(move))
        # Written so that what is not finite is measured too.
        self.measured = active & ~((seen.residual > self.tol) & (seen.gap > error * distance))
        return self._seen(proposal, self._updated(seen.image, proposal)) if any_row(self.measured) else seen

    def _updated(self, images: Tensor, points: Tensor) -> Tensor:
        """Images with those of the rows to be measured put right."""
        if all_rows(self.measured):
            return self._evaluate(points, None)
        rows = self.measured.nonzero()[:, 0]
        return images.index_copy(0, rows, self._evaluate(points, rows))

    def _evaluate(self, points: Tensor, rows: Tensor | None) -> Tensor:
        """Images of all points or of some rows; what is known moves there."""
        if rows is None:
            self.known = self.refinable.exact(self._picture(points))
            return self.layout.pack(self.known[-1])
        some = self.layout.of_batch(len(rows))
        fresh = self.refinable.exact(single(some.unpack(points[rows])), rows)
        self.known = tuple(with_rows(old, rows, new) for old, new in zip(self.known, fresh, strict=True))
        return some.pack(fresh[-1])

    def _picture(self, points: Tensor) -> Tensor:
        return single(self.layout.unpack(points))


@runtime_checkable
class KnowingRun(Run, Protocol):
    """A run that knows the map at its answer, all of it."""

    known: Known


class RefinedRun(PlainRun):
    """The bookkeeping of a solve some of whose residuals are estimates: those of its answers are measured, the history
    holds both.
    """

    process: Refined

    def __init__(self, process: Refined, rule: Rule) -> None:
        super().__init__(process, rule)

    def begin(self) -> None:
        """The start is measured."""
        super().begin()
        self.settled = self.process.measured

    def advance(self) -> None:
        """As always; and note which of the best points are those that were measured last."""
        super().advance()
        measured = self.process.measured
        self.settled = torch.where(self.chosen, measured, self.settled & ~measured)

    def finish(self) -> Finish:
        """The best points, measured where they were not."""
        if any_row(~self.settled):
            rows = (~self.settled).nonzero()[:, 0]
            residual = self.process.measure(self.best, rows).to(self.best_residual.dtype)
            self.best_residual = self.best_residual.index_copy(0, rows, residual)
            self.done = self.best_residual <= self.rule.tol
            self.settled = torch.ones_like(self.settled)
        return super().finish()
