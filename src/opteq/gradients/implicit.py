"""The exact gradient, by the implicit function theorem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from opteq import engine
from opteq.common.validate import positive, whole
from opteq.gradients.adjoint import AdjointSystem
from opteq.gradients.attach import Gradients, attach, filled, refuse_batched_gradients
from opteq.gradients.base import Gradient, Record, find_no_grad, wants_gradient
from opteq.problems.hidden import BoundMap, Structure, SymmetricLinearisation
from opteq.solvers import Outcome, Solver
from opteq.solvers.linear import CG, GMRES, MINRES, LinearSolver
from opteq.states import Layout, State, blocks, like, map_state

_BY_STRUCTURE: dict[Structure, type[LinearSolver]] = {
    Structure.POSITIVE: CG,
    Structure.SYMMETRIC: MINRES,
    Structure.GENERAL: GMRES,
}


@dataclass(frozen=True, kw_only=True)
class Implicit(Gradient):
    """Solve ``(I - J') v = g`` for the incoming gradient g, then differentiate one step with v.

    No iterate is stored, so memory does not grow with the number of steps. Where the problem declares ``J = D M`` with
    M symmetric, the system is symmetrised, which halves the number of vectors and allows conjugate gradients.

    Args:
        tol: residual relative to g; None means 1e-6, and 1e-10 where the state is float64.
        max_steps: the largest number of products with J.
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
                f"Implicit.tol and max_steps have no effect with linear, which has its own; got tol={self.tol}, "
                f"max_steps={self.max_steps}. Give them to {type(self.linear).__name__}"
            )

    def run(self, hidden: BoundMap, solver: Solver, start: State | None, record: Record) -> tuple[State, Outcome]:
        state, outcome = find_no_grad(hidden, solver, start)
        linear = self._linear(hidden, state)
        attached = engine.attach(hidden, state, outcome, linear, record)
        if attached is not None:
            return attached
        return attach_system(hidden, state, outcome, partial(AdjointSystem, hidden, state, linear), record)

    def _linear(self, hidden: BoundMap, state: State) -> LinearSolver:
        if self.linear is not None:
            return self.linear
        tol = self.tol or (1e-10 if Layout.of(state).dtype == torch.float64 else 1e-6)
        return _solver_for(hidden.structure, tol, self.max_steps)


@cache
def _solver_for(structure: Structure, tol: float, max_steps: int) -> LinearSolver:
    return _BY_STRUCTURE[structure](tol=tol, max_steps=max_steps)


def attach_system(
    hidden: BoundMap, state: State, outcome: Outcome, system_at: Callable[[State | None], AdjointSystem], record: Record
) -> tuple[State, Outcome]:
    """``state`` with the gradient of a step, by the adjoint system at a pre-activation; a constant if none is due.

    Features whose gradient the system takes as it is are attached as well, and put into the outcome.
    """
    carrier, inside, features = hidden.step_by_step(state)
    if not wants_gradient(carrier):
        return state, outcome
    system = system_at(None if inside is None else map_state(Tensor.detach, inside))
    direct = isinstance(system.local, SymmetricLinearisation) and system.local.system.of_features
    features = () if not direct else hidden.features(state) if features is None else features
    count = len(blocks(state))

    def adjoint(gradients: Gradients) -> Gradients:
        refuse_batched_gradients(gradients)
        of_state, of_features = gradients[:count], gradients[count:]
        solved, report = system.solve(filled(of_state, state), filled(of_features, features))
        record(report)
        return (*blocks(solved), *of_features)

    constants = map_state(Tensor.detach, features)
    values, carriers = (*blocks(state), *blocks(constants)), (*blocks(carrier), *blocks(features))
    both = blocks(attach(values, carriers, adjoint, held=hidden.tensors_read()))
    if direct:
        outcome = replace(outcome, features=like(features, both[count:]))
    return like(state, both[:count]), outcome
