"""The exact gradient, by the implicit function theorem: solve ``(I - J') v = g``, then differentiate a step with v."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from opteq import engine
from opteq.common.validate import positive, whole
from opteq.gradients.base import (
    Gradient,
    Gradients,
    Record,
    attach,
    filled,
    find_no_grad,
    refuse_batched_gradients,
    wants_gradient,
)
from opteq.problems.hidden import BoundMap, Linearisation, Product, Structure, SymmetricLinearisation
from opteq.solution import Report
from opteq.solvers import Outcome, Solver
from opteq.solvers.linear import CG, GMRES, MINRES, LinearSolver
from opteq.states import Autocast, Layout, State, blocks, like, map_state, nan_samples

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
        attached = engine.differentiate(hidden, state, outcome, linear, record)
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
    reduction = getattr(system.local, "reduction", None)
    direct = reduction is not None and reduction.of_features
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
    both = blocks(attach(values, carriers, adjoint, held=hidden.tensors_read))
    if direct:
        outcome = replace(outcome, features=like(features, both[count:]))
    return like(state, both[:count]), outcome


class AdjointSystem:
    """``(I - J') v = g``, with products in the precision of the forward pass.

    The problem is linearised at once: by the time of the backward pass a user's module may hold other weights
    (``torch.func.functional_call`` puts them in for the forward pass only).
    ``inside`` is the pre-activation at the state, where it is known.
    """

    def __init__(self, hidden: BoundMap, state: State, linear: LinearSolver, inside: State | None = None) -> None:
        self.linear = linear
        self.layout = Layout.of(state, hidden.coupled)
        self.autocast = Autocast.current(self.layout.device)
        self.eps = rounding(self.layout, self.autocast)
        with torch.no_grad():
            self.local = hidden.linearise(state, inside)
        check_symmetry(self.local, linear)

    def solve(self, gradient: State | None, at_features: State | None = None) -> tuple[State, Report]:
        """The adjoint vector v, NaN for samples whose gradient is not finite, and how its system was solved.

        Both gradients are as in :func:`symmetrised`.
        """
        with self.autocast.off(), torch.no_grad():
            product, rhs, recover = symmetrised(self.local, gradient, at_features, self._in, self.layout.coupled)
            layout = Layout.of(rhs, self.layout.coupled)
            solve = self.linear.open_states(lambda v: self._in(product, v), rhs, layout, self.eps)
            finish = solve.run().per_sample(layout)
            vector = recover(layout.restore(finish.point))
        report = Report(
            method=f"adjoint by {type(self.linear).__name__}",
            residual=finish.residual,
            steps=finish.steps,
            codes=finish.codes,
            tol=max(self.linear.tol, self.eps),
            history=finish.trace,
        )
        return vector, report

    def _in(self, product: Product, v: State) -> State:
        with self.autocast.entered():
            return product(v)


def symmetrised(
    local: Linearisation | SymmetricLinearisation, gradient: State | None, at_features: State | None,
    apply: Callable[[Product, State], State], coupled: bool,
) -> tuple[Product, State, Product]:  # fmt: skip
    """The adjoint system ``(I - S) u = r`` in its symmetric or smaller form, where there is one: S, r, and v of u.

    Given are the gradients of the state and of features that a reduction knows; None where one is zero. ``apply``
    applies a product in the precision of the forward pass; ``coupled`` where samples depend on each other.
    """
    gradient, at_features = (None if one is None else nan_samples(one, coupled) for one in (gradient, at_features))
    if isinstance(local, Linearisation):
        assert gradient is not None
        return local.adjoint, gradient, lambda v: v
    system = local.system
    parts = [] if gradient is None else [apply(system.restrict, gradient)]
    if at_features is not None:
        parts.append(at_features)
    rhs = parts[0] if len(parts) == 1 else map_state(torch.add, *parts)

    def recover(u: State) -> State:
        # A solver gives up where the right-hand side is NaN: the answer has to be NaN there as well.
        v = apply(system.expand, map_state(partial(torch.add, alpha=0), u, rhs) if gradient is None else u)
        return v if gradient is None else map_state(torch.add, gradient, v)

    return system.product, rhs, recover


def rounding(layout: Layout, autocast: Autocast) -> float:
    """The rounding of products with states of ``layout``."""
    lowest = [*layout.dtypes]
    if autocast.enabled and autocast.dtype:
        lowest.append(autocast.dtype)
    return max(torch.finfo(dtype).eps for dtype in lowest)


def check_symmetry(local: Linearisation | SymmetricLinearisation, linear: LinearSolver) -> None:
    """Raise where ``linear`` needs a symmetric system and the problem has none."""
    if isinstance(local, Linearisation) and isinstance(linear, CG | MINRES):
        raise ValueError(
            f"{type(linear).__name__} needs a symmetric system, and this problem's Jacobian is not symmetric; "
            "use Implicit(linear=GMRES()) or leave the choice to Implicit()"
        )
