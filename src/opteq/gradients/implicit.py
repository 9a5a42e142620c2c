"""The exact gradient, by the implicit function theorem."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opteq._validate import positive, whole
from opteq.gradients.adjoint import AdjointSystem
from opteq.gradients.attach import attach, refuse_hidden_batches
from opteq.gradients.base import Gradient, Record, wants_gradient
from opteq.gradients.feature_system import FeatureSystem
from opteq.gradients.forward import features_beside, find_without_tape
from opteq.gradients.replay import Gradients, Incoming, Replay, Steps, attach_replay, replay
from opteq.problems.hidden import BoundMap
from opteq.problems.linearisation import Structure
from opteq.solution import Report
from opteq.solvers import Outcome, Solver
from opteq.solvers.linear import CG, GMRES, MINRES, LinearSolver
from opteq.states import Layout, State, blocks, like

_BY_STRUCTURE: dict[Structure, type[LinearSolver]] = {
    Structure.POSITIVE: CG,
    Structure.SYMMETRIC: MINRES,
    Structure.GENERAL: GMRES,
}


# The tolerance from which on the state of a fine solve tells better which units are cut off than a product in TF32 at
# its features, which are a step further: with a contraction of 0.95 that begins at residuals of about 1e-4.
_CLOSE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Implicit(Gradient):
    """Solve ``(I - J') v = g`` for the incoming gradient g, then differentiate one step with v.

    Nothing of the iterations is kept, so memory does not grow with their number. Where the problem says that
    ``J = D M`` with M symmetric, the system is symmetrised, which halves the vectors and allows conjugate gradients.

    Args:
        tol: residual relative to g; None means 1e-6, and 1e-10 where the state is float64.
        max_steps: products with J at most.
        linear: the linear solver; None chooses conjugate gradients, MINRES or GMRES by the structure that the problem
            declares. It then brings its own ``tol`` and ``max_steps``.
    """

    tol: float | None = None
    max_steps: int = 100
    linear: LinearSolver | None = None

    def __post_init__(self) -> None:
        if self.tol is not None:
            positive(self, "tol")
        whole(self, "max_steps")
        if self.linear is not None and not isinstance(self.linear, LinearSolver):
            raise TypeError(f"Implicit.linear should be CG(), MINRES(), GMRES() or None; got {self.linear!r}")
        if self.linear is not None and (self.tol is not None or self.max_steps != type(self).max_steps):
            raise ValueError(
                f"Implicit.tol and max_steps have no effect beside linear, which brings its own; got tol={self.tol}, "
                f"max_steps={self.max_steps}. Give them to {type(self.linear).__name__}"
            )

    def run(self, hidden: BoundMap, solver: Solver, start: State | None, record: Record) -> tuple[State, Outcome]:
        """Solve without a tape; the backward pass solves the adjoint system."""
        return self._run(hidden, solver, start, record, state_too=True)

    def run_for_features(
        self, hidden: BoundMap, solver: Solver, start: State | None, record: Record
    ) -> tuple[State, Outcome]:
        """The same, and no copy of the state is made before somebody needs its place."""
        if type(self).run is not Implicit.run:  # somebody has put in another one
            return self.run(hidden, solver, start, record)
        return self._run(hidden, solver, start, record, state_too=False)

    def _run(
        self, hidden: BoundMap, solver: Solver, start: State | None, record: Record, state_too: bool
    ) -> tuple[State, Outcome]:
        # A linear solver that can't be captured takes the state apart on the way forward.
        lend = not state_too and self._capturable(hidden)
        state, outcome = find_without_tape(hidden, solver, start, with_features=True, lend=lend)
        expansion = None if outcome.known is None else hidden.expansion()
        if expansion is not None and outcome.known is not None and not expansion.learns:
            linear = self._linear(hidden, state)
            features, reached = FeatureSystem(expansion, outcome.known, linear).attached(record, state_too)
            return reached, replace(outcome, features=features)
        replayed = replay(hidden, state, Steps())
        if replayed is not None:
            if outcome.features is None:
                with torch.no_grad():
                    outcome = replace(outcome, features=features_beside(hidden, state))
            replayed = replace(replayed, features=outcome.features, close=outcome.tol <= _CLOSE)
            state, read_out = self._by_replay(hidden, replayed, record, state_too)
            return state, replace(outcome, features=read_out)
        outcome = replace(outcome, features=None)  # they are put on the tape with the state
        carrier = hidden.step(state)
        if not wants_gradient(carrier):
            return state, outcome
        system = self._system(hidden, state)

        def adjoint(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            refuse_hidden_batches(gradients)
            solved, report = system.solve(like(state, gradients))
            record(report)
            return blocks(solved)

        return attach(state, carrier, adjoint), outcome

    def _by_replay(
        self, hidden: BoundMap, replayed: Replay, record: Record, state_too: bool
    ) -> tuple[State, State | None]:
        system = self._system(hidden, replayed.state)

        def pull(incoming: Incoming) -> Gradients:
            for arrived in (incoming.state, incoming.features):
                refuse_hidden_batches(() if arrived is None else blocks(arrived))
            gradients, report = system.pull(incoming, replayed)
            record(report)
            return gradients

        return attach_replay(hidden, replayed, pull, once=True, state_too=state_too)

    def solve_adjoint(self, hidden: BoundMap, state: State, gradient: State) -> tuple[State, Report]:
        """The v with ``v = g + J'v`` at ``state``, and how its solve went."""
        return self._system(hidden, state).solve(gradient)

    def _system(self, hidden: BoundMap, state: State) -> AdjointSystem:
        return AdjointSystem(hidden, state, self._linear(hidden, state))

    def _capturable(self, hidden: BoundMap) -> bool:
        return (_BY_STRUCTURE[hidden.structure] if self.linear is None else type(self.linear)).capturable

    def _linear(self, hidden: BoundMap, state: State) -> LinearSolver:
        if self.linear is not None:
            return self.linear
        tol = self.tol or (1e-10 if Layout.of(state).dtype == torch.float64 else 1e-6)
        return _made(_BY_STRUCTURE[hidden.structure], tol, self.max_steps)


@functools.lru_cache(maxsize=64)
def _made(kind: type[LinearSolver], tol: float, max_steps: int) -> LinearSolver:
    """The same one in every call."""
    return kind(tol=tol, max_steps=max_steps)
