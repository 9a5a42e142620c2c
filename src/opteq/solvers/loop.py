"""The loop: one stopping rule, one best-so-far rule, finished samples frozen. Every solver runs in it.

A solver brings what happens between two measurements of the residual, a :class:`Process`. That of most fixed-point
solvers is a :class:`GuardedIteration`: a :class:`Method` proposes, and what makes things worse is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from opteq.solvers.status import Status
from opteq.states import Layout, any_row, choose_rows, norms_of_rows

Map = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""A map on matrices with one row per sample: its image, and a merit per row where the problem has one."""


@dataclass(frozen=True)
class RowTask:
    """A fixed-point task on matrices with one row per sample, evaluated at its start: what the methods of solvers get.

    Attributes:
        evaluate: the map.
        admissible: the nearest point at which the objective is finite.
        start: the first point.
        known: the map at ``start``, which had to be evaluated to learn its dtype.
        layout: how rows are states.
        damping: what the problem recommends: a number, or a column with one per row.
        eps: rounding of the map.
    """

    evaluate: Map
    admissible: Callable[[Tensor], Tensor]
    start: Tensor
    known: tuple[Tensor, Tensor | None]
    layout: Layout
    damping: float | Tensor
    eps: float


class Method(ABC):
    """The part of a solver that differs: how the next point is proposed from what was seen."""

    growth: float = 2.0
    """How far ``|T(y) - y|`` may rise above its least value where the problem has no merit to accept proposals by."""

    shortens: bool = False
    """Whether :meth:`shorten` does anything."""

    @abstractmethod
    def propose(self, point: Tensor, image: Tensor, change: Tensor, active: Tensor) -> Tensor:
        """The next point, from a point, ``image = T(point)`` and their difference ``change = image - point``.

        Rows outside ``active`` are finished.
        """

    def plain(self) -> Tensor | None:
        """Rows whose last proposal was a plain step (None: all)."""
        return None

    def restart(self, rows: Tensor) -> None:  # noqa: B027 - a method without memory has nothing to forget
        """Forget what was seen in these rows."""

    def shorten(self, rows: Tensor) -> None:  # noqa: B027 - see shortens
        """Take steps of half the length in these rows from now on."""

    inverse_adjoint: Callable[[Tensor], Tensor] | None = None
    """Applies the transpose of an estimate of ``(I - J)^-1``, which some methods gather, to every row of a matrix."""


FAR = 10.0
"""How many times the least ``|T(y) - y|`` of a row that of its answer may be, unless it has converged."""


class Process(Protocol):
    """The part of a method between two evaluations of the residual. Points are matrices with one row per sample.

    Attributes:
        codes: after a step, a status code per row: above zero where the method cannot go on.
    """

    codes: Tensor

    def first(self) -> tuple[Tensor, Tensor]:
        """The starting point ``(R, N)`` and its relative residual ``(R,)``."""

    def advance(self, active: Tensor) -> tuple[Tensor, Tensor]:
        """The next point and its residual; rows outside ``active`` are finished and may hold anything."""


@dataclass(frozen=True)
class Rule:
    """When to stop.

    Args:
        tol: largest relative residual that counts as converged.
        max_steps: number of steps at most.
        check_every: steps between two checks of the host whether all rows have finished. A check synchronises a GPU.
            Finished rows are frozen on the device in any case, so answers do not depend on it.
        to_the_end: take every step and return the last point: for methods whose early points have a small
            residual without being what is sought, and for a fixed number of steps.
    """

    tol: float
    max_steps: int
    check_every: int = 1
    to_the_end: bool = False


@dataclass(frozen=True)
class Finish:
    """Where rows stand: best point ``(R, N)``, its residual, steps taken, status code, and the residual's history.

    ``point`` may be the parts of a state instead, for an :class:`Iteration` that works on these directly.
    """

    point: Tensor | tuple[Tensor, ...]
    residual: Tensor
    steps: Tensor
    codes: Tensor
    trace: Tensor

    def per_sample(self, layout: Layout) -> Finish:
        """The same with a value per sample: coupled samples share those of their row."""
        each = {name: layout.per_sample(getattr(self, name)) for name in ("residual", "steps", "codes")}
        return replace(self, **each, trace=self.trace.expand(-1, layout.batch) if layout.coupled else self.trace)


class Iteration(Protocol):
    """A solve in progress. None of its methods synchronises with the device."""

    rule: Rule

    def begin(self) -> None:
        """Measure the start."""

    def advance(self) -> None:
        """One step for all rows that are not finished."""

    def unfinished(self) -> Tensor:
        """Rows that are neither converged nor broken down, ``(R,)``: true there, or 1."""

    def finish(self) -> Finish:
        """Where every row stands now."""


class Loop:
    """The bookkeeping of a solve in tensor operations: it works on every device, under autograd and under vmap.

    A row's answer is its first point within the tolerance, else the finite point with the least residual; a process
    says that a point is no candidate by an infinite one.
    ``steps`` counts updates, so a start that is already an equilibrium takes 0, and the residual is always that
    of the point returned. NaN compares false and is chosen with ``where``, so it never replaces a finite point.
    """

    def __init__(self, process: Process, rule: Rule) -> None:
        self.process = process
        self.rule = rule
        self.enough = -1.0 if rule.to_the_end else rule.tol  # a residual that ends a row

    def begin(self) -> None:
        self.best, residual = self.process.first()
        finite = torch.isfinite(residual)
        self.best_residual = torch.where(finite, residual, torch.inf)
        self.steps = torch.zeros_like(residual, dtype=torch.int64)
        self.broken = torch.where(finite, 0, int(Status.NON_FINITE))
        self.trace = [residual]
        self.active = (self.broken == 0) & (self.best_residual > self.enough)

    def advance(self) -> None:
        rule, active = self.rule, self.active
        point, residual = self.process.advance(active)
        chosen = active & (residual < (torch.inf if rule.to_the_end else self.best_residual))
        self.best = choose_rows(chosen, point, self.best)
        self.best_residual = torch.where(chosen, residual, self.best_residual)
        self.steps = self.steps + active
        self.broken = torch.where(active, self.process.codes, self.broken)
        self.trace.append(torch.where(active, residual, self.trace[-1]))
        self.active = (self.broken == 0) & (self.best_residual > self.enough)

    def unfinished(self) -> Tensor:
        return self.active

    def finish(self) -> Finish:
        ended = torch.where(self.broken > 0, self.broken, int(Status.MAX_STEPS))
        codes = torch.where(self.best_residual <= self.rule.tol, int(Status.CONVERGED), ended)
        return Finish(self.best, self.best_residual, self.steps, codes, torch.stack(self.trace))


def iterate(iteration: Iteration) -> None:
    """Advance until every row has converged or failed, or the steps are used up."""
    iteration.begin()
    rule = iteration.rule
    for step in range(rule.max_steps):
        if (step + 1) % rule.check_every == 0 and not any_row(iteration.unfinished(), of_all=True):
            break
        iteration.advance()


def relative(change: Tensor, scale: Tensor, floor: float) -> Tensor:
    """The relative residual ``change / max(scale, floor)`` of two norms per row."""
    return change / scale.clamp(min=floor)


class GuardedIteration:
    """A :class:`Process` that moves a batch of points towards ``y = T(y)``.

    Extrapolating methods can overshoot. A proposal is taken where it is a plain step, or does not raise the merit (a
    small residual alone does not count: saddles have one); without a merit, where ``|T(y) - y|`` is at most a few times
    its least value. That length is not divided by ``|T(y)|`` as the stopping rule does: far out along a direction that
    T hardly shrinks the quotient is small, and a row that was drawn there would be kept from coming back. For the same
    reason a point whose ``|T(y) - y|`` is over :data:`FAR` times the least one is no answer unless it is within the
    tolerance: where T expands, plain steps lead to points of any size, whose quotient is below that of the start.
    A ``tol`` of None is for a number of steps whose last point is the answer.

    A refused row stays where it is and forgets its history, so that its next step is plain. Plain steps count: they
    decrease a merit by its definition, and without one there is nothing better to do. Only where a plain step raises
    both the merit and ``|T(y) - y|``, because the curvature is larger there than the problem knew, or leaves the domain
    of the merit, it is taken back and the next ones are shorter, for methods that can do that.
    """

    def __init__(self, task: RowTask, method: Method, floor: float, tol: float | None) -> None:
        self.evaluate = task.evaluate
        self.admissible = task.admissible
        self.point = task.start
        self.image, self.merit = task.known
        self.method = method
        self.floor = floor
        self.tol = tol
        self.eps = task.eps

    def first(self) -> tuple[Tensor, Tensor]:
        self.change, self.gap, residual = self._measured(self.point, self.image)
        self.least = self.gap
        return self.point, residual

    def advance(self, active: Tensor) -> tuple[Tensor, Tensor]:
        proposal = self.admissible(self.method.propose(self.point, self.image, self.change, active))
        image, merit = self.evaluate(proposal)
        change, gap, residual = self._measured(proposal, image)
        lost = ~(residual < torch.inf)
        plain = self.method.plain()
        self.codes = (lost if plain is None else lost & plain) * int(Status.NON_FINITE)
        if plain is None:
            self.point, self.image, self.merit, self.change = proposal, image, merit, change
        else:
            harmless = self._harmless(gap, merit)
            taken = active & ~lost & (plain | harmless)
            if merit is not None and self.merit is not None and self.method.shortens:
                # Plain steps decrease the merit unless the problem's step length is too large for it here.
                outside = ~(merit < torch.inf) & torch.isfinite(self.merit)
                long = active & plain & ~harmless & ((gap > 1.01 * self.gap) | outside)
                taken = taken & ~long
                self.method.shorten(long)
            self.method.restart(active & ~taken)
            self.gap = torch.where(taken, gap, self.gap)
            self.point = choose_rows(taken, proposal, self.point)
            self.image = choose_rows(taken, image, self.image)
            self.change = choose_rows(taken, change, self.change)
            if merit is not None and self.merit is not None:
                self.merit = torch.where(taken, merit, self.merit)
        self.least = torch.fmin(self.least, gap)
        if self.tol is None:
            return proposal, residual
        far = (gap > FAR * self.least) & (residual > self.tol)
        return proposal, residual.masked_fill(far, torch.inf)

    def _harmless(self, gap: Tensor, merit: Tensor | None) -> Tensor:
        if merit is None or self.merit is None:
            return gap <= self.method.growth * self.least
        # Close to the solution the merit changes by less than it is rounded; that is no reason to refuse.
        rounding = 64 * self.eps * self.merit.abs()
        return merit <= self.merit + rounding

    def _measured(self, point: Tensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``image - point``, its length, and that relative to the length of the image."""
        change = image - point
        gap, size = norms_of_rows(change, image)
        return change, gap, relative(gap, size, self.floor)
