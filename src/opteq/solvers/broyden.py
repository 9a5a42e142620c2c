"""Broyden's method with limited memory: a Newton step whose inverse Jacobian is estimated from earlier steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.common.validate import whole
from opteq.solvers.anderson import History, MemoryMethod, with_column
from opteq.solvers.base import DampedSolver
from opteq.solvers.loop import Method, RowTask
from opteq.states import row_norms


@dataclass(frozen=True, kw_only=True)
class Broyden(DampedSolver):
    """Good Broyden updates of an inverse Jacobian, kept as a sum of ``memory`` rank-one terms.

    With ``g = T(y) - y`` the step is ``y <- y + H g``, where ``H ~ (I - J)^-1`` starts as ``damping I`` and after a
    move ``s`` with change of residual ``-t`` becomes ``H + (s - H t) (H's)' / <H's, t>``, so that ``H t = s``. When the
    memory is full the estimate is reset: each term corrects those before it, so without the oldest the rest would be no
    estimate.

    Args:
        memory: number of terms.
        damping: scale of the first estimate; None takes the problem's recommendation, else 1.

    >>> import torch
    >>> outcome = Broyden(tol=1e-6).solve(lambda y: 0.5 * y + 1, torch.zeros(1, 1))
    >>> round(float(outcome.state), 4), int(outcome.steps)
    (2.0, 2)
    """

    memory: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self, "memory")

    def _method(self, task: RowTask) -> Method:
        return _BroydenUpdates(task.start, self.memory, self._damping(task))


class _BroydenUpdates(MemoryMethod):
    """``H = damping I + sum of left_i right_i'`` over the terms in use."""

    # On a linear map of dimension n Broyden ends in 2 n steps, but not downhill: held to a factor of 2 it ends nowhere.
    growth = 30.0

    def __init__(self, start: Tensor, memory: int, damping: float | Tensor) -> None:
        super().__init__(start, memory, damping)
        self.left = History(start, memory)
        self.right = History(start, memory)

    def propose(self, point: Tensor, image: Tensor, change: Tensor, active: Tensor) -> Tensor:  # noqa: ARG002
        if self.last is not None:
            self._learn(point - self.last[0], self.last[1] - change, active)
        self.last = (point, change)
        self.fresh = self.fresh & ~active
        return point + self.apply(change)

    def apply(self, rows: Tensor) -> Tensor:
        """``H`` times each row."""
        return self.damping * rows + self._sum(self.left, self.right, rows)

    def inverse_adjoint(self, rows: Tensor) -> Tensor:
        """``H'`` times each row."""
        return self.damping * rows + self._sum(self.right, self.left, rows)

    def _sum(self, ahead: History, behind: History, rows: Tensor) -> Tensor:
        return ahead.combine(torch.where(self.used, behind.products(rows), 0.0))

    def _learn(self, move: Tensor, drop: Tensor, active: Tensor) -> None:
        """Correct H so that it maps ``drop``, by which the residual fell, to the ``move`` of the point."""
        slot = self.left.following
        self.used = self.used & ~(active & self.used[:, slot])[:, None]  # the memory is full: begin anew
        length = row_norms(move)
        known = active & ~self.fresh & torch.isfinite(length) & (length > 0)
        scale = torch.where(known, length, 1.0).to(move.dtype)[:, None]
        move, drop = move / scale, drop / scale  # of length one, so that products neither overflow nor vanish
        back = self.inverse_adjoint(move)
        slope = (back * drop).sum(dim=1)
        # A slope lost in rounding would make the update arbitrarily large: such a step teaches nothing.
        least = 1e3 * torch.finfo(move.dtype).eps * row_norms(back) * row_norms(drop)
        sound = known & torch.isfinite(slope) & (slope.abs() > least)
        left = move - self.apply(drop)
        slope = torch.where(sound, slope, 1.0)
        sound = sound & torch.isfinite((row_norms(left) / slope).to(left.dtype))
        self.left.push(left, slope[:, None], sound)
        self.right.push(back, torch.ones_like(slope)[:, None], sound)
        self.used = with_column(self.used, slot, torch.where(active, sound, self.used[:, slot]))
