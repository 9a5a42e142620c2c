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
from opteq.states import choose_rows, norms_of_rows, per_row, surely_all, zeros_per_row

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
        change: ``T(z) - z``.
        gap, residual, size: norm of the change; that and the norm of z, relative to ``T(z)``.
        share: s, how much of a step is taken.
        age: steps since the last restart.
        amplified: ``|dy| / |d(T(y) - y)|`` along the last moves.
        stiffness: the inverse of that, along the last move that was larger than rounding.
        guide: the objective at z, or where the problem offers none, the least gap so far.
    """

    point: Tensor
    main: Tensor
    change: Tensor
    gap: Tensor
    residual: Tensor
    size: Tensor
    share: Tensor
    age: Tensor
    amplified: Tensor
    stiffness: Tensor
    guide: Tensor


class AcceleratedIteration:
    """A :class:`~opteq.solvers.loop.Process` of accelerated steps. Rows that are finished go on: nothing reads them."""

    def __init__(self, task: RowTask, damping: float | Tensor, floor: float, error: bool) -> None:
        self.evaluate = task.evaluate
        self.admissible = task.admissible
        self.floor, self.eps, self.error = floor, max(task.eps, torch.finfo(task.start.dtype).eps), error
        image, merit = task.known
        change = image - task.start
        gap, scale, size = norms_of_rows(change, image, task.start)
        residual, size = relative(gap, scale, floor), relative(size, scale, floor)
        age, ones = zeros_per_row(task.start), torch.ones_like(gap)
        self.most = ones * (damping[:, 0] if isinstance(damping, Tensor) else damping)
        numbers = (gap, residual, size, self.most, age, ones, ones)
        self.at = Point(task.start, task.start, change, *numbers, gap if merit is None else merit)
        self.estimate = _ASSUMED * residual

    @property
    def point(self) -> Tensor:
        """Where the map was evaluated last, of those that were taken."""
        return self.at.point

    def first(self) -> tuple[Tensor, Tensor]:
        return self.at.point, self.estimate if self.error else self.at.residual

    def advance(self, active: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        proposal, step = propose(self.most, self.at)
        proposal = self.admissible(proposal)
        image, merit = self.evaluate(proposal)
        self.at, self.codes = accept(proposal, image, merit, step, self.at, self.eps, self.floor)
        return self.at.point, self._estimated_error() if self.error else self.at.residual

    def _estimated_error(self) -> Tensor:
        # The residual that rounding of the state leaves grows with the curvature. Below it no step comes closer.
        at = self.at
        stiff = (torch.minimum(at.stiffness, at.share.reciprocal()) * at.size).clamp_min(1)
        beyond = torch.sub(at.residual, stiff, alpha=4 * self.eps)
        error = torch.maximum(torch.addcmul(at.residual, at.amplified - 1, beyond), _FADING * self.estimate)
        known = beyond > 0
        self.estimate = error if surely_all(known) else torch.where(known, error, at.residual / stiff)
        return self.estimate


@overridable
def propose(most: Tensor, at: Point) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Where the map is evaluated next: ahead of the next main point. That, its age, and a share to try."""
    main = torch.addcmul(at.point, per_row(at.share, at.change), at.change)
    ahead = main - at.main
    slope, age, longer = (at.change * ahead).sum(dim=1), at.age, at.share
    if not surely_all(slope >= 0):
        age = age.masked_fill(slope < 0, 0.0)
        # A share may have been too small for a while only: where momentum is lost anyway, a longer step is tried.
        longer = torch.where(slope < 0, torch.minimum(1.5 * longer, most), longer)
    return torch.addcmul(main, per_row(age / (age + 3), ahead), ahead), (main, age, longer)


@overridable
def accept(
    proposal: Tensor, image: Tensor, merit: Tensor | None, step: tuple[Tensor, ...], at: Point, eps: float, floor: float
) -> tuple[Point, Tensor]:
    """The proposal, where it is no worse than the point before; and status codes of rows that are lost."""
    (main, age, longer), change = step, image - proposal
    move, drop = proposal - at.point, at.change - change
    gap, scale, size, moved, dropped = norms_of_rows(change, image, proposal, move, drop)
    scale = scale.clamp(min=floor)
    residual = gap / scale
    noise = 8 * eps * size  # Differences of nearby points are rounded: what is not much larger says nothing.
    amplified, stiffness = _slopes(at, moved, dropped, noise)
    curvature = at.share * (move * drop).sum(dim=1)  # times the square of the move
    limit = moved * torch.maximum(1.01 * moved, torch.add(moved, noise, alpha=0.125))  # with what rounding may add
    plain = age == 0
    if merit is None:  # momentum should not raise the gap
        guide, fallen, bounded = torch.fmin(gap, at.guide), plain | (gap <= at.guide + noise), residual < torch.inf
    else:  # which is rounded: near the solution it changes by less
        guide, bounded = merit, residual - merit < torch.inf
        fallen = merit <= torch.add(at.guide, at.guide.abs(), alpha=64 * eps)
    numbers = (gap, residual, size / scale, longer, age + 1, amplified, stiffness, guide)
    new, codes = Point(proposal, main, change, *numbers), torch.zeros_like(gap, dtype=torch.int64)
    if surely_all(fallen & bounded & (curvature <= limit)):
        return new, codes

    finite, steep = residual < torch.inf, curvature > limit
    if merit is not None:
        outside = ~(merit < torch.inf) & (at.guide < torch.inf)  # of the objective's domain: a log's, for instance
        fallen = fallen | ~(outside | (gap > 1.01 * at.gap + noise))
    taken = finite & fallen
    square = moved.square().clamp_min(torch.finfo(moved.dtype).tiny)
    share = torch.where(steep & finite, at.share / (curvature / square).clamp(1.0, 4.0), longer)
    share = torch.where(plain & ~taken, at.share / 2, share)
    lost = ~finite & plain & (share < 1e-12)
    if merit is not None:  # an objective without a lower bound overflows, before the state does
        lost = lost | (merit == -torch.inf)
    old = at._replace(main=at.point)  # A row that was taken back goes on from where it stood, with a plain step.
    kept = Point(*(choose_rows(taken, *parts) for parts in zip(new, old, strict=True)))
    return kept._replace(share=share, age=new.age * (taken & ~steep)), codes.masked_fill(lost, int(Status.NON_FINITE))


def _slopes(at: Point, moved: Tensor, dropped: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """``amplified`` and ``stiffness`` from the lengths of the last move and of how the change fell along it."""
    ratio, stiffness = moved / dropped, dropped / moved
    # A move along a stiff direction says little about the distance along others: memory fades slowly.
    memory = 0.9 * at.amplified
    if surely_all(torch.minimum(moved, dropped) > noise):
        return torch.maximum(ratio.clamp(1.0, 1e12), memory), stiffness
    # A change that stays the same but for rounding may be that of a slope without an end in sight.
    ratio = torch.where(dropped > noise, ratio, (moved / noise).clamp_min(_ASSUMED))
    amplified = torch.maximum(ratio.clamp(1.0, 1e12), memory)
    amplified = torch.where(torch.maximum(moved, dropped) > noise, amplified, at.amplified)
    return amplified, torch.where(8 * moved > noise, stiffness, at.stiffness)
