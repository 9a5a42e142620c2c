"""The base class of gradients: solve a bound problem and make the equilibrium differentiable."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from opteq import engine
from opteq.common.options import NamedOptions
from opteq.problems.hidden import BoundMap, Formulation
from opteq.solution import Report
from opteq.solvers import Outcome, Solver, Status
from opteq.states import State, blocks, is_tracked, map_state, surely_finite

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
    return any(is_tracked(part) for part in blocks(state))


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


def formulate(hidden: BoundMap, solver: Solver, start: State | None, same_steps: bool) -> Formulation:
    """The problem for the variable of ``solver``: the smallest one, unless every step is to be one of the state.

    That is what ``same_steps`` or a tolerance of 0 asks for, for a network that consists of a number of them.
    ``start`` is a state, or None for the problem's own.
    """
    if solver.works_on_features:
        other: Formulation | None = hidden.feature_form()
    else:
        other = None if same_steps or solver.tol == 0 else hidden.compact_form()
    form = hidden.state_form() if other is None else replace(other, state=partial(_finite_state, other))
    return form if start is None else replace(form, task=replace(form.task, start=form.of_state(start)))


def _finite_state(form: Formulation, found: State) -> State:
    """The state of a variable. It may be finite where its state is not, an input of NaN for instance."""
    return map_state(lambda p: p if surely_finite(p) else torch.where(torch.isfinite(p), p, 0.0), form.state(found))


def find(hidden: BoundMap, solver: Solver, start: State | None, same_steps: bool = True) -> Outcome:
    """The equilibrium of ``hidden`` with all that the solver learned, differentiable where autograd is enabled."""
    form = formulate(hidden, solver, start, same_steps)
    outcome = solver.run(form.task)
    return replace(outcome, state=form.state(outcome.state))


def find_no_grad(
    hidden: BoundMap, solver: Solver, start: State | None, same_steps: bool = False, keep_inverse: bool = False
) -> tuple[State, Outcome]:
    """The equilibrium as a constant: nothing of the iterations is kept for the backward pass.

    ``keep_inverse`` where the solver's estimate of the inverse Jacobian, on states, is needed.
    """
    with torch.no_grad():
        outcome = None if keep_inverse else engine.solve(hidden, solver, start, same_steps)
        outcome = outcome or find(hidden, solver, start, same_steps or keep_inverse)
    return map_state(Tensor.detach, outcome.state), outcome
