"""FISTA: accelerated proximal gradient steps with adaptive restarts and step lengths, per sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from opteq.common.override import overridable
from opteq.common.validate import choice
from opteq.solvers.base import DampedSolver
from opteq.solvers.loop import Method, Process, RowTask, relative
from opteq.solvers.status import Status
from opteq.states import choose_rows, per_row, row_norms

_MEASURES = ("residual", "error")
_ASSUMED, _FADING = 1e4, 0.25
"""A few moves along stiff directions say little about the others: a condition number of 1e4 is assumed at the start,
and the estimated error falls to a quarter at most from step to step."""


@dataclass(frozen=True, kw_only=True)
class FISTA(DampedSolver):
    """Accelerated steps ``y <- z + s (T(z) - z)``, ``z <- y + beta (y - y_before)`` (Beck and Teboulle 2009).

    For an :class:`~opteq.Objective` T is a proximal gradient step, so this is the accelerated proximal gradient method.
    It also accelerates every other map that is the gradient step of a convex function, OptEq's for instance. A step
    evaluates the map once. Every sample has its own restarts and step lengths:

    - momentum restarts where it is no descent direction (O'Donoghue and Candes 2015), and where the merit has risen.
      Without a merit it restarts where ``|T(z) - z|`` is above its least value: on maps that are not gradient steps,
      momentum may cycle, while the plain steps of a contraction decrease it;
    - a plain step that increases both the merit and the residual is undone, and the share s is halved. This ends, since
      for convex penalties ``T(z) - z`` is a descent direction for every step length;
    - s is also reduced where the curvature along the last move is too large for it.

    Args:
        damping: the initial share s; None takes the problem's recommendation, else 1.
        measure: what ``tol`` bounds. ``"residual"`` is ``|T(y) - y| / |T(y)|`` as for every solver. ``"error"``
            multiplies it by ``|dy| / |d(T(y) - y)|`` along the last moves, at least 1: an estimate of the relative
            distance to the solution, which is up to k times the residual for condition number k. Use it where the
            objective has flat directions: a small residual does not mean a minimum there.

    >>> import torch
    >>> outcome = FISTA(tol=1e-6).solve(lambda y: 0.5 * y + 1, torch.zeros(1, 1))
    >>> round(float(outcome.state), 4)
    2.0
    """

    max_steps: int = 200
    measure: str = "residual"

    def __post_init__(self) -> None:
        super().__post_init__()
        choice(self, "measure", _MEASURES)

    def _process(self, task: RowTask) -> tuple[Method | None, Process]:
        return None, AcceleratedIteration(task, self._damping(task), self.floor, self.measure == "error")


class Point(NamedTuple):
    """Where accelerated iteration stands, per row.

    Attributes:
        point: z, where the map was evaluated last.
        main: y, the step that led there without momentum.
        image, change: ``T(z)`` and ``T(z) - z``.
        gap, residual: norm of the change, and relative to ``T(z)``.
        share: s, how much of a step is taken.
        age: steps since the last restart.
        amplified: ``|dy| / |d(T(y) - y)|`` along the last moves.
        stiffness: the inverse of that, along the last move that was larger than rounding.
        merit: the objective at z, where the problem offers it.
        least: the least gap so far.
    """

    point: Tensor
    main: Tensor
    image: Tensor
    change: Tensor
    gap: Tensor
    residual: Tensor
    share: Tensor
    age: Tensor
    amplified: Tensor
    stiffness: Tensor
    merit: Tensor | None
    least: Tensor


class AcceleratedIteration:
    """A :class:`~opteq.solvers.loop.Process` of accelerated steps."""

    def __init__(self, task: RowTask, damping: float | Tensor, floor: float, error: bool) -> None:
        self.evaluate = task.evaluate
        self.admissible = task.admissible
        self.floor, self.eps, self.error = floor, max(task.eps, torch.finfo(task.start.dtype).eps), error
        rows = row_norms(task.start)
        self.most = torch.zeros_like(rows) + (damping[:, 0] if isinstance(damping, Tensor) else damping)
        image, merit = task.known
        change = image - task.start
        gap = row_norms(change)
        residual = relative(gap, row_norms(image), floor)
        none, ones = torch.zeros_like(rows), torch.ones_like(rows)
        self.at = Point(task.start, task.start, image, change, gap, residual, self.most, none, ones, ones, merit, gap)
        self.estimate = _ASSUMED * residual

    @property
    def point(self) -> Tensor:
        """Where the map was evaluated last, of those that were taken."""
        return self.at.point

    def first(self) -> tuple[Tensor, Tensor]:
        return self.at.point, self.estimate if self.error else self.at.residual

    def advance(self, active: Tensor) -> tuple[Tensor, Tensor]:
        main, proposal, age, longer = propose(active, self.at, self.most)
        proposal = self.admissible(proposal)
        image, merit = self.evaluate(proposal)
        self.at, self.codes = accept(active, self.at, main, proposal, age, longer, image, merit, self.eps, self.floor)
        return self.at.point, self._estimated_error() if self.error else self.at.residual

    def _estimated_error(self) -> Tensor:
        # The residual that rounding of the state leaves grows with the curvature. Below it no step comes closer.
        at = self.at
        size = relative(row_norms(at.point), row_norms(at.image), self.floor)
        stiff = (torch.minimum(at.stiffness, 1 / at.share) * size).clamp_min(1)
        beyond = (at.residual - 4 * self.eps * stiff).clamp_min(0)
        error = torch.maximum(at.residual + (at.amplified - 1) * beyond, _FADING * self.estimate)
        self.estimate = torch.where(beyond > 0, error, at.residual / stiff)
        return self.estimate


@overridable
def propose(active: Tensor, at: Point, most: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The next main point, the one ahead of it where the map is evaluated, its age, and a share to try."""
    main = torch.addcmul(at.point, per_row(at.share, at.change), at.change)
    ahead = main - at.main
    uphill = (at.change * ahead).sum(dim=1) < 0
    age = torch.where(uphill, 0.0, at.age)
    # A share may have been too small for a while only: where momentum is lost anyway, a longer step is tried.
    longer = torch.where(uphill & active, torch.minimum(1.5 * at.share, most), at.share)
    return main, torch.addcmul(main, per_row(age / (age + 3), ahead), ahead), age, longer


@overridable
def accept(
    active: Tensor,
    at: Point,
    main: Tensor,
    proposal: Tensor,
    age: Tensor,
    longer: Tensor,
    image: Tensor,
    merit: Tensor | None,
    eps: float,
    floor: float,
) -> tuple[Point, Tensor]:
    """The proposal, where it is no worse than the point before; and status codes of rows that are lost."""
    plain = age == 0
    change = image - proposal
    gap = row_norms(change)
    residual = relative(gap, row_norms(image), floor)
    # Differences of nearby points are rounded: what is not much larger than that says nothing.
    rounding = eps * row_norms(proposal)
    finite = torch.isfinite(residual)
    raised = _is_raised(at, plain, gap, merit, rounding, eps)
    taken, bad = active & finite & ~raised, ~finite | raised

    move, drop = proposal - at.point, at.change - change
    moved, dropped = row_norms(move), row_norms(drop)
    curvature = (move * drop).sum(dim=1).to(moved.dtype) / moved.square().clamp_min(torch.finfo(moved.dtype).tiny)
    steep = at.share * curvature > (1 + rounding / moved).clamp_min(1.01)  # by more than rounding may have added
    shorter = torch.where(steep & finite, at.share / (at.share * curvature).clamp(1.0, 4.0), longer)
    shorter = torch.where(plain & bad, at.share / 2, shorter)
    share = torch.where(active, shorter, at.share)

    noise = (8 * rounding).clamp_min(torch.finfo(dropped.dtype).tiny)
    amplified = _amplification(at, moved, dropped, noise)
    lost = ~finite & plain & (share < 1e-12)
    if merit is not None:  # an objective without a lower bound overflows, before the state does
        lost = lost | (merit == -torch.inf)
    codes = torch.where(active & lost, int(Status.NON_FINITE), 0)
    accepted = Point(
        point=choose_rows(taken, proposal, at.point),
        # A row that was taken back goes on from where it stood, with a plain step.
        main=choose_rows(taken, main, torch.where(active[:, None], at.point, at.main)),
        image=choose_rows(taken, image, at.image),
        change=choose_rows(taken, change, at.change),
        gap=torch.where(taken, gap, at.gap),
        residual=torch.where(taken, residual, at.residual),
        share=share,
        age=torch.where(active, torch.where(taken & ~steep, age + 1, 0.0), at.age),
        amplified=torch.where(taken & (torch.maximum(moved, dropped) > noise), amplified, at.amplified),
        stiffness=torch.where(taken & (moved > rounding), dropped / moved, at.stiffness),
        merit=at.merit if merit is None or at.merit is None else torch.where(taken, merit, at.merit),
        least=torch.where(active, torch.fmin(gap, at.least), at.least),
    )
    return accepted, codes


def _is_raised(at: Point, plain: Tensor, gap: Tensor, merit: Tensor | None, rounding: Tensor, eps: float) -> Tensor:
    """Rows where merit and gap have risen by more than rounding; without a merit, where momentum raised the gap."""
    if merit is None or at.merit is None:
        return ~plain & (gap > at.least + 8 * rounding)
    outside = ~(merit < torch.inf) & torch.isfinite(at.merit)  # of the objective's domain: a log's, for instance
    worse = gap > 1.01 * at.gap + 8 * rounding
    return outside | (worse & ~(merit <= at.merit + 64 * eps * at.merit.abs()))


def _amplification(at: Point, moved: Tensor, dropped: Tensor, noise: Tensor) -> Tensor:
    """``|dy| / |d(T(y) - y)|`` along the last moves, from both lengths and the rounding of the second."""
    # A change that stays the same but for rounding may be that of a slope without an end in sight.
    ratio = (moved / torch.maximum(dropped, noise)).clamp(1.0, 1e12)
    ratio = torch.where((dropped <= noise) & (moved > noise), ratio.clamp_min(_ASSUMED), ratio)
    # A move along a stiff direction says little about the distance along others: memory fades slowly.
    return torch.maximum(ratio, 0.9 * at.amplified)
