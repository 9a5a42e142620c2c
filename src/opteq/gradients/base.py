"""What every gradient is: a way to run the solver and to make its answer differentiable."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from opteq.common.options import NamedOptions
from opteq.gradients.forward import find_no_grad
from opteq.problems.hidden import BoundMap
from opteq.solution import Report
from opteq.solvers import Outcome, Solver, Status
from opteq.states import State, blocks

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
        return find_no_grad(hidden, solver, start)


def wants_gradient(state: State) -> bool:
    """Whether autograd tracks the state."""
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
