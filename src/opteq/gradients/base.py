"""What every gradient is: a way to run the solver and to make its answer differentiable."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from opteq._options import NamedOptions
from opteq.gradients.forward import find_without_tape
from opteq.problems.hidden import BoundMap
from opteq.solution import Report
from opteq.solvers import Outcome, Solver, Status
from opteq.solvers.buffers import own
from opteq.states import State, blocks, map_state

Record = Callable[[Report], None]


@dataclass(frozen=True)
class Gradient(metaclass=NamedOptions):
    """How an equilibrium is differentiated. It is independent of how the equilibrium is found."""

    forward_mode: ClassVar[bool] = False
    """Whether forward-mode differentiation (``torch.func.jvp``) passes through."""

    @abstractmethod
    def run(
        self, hidden: BoundMap, solver: Solver, start: State | None, record: Record, state_too: bool = True
    ) -> tuple[State, Outcome]:
        """Solve, and return the state with its gradient attached together with the solver's outcome.

        Args:
            hidden: the problem with its input bound.
            solver: finds the equilibrium.
            start: where to begin; None leaves it to the problem.
            record: called in the backward pass with its report.
            state_too: whether anybody is going to see the state. Where not, and the outcome has features, the state
                need not carry a gradient.
        """

    def evaluate(
        self, hidden: BoundMap, solver: Solver, start: State | None, state_too: bool = True
    ) -> tuple[State, Outcome]:
        """Solve where no gradient is wanted; with a state that is not to be seen where only features are."""
        state, outcome = find_without_tape(hidden, solver, start, with_features=True, lend=not state_too)
        if outcome.known is not None:
            return state, replace(outcome, features=outcome.known[-1])
        if outcome.features is None:  # they are made of the state, or are the state
            return map_state(own, state), outcome
        return state, replace(outcome, features=map_state(own, outcome.features))


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
