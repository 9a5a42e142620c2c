"""FISTA: accelerated proximal gradient steps with restarts and step lengths that correct themselves, per sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from opteq.common.validate import share
from opteq.solvers.base import Solver
from opteq.solvers.loop import Process, relative
from opteq.solvers.method import Method, Task
from opteq.solvers.status import Status
from opteq.states import choose_rows, row_norms

_MEASURES = ("residual", "error")


@dataclass(frozen=True, kw_only=True)
class FISTA(Solver):
    """Accelerated steps ``y <- z + s (T(z) - z)``, ``z <- y + beta (y - y_before)`` (Beck and Teboulle 2009).

    For an :class:`~opteq.Objective` T is a proximal gradient step, so this is the accelerated proximal gradient method;
    it also accelerates any other map that is the gradient step of a convex function, OptEq's for instance. One
    evaluation of the map per step; every sample restarts and shortens its steps by itself:

    - momentum restarts where it points uphill (O'Donoghue and Candes 2015), and where the merit has risen;
    - a plain step that raises both the merit and the residual is taken back, and the share s is halved. For convex
      penalties ``T(z) - z`` is a direction of descent whatever the problem's step length, so that this ends;
    - s also falls where the curvature that was met along the last move does not allow it.

    Args:
        damping: the share s to begin with; None takes what the problem recommends, else 1.
        measure: what ``tol`` bounds. ``"residual"`` is ``|T(y) - y| / |T(y)|`` as for every solver. ``"error"``
            multiplies it by ``|dy| / |d(T(y) - y)|`` along the last moves, at least 1: an estimate of the relative
            distance to the solution, which in a problem of condition number k is up to k times the residual.

    >>> import torch
    >>> outcome = FISTA(tol=1e-6).solve(lambda y: 0.5 * y + 1, torch.zeros(1, 1))
    >>> round(float(outcome.state), 4)
    2.0
    """

    max_steps: int = 200
    damping: float | None = None
    measure: str = "residual"

    takes_every_step: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.damping is not None:
            share(self, "damping")
        if self.measure not in _MEASURES:
            raise ValueError(f"FISTA.measure should be one of {', '.join(_MEASURES)}; got {self.measure!r}")

    def _process(self, task: Task) -> tuple[Method | None, Process]:
        damping = task.damping if self.damping is None else self.damping
        return None, AcceleratedIteration(task, damping, self.floor, self.measure == "error")


class AcceleratedIteration:
    """A :class:`~opteq.solvers.loop.Process` of accelerated steps.

    ``point`` is where the map was evaluated last (z), ``main`` the step from there (y).
    """

    def __init__(self, task: Task, damping: float | Tensor, floor: float, error: bool) -> None:
        self.evaluate = task.evaluate
        self.admissible = task.admissible
        self.point = self.main = task.start
        self.image, self.merit = task.known
        self.floor, self.eps, self.error = floor, max(task.eps, torch.finfo(task.start.dtype).eps), error
        rows = row_norms(task.start)
        self.most = torch.zeros_like(rows) + (damping[:, 0] if isinstance(damping, Tensor) else damping)
        self.share = self.most
        self.age = torch.zeros_like(rows)  # steps since the last restart
        self.amplified = torch.ones_like(rows)  # |dy| / |d(T(y) - y)|
        self.codes: Tensor | None = None

    def first(self) -> tuple[Tensor, Tensor]:
        """The start and its residual."""
        self.change = self.image - self.point
        self.gap = row_norms(self.change)
        self.residual = relative(self.gap, row_norms(self.image), self.floor)
        if self.error:  # one point alone tells nothing about distances, unless it is a fixed point
            return self.point, torch.where(self.gap == 0, self.residual, self.residual.clamp_min(1.0))
        return self.point, self.residual

    def advance(self, active: Tensor) -> tuple[Tensor, Tensor]:
        """One accelerated step, judged."""
        main = torch.addcmul(self.point, _column(self.share, self.change), self.change)
        ahead = main - self.main
        uphill = (self.change * ahead).sum(dim=1) < 0
        age = torch.where(uphill, 0.0, self.age)
        # A share may have been too small for a while only: where momentum is lost anyway, a longer step is tried.
        longer = torch.where(uphill & active, torch.minimum(1.5 * self.share, self.most), self.share)
        plain = age == 0
        proposal = torch.addcmul(main, _column(age / (age + 3), ahead), ahead)
        proposal = self.admissible(proposal)
        image, merit = self.evaluate(proposal)
        change = image - proposal
        gap = row_norms(change)
        residual = relative(gap, row_norms(image), self.floor)

        move, turn = proposal - self.point, self.change - change
        far, turned = row_norms(move), row_norms(turn)
        met = (move * turn).sum(dim=1).to(far.dtype) / far.square().clamp_min(torch.finfo(far.dtype).tiny)
        # Differences of nearby points are rounded: what is not much larger than that says nothing.
        rounding = self.eps * row_norms(proposal)
        steep = (far > 300 * rounding) & (self.share * met > 1.01)

        finite = torch.isfinite(residual)
        worse = gap > 1.01 * self.gap + 8 * rounding
        raised = worse & self._raised(merit)
        taken = active & finite & ~raised
        shorter = torch.where(steep & finite, self.share / (self.share * met).clamp(1.0, 4.0), longer)
        shorter = torch.where(plain & (raised | ~finite), self.share / 2, shorter)
        self.share = torch.where(active, shorter, self.share)
        self.age = torch.where(active, torch.where(taken & ~steep, age + 1, 0.0), self.age)
        ratio = (far / turned.clamp_min(torch.finfo(turned.dtype).tiny)).clamp(1.0, 1e12)
        # A move along a stiff direction says little about the distance along others: memory fades slowly.
        ratio = torch.maximum(ratio, 0.9 * self.amplified)
        self.amplified = torch.where(taken & (turned > 8 * rounding), ratio, self.amplified)
        lost = active & ~finite & plain & (self.share < 1e-12)
        self.codes = torch.where(lost, int(Status.NON_FINITE), 0)

        # A row that was taken back goes on from where it stood, with a plain step.
        self.main = choose_rows(taken, main, torch.where(active[:, None], self.point, self.main))
        self.point = choose_rows(taken, proposal, self.point)
        self.image = choose_rows(taken, image, self.image)
        self.change = choose_rows(taken, change, self.change)
        self.gap = torch.where(taken, gap, self.gap)
        self.residual = torch.where(taken, residual, self.residual)
        if merit is not None and self.merit is not None:
            self.merit = torch.where(taken, merit, self.merit)
        return self.point, self._estimated_error() if self.error else self.residual

    def breakdowns(self) -> Tensor | None:
        """Rows where even the shortest step is not finite."""
        return self.codes

    def _estimated_error(self) -> Tensor:
        # Where the residual is down to the map's rounding, no further step comes closer.
        beyond = (self.residual - 4 * self.eps).clamp_min(0)
        return self.residual + (self.amplified - 1) * beyond

    def _raised(self, merit: Tensor | None) -> Tensor:
        if merit is None or self.merit is None:
            return torch.zeros_like(self.gap, dtype=torch.bool)
        rounding = 64 * self.eps * self.merit.abs()
        return ~(merit <= self.merit + rounding)


def _column(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers.to(like.dtype)[:, None]
