"""The one-step gradient: a single step on a tape."""

from __future__ import annotations

from dataclasses import dataclass

from opteq.gradients.attach import attach
from opteq.gradients.base import Gradient, Record, approximate, find_no_grad, wants_gradient
from opteq.problems.hidden import BoundMap
from opteq.solvers import Outcome, Solver
from opteq.states import State


@dataclass(frozen=True)
class OneStep(Gradient):
    """Differentiate a single step at the equilibrium: the cheapest gradient, with ``(I - J')^-1`` taken for I."""

    def run(self, hidden: BoundMap, solver: Solver, start: State | None, record: Record) -> tuple[State, Outcome]:
        """Solve without a tape, then put one step on it."""
        state, outcome = find_no_grad(hidden, solver, start)
        image = hidden.step(state)
        if not wants_gradient(image):
            return state, outcome
        report = approximate("one step", state, 1)
        return attach(state, image, notice=lambda: record(report)), outcome
