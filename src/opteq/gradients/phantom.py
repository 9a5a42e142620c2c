"""Phantom gradients: a few damped steps on a tape, begun at the equilibrium."""

from __future__ import annotations

from dataclasses import dataclass

from opteq._validate import share, whole
from opteq.gradients.base import Gradient, Record, approximate
from opteq.gradients.forward import find_without_tape
from opteq.gradients.replay import Steps, differentiated_steps
from opteq.problems.hidden import BoundMap
from opteq.solvers import Outcome, Solver
from opteq.states import State


@dataclass(frozen=True)
class Phantom(Gradient):
    """Differentiate ``steps`` damped steps ``y <- (1 - damping) y + damping T(y)`` taken from the equilibrium.

    That is the truncated series ``sum damping ((1 - damping) I + damping J')^j g``, which tends to the exact gradient
    as ``steps`` grows where the damped step contracts. Memory grows with ``steps``.

    Args:
        steps: how many; five of 0.8 are what GEQ's authors use.
        damping: share of the new value in each.
    """

    steps: int = 5
    damping: float = 0.8

    def __post_init__(self) -> None:
        whole(self, "steps")
        share(self, "damping")

    def run(self, hidden: BoundMap, solver: Solver, start: State | None, record: Record) -> tuple[State, Outcome]:
        """Solve without a tape, then put the damped steps on one."""
        state, outcome = find_without_tape(hidden, solver, start)
        report = approximate(f"{self.steps} phantom steps of {self.damping}", state, self.steps)
        return differentiated_steps(hidden, state, Steps(self.steps, self.damping), lambda: record(report)), outcome
