"""Backpropagation through the solver's own steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from opteq.common.validate import whole
from opteq.gradients.base import Gradient, Record, attach_approximate, find, find_no_grad
from opteq.problems.hidden import BoundMap
from opteq.solvers import Outcome, Solver
from opteq.states import State


@dataclass(frozen=True)
class Unrolled(Gradient):
    """Differentiate through ``steps`` steps of the solver by autograd: the exact gradient of the computed result.

    The layer is then an ordinary network of that depth, in evaluation mode, too; its memory grows with ``steps``. The
    OptEq paper trains SAM in this way. Second derivatives work. In half precision unroll ``Picard``: Anderson and
    Broyden fit weights to rounded differences, and the derivatives of these weights are noise.

    Args:
        steps: replaces the solver's ``max_steps``.
    """

    steps: int = 20

    forward_mode: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole(self, "steps")

    def evaluate(self, hidden: BoundMap, solver: Solver, start: State | None) -> tuple[State, Outcome]:
        """The same number of steps without gradients, so that the network is the same in both modes."""
        return find_no_grad(hidden, replace(solver, max_steps=self.steps), start, same_steps=True)

    def run(self, hidden: BoundMap, solver: Solver, start: State | None, record: Record) -> tuple[State, Outcome]:
        outcome = find(hidden, replace(solver, max_steps=self.steps), start)
        quiet = replace(
            outcome, residual=outcome.residual.detach(), history=outcome.trace.detach(), inverse_adjoint=None
        )
        method = f"{self.steps} unrolled steps of {type(solver).__name__}"
        return attach_approximate(outcome.state, outcome.state, record, method, self.steps), quiet
