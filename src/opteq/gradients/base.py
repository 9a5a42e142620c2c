"""What every gradient is: a way to run the solver and to make its answer differentiable."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from opteq._options import NamedOptions
from opteq.problems.hidden import BoundMap
from opteq.solution import Report
from opteq.solvers import Outcome, Solver, Status
from opteq.states import State, blocks, map_state

Record = Callable[[Report], None]


@dataclass(frozen=True)
class Gradient(metaclass=NamedOptions):
    """How an equilibrium is differentiated. It is independent of how the equilibrium is found."""

    forward_mode: ClassVar[bool] = False
    """Whether forward-mode differentiation (``torch.func.jvp``) passes through."""

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
    # Features may be finite where the state that belongs to them is not, an input of NaN for instance.
    state = map_state(
        lambda new, old: torch.where(torch.isfinite(new), new, old), form.state(outcome.state), hidden.start()
    )
    return replace(outcome, state=state)


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
