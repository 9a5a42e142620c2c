"""The one-step gradient: a single step on a tape."""

from __future__ import annotations

from dataclasses import dataclass

from opteq.gradients.base import Gradient, Record, approximate
from opteq.gradients.forward import find_without_tape
from opteq.gradients.replay import Steps, differentiated_steps
from opteq.problems.hidden import BoundMap
from opteq.solvers import Outcome, Solver
from opteq.states import State


@dataclass(frozen=True)
class OneStep(Gradient):
    """Differentiate a single step at the equilibrium: the cheapest gradient, with ``(I - J')^-1`` taken for I."""

    def run(self, hidden: BoundMap, solver: Solver, start: State | None, record: Record) -> tuple[State, Outcome]:
        """Solve without a tape, then put one step on it."""
        state, outcome = find_without_tape(hidden, solver, start)
        report = approximate("one step", state, 1)
        return differentiated_steps(hidden, state, Steps(), lambda: record(report)), outcome
