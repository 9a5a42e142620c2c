"""The loop: one stopping rule, one best-so-far rule, finished samples frozen. Every solver here runs in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from opteq.solvers.status import Status
from opteq.states import any_row


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
    """What the loop returns: a row's best point, its residual, steps taken, status code, and the residual's history."""

    point: Tensor
    residual: Tensor
    steps: Tensor
    codes: Tensor
    trace: Tensor


def iterate(process: Process, rule: Rule) -> Finish:
    """Run ``process`` until every row has converged or failed, or the steps are used up.

    A row's answer is its first point within the tolerance, else the finite point with the least residual.
    ``steps`` counts updates, so a start that is already an equilibrium takes 0, and the residual is always that
    of the point returned. NaN compares false and is chosen with ``where``, so it never replaces a finite point.
    """
    point, residual = process.first()
    best, best_residual = point, torch.where(torch.isfinite(residual), residual, torch.inf)
    steps = torch.zeros_like(residual, dtype=torch.int64)
    dead = torch.where(torch.isfinite(residual), 0, int(Status.NON_FINITE))
    done = best_residual <= rule.tol
    trace = [residual]
    for step in range(rule.max_steps):
        active = (dead == 0) if rule.to_the_end else ~done & (dead == 0)
        if (step + 1) % rule.check_every == 0 and not any_row(active, unseen=True):
            break
        point, residual = process.advance(active)
        chosen = active & (torch.isfinite(residual) if rule.to_the_end else residual < best_residual)
        best = torch.where(chosen[:, None], point, best)
        best_residual = torch.where(chosen, residual, best_residual)
        done = best_residual <= rule.tol
        steps = steps + active
        ends = process.dead_ends()
        if ends is not None:
            dead = torch.where(active & ~done, ends, dead)
        trace.append(torch.where(active, residual, trace[-1]))
    codes = torch.where(done, int(Status.CONVERGED), torch.where(dead > 0, dead, int(Status.MAX_STEPS)))
    return Finish(best, best_residual, steps, codes, torch.stack(trace))


def relative(change: Tensor, scale: Tensor, floor: float) -> Tensor:
    """The relative residual ``change / max(scale, floor)`` of two norms a row."""
    return change / scale.clamp(min=floor)
