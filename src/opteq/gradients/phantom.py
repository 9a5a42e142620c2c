"""Gradients through a few recorded steps at the equilibrium: the one-step gradient and phantom gradients."""

from __future__ import annotations

from dataclasses import dataclass

from opteq.common.validate import share, whole
from opteq.gradients.base import Gradient, Record, attach_approximate, find_no_grad
from opteq.problems.hidden import BoundMap
from opteq.solvers import Outcome, Solver
from opteq.states import State, map_state


@dataclass(frozen=True)
class OneStep(Gradient):
    """Differentiate a single step at the equilibrium: the cheapest gradient, with I in place of ``(I - J')^-1``."""

    def run(self, hidden: BoundMap, solver: Solver, start: State | None, record: Record) -> tuple[State, Outcome]:
        """Solve without autograd, then record one step."""
        return _with_steps(hidden, solver, start, record, 1, 1.0, "one step")


@dataclass(frozen=True)
class Phantom(Gradient):
    """Differentiate ``steps`` damped steps ``y <- (1 - damping) y + damping T(y)`` taken from the equilibrium.

    That is the truncated series ``sum damping ((1 - damping) I + damping J')^j g``, which tends to the exact gradient
    as ``steps`` grows where the damped step contracts. Memory grows with ``steps``.

    Args:
        steps: number of steps; GEQ's authors use five with damping 0.8.
        damping: share of the new value in each.
    """

    steps: int = 5
    damping: float = 0.8

    def __post_init__(self) -> None:
        whole(self, "steps")
        share(self, "damping")

    def run(self, hidden: BoundMap, solver: Solver, start: State | None, record: Record) -> tuple[State, Outcome]:
        """Solve without autograd, then record the damped steps."""
        name = f"{self.steps} phantom steps of {self.damping}"
        return _with_steps(hidden, solver, start, record, self.steps, self.damping, name)


def _with_steps(
    hidden: BoundMap, solver: Solver, start: State | None, record: Record, steps: int, damping: float, name: str
) -> tuple[State, Outcome]:
    """The equilibrium with the gradient of damped steps from there."""
    state, outcome = find_no_grad(hidden, solver, start)
    reached = state
    for _ in range(steps):
        image = hidden.step(reached)
        reached = image if damping == 1 else map_state(lambda a, b: a + damping * (b - a), reached, image)
    return attach_approximate(state, reached, record, name, steps), outcome
