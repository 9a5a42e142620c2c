"""What every gradient is: a way to run the solver and to make its answer differentiable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from opteq.problems.hidden import BoundMap
from opteq.solution import Report
from opteq.solvers import Outcome, Solver, Status
from opteq.states import State, blocks, map_state

Record = Callable[[Report], None]


@dataclass(frozen=True)
class Gradient(ABC):
    """How an equilibrium is differentiated. It is independent of how the equilibrium is found."""

    @abstractmethod
    def run(self, hidden: BoundMap, solver: Solver, start: State | None, record: Record) -> tuple[State, Outcome]:
        """Solve, and return the state with its gradient attached together with the solver's outcome.

        Args:
            hidden: the problem with its input bound.
            solver: finds the equilibrium.
            start: where to begin; None leaves it to the problem.
            record: called in the backward pass with its report.
        """

    def evaluate(self, hidden: BoundMap, solver: Solver, start: State | None) -> tuple[State, Outcome]:
        """Solve where no gradient is wanted."""
        return find_without_tape(hidden, solver, start)


def find(hidden: BoundMap, solver: Solver, start: State | None) -> Outcome:
    """The equilibrium of ``hidden``, written for features where the solver works there."""
    if not solver.works_on_features:
        return solver.solve(
            hidden.step,
            hidden.start() if start is None else start,
            measured=hidden.measured,
            project=hidden.project,
            damping=hidden.damping,
            coupled=hidden.coupled,
        )
    form = hidden.feature_form()
    first = form.start if start is None else hidden.features(start)
    outcome = solver.solve(form.step, first, damping=hidden.damping, coupled=hidden.coupled)
    return replace(outcome, state=form.state(outcome.state))


def find_without_tape(hidden: BoundMap, solver: Solver, start: State | None) -> tuple[State, Outcome]:
    """The equilibrium as a constant: nothing of the way to it is kept for the backward pass."""
    with torch.no_grad():
        outcome = find(hidden, solver, start)
    return map_state(lambda part: part.detach(), outcome.state), outcome


def wants_gradient(state: State) -> bool:
    """Whether anything depends on the state through a tape."""
    return any(part.requires_grad for part in blocks(state))


def approximate(method: str, state: State, steps: int) -> Report:
    """The backward report of a gradient that solves no system."""
    first = blocks(state)[0]
    batch = first.shape[0]
    return Report(
        method=method,
        residual=first.new_full((batch,), torch.nan, dtype=torch.float32),
        steps=torch.full((batch,), steps, dtype=torch.int64, device=first.device),
        codes=torch.full((batch,), int(Status.APPROXIMATE), dtype=torch.int64, device=first.device),
        tol=float("nan"),
    )
