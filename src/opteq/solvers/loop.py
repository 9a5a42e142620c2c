"""The loop: one stopping rule, one best-so-far rule, finished samples frozen. Every solver here runs in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from opteq.solvers.status import Status
from opteq.states import any_row, choose_rows


class Process(Protocol):
    """What a method does between two looks at the residual. Points are matrices with a row a sample."""

    def first(self) -> tuple[Tensor, Tensor]:
        """The starting point ``(R, N)`` and its relative residual ``(R,)``."""
        ...

    def advance(self, active: Tensor) -> tuple[Tensor, Tensor]:
        """The next point and its residual; rows outside ``active`` are finished and may hold anything."""
        ...

    def dead_ends(self) -> Tensor | None:
        """A status code a row: above zero where the method cannot go on. None where that never happens."""
        ...


@dataclass(frozen=True)
class Rule:
    """When to stop.

    Args:
        tol: largest relative residual that counts as converged.
        max_steps: number of steps at most.
        check_every: how often the host looks at whether all rows have finished. Looking makes a GPU wait, and
            finished rows are frozen on the device in any case, so answers do not depend on it. More than ``max_steps``
            means never.
        to_the_end: take every step and return the last point: for methods whose early points have a small
            residual without being what is sought.
    """

    tol: float
    max_steps: int
    check_every: int = 1
    to_the_end: bool = False


@dataclass(frozen=True)
class Finish:
    """Where rows stand: best point, its residual, steps taken, status code, and the residual's history.

    ``point`` is a matrix with a row a sample, or the parts of a state where a run works on these directly. ``room`` is
    all of the memory whose beginning is ``trace``, where every tensor here is at the same place after every step.
    ``image`` is what the map makes of ``point``, in the form of it, where that was asked for and is known.
    """

    point: Tensor | tuple[Tensor, ...]
    residual: Tensor
    steps: Tensor
    codes: Tensor
    trace: Tensor
    room: Tensor | None = None
    image: tuple[Tensor, ...] | None = None


class Run(Protocol):
    """A solve in progress. Nothing here waits for the device; whoever drives it decides when to look."""

    rule: Rule

    def begin(self) -> None:
        """Measure the start."""
        ...

    def advance(self) -> None:
        """One step for all rows that are not finished."""
        ...

    def unfinished(self) -> Tensor:
        """Rows that are neither converged nor at a dead end, ``(R,)``: true there, or 1."""
        ...

    def finish(self) -> Finish:
        """Where every row stands now."""
        ...


class PlainRun:
    """The bookkeeping of a solve in tensor operations: it works on every device, on a tape and under vmap.

    A row's answer is its first point within the tolerance, else the finite point with the least residual.
    ``steps`` counts updates, so a start that is already an equilibrium takes 0, and the residual is always that
    of the point returned. NaN compares false and is chosen with ``where``, so it never replaces a finite point.
    """

    def __init__(self, process: Process, rule: Rule) -> None:
        self.process = process
        self.rule = rule

    def begin(self) -> None:
        """The start is the best so far."""
        self.best, residual = self.process.first()
        finite = torch.isfinite(residual)
        self.best_residual = torch.where(finite, residual, torch.inf)
        self.steps = torch.zeros_like(residual, dtype=torch.int64)
        self.dead = torch.where(finite, 0, int(Status.NON_FINITE))
        self.done = self.best_residual <= self.rule.tol
        self.trace = [residual]

    def advance(self) -> None:
        """Advance the process, and choose."""
        rule, active = self.rule, self.unfinished()
        point, residual = self.process.advance(active)
        self.chosen = active & (torch.isfinite(residual) if rule.to_the_end else residual < self.best_residual)
        self.best = choose_rows(self.chosen, point, self.best)
        self.best_residual = torch.where(self.chosen, residual, self.best_residual)
        self.done = self.best_residual <= rule.tol
        self.steps = self.steps + active
        ends = self.process.dead_ends()
        if ends is not None:
            self.dead = torch.where(active & ~self.done, ends, self.dead)
        self.trace.append(torch.where(active, residual, self.trace[-1]))

    def unfinished(self) -> Tensor:
        """Rows that go on."""
        return (self.dead == 0) if self.rule.to_the_end else ~self.done & (self.dead == 0)

    def finish(self) -> Finish:
        """The best points, and how they were reached."""
        codes = status_codes(self.done, self.dead)
        return Finish(self.best, self.best_residual, self.steps, codes, torch.stack(self.trace))


def status_codes(done: Tensor, dead: Tensor) -> Tensor:
    """A status a row from what ended it."""
    return torch.where(done, int(Status.CONVERGED), torch.where(dead > 0, dead, int(Status.MAX_STEPS)))


def drive(run: Run) -> None:
    """Run until every row has converged or failed, or the steps are used up."""
    run.begin()
    for step in range(run.rule.max_steps):
        if (step + 1) % run.rule.check_every == 0 and not any_row(run.unfinished(), unseen=True):
            break
        run.advance()


def relative(change: Tensor, scale: Tensor, floor: float) -> Tensor:
    """The relative residual ``change / max(scale, floor)`` of two norms a row."""
    return change / scale.clamp(min=floor)
