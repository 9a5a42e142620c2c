"""The linear system of the implicit gradient, ``(I - J') v = g`` at a state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from opteq.problems.hidden import BoundMap, Linearisation, Product, SymmetricLinearisation
from opteq.solution import Report
from opteq.solvers.linear import CG, MINRES, LinearSolver
from opteq.states import Autocast, Layout, State, map_state, nan_samples


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

    def solve(self, gradient: State) -> tuple[State, Report]:
        """The adjoint vector v, NaN for samples whose gradient is not finite, and how its system was solved."""
        gradient = nan_samples(gradient, self.layout.coupled)
        with self.autocast.off(), torch.no_grad():
            system = symmetrised(self.local, gradient, self._in)
            layout = Layout.of(system.rhs, self.layout.coupled)
            solve = self.linear.open_states(lambda v: self._in(system.product, v), system.rhs, layout, self.eps)
            finish = solve.run()
            vector = system.recover(layout.restore(finish.point))
        report = Report(
            method=f"adjoint by {type(self.linear).__name__}",
            residual=layout.per_sample(finish.residual),
            steps=layout.per_sample(finish.steps),
            codes=layout.per_sample(finish.codes),
            tol=max(self.linear.tol, self.eps),
            history=finish.trace.expand(-1, layout.batch) if layout.coupled else finish.trace,
        )
        return vector, report

    def _in(self, product: Product, v: State) -> State:
        with self.autocast.entered():
            return product(v)


@dataclass(frozen=True)
class Symmetrised:
    """``(I - S) u = rhs``, where ``product`` applies S; ``v = recover(u)`` is the adjoint vector."""

    product: Product
    rhs: State
    recover: Callable[[State], State]


def symmetrised(
    local: Linearisation | SymmetricLinearisation, gradient: State, apply: Callable[[Product, State], State]
) -> Symmetrised:
    """The adjoint system for an incoming ``gradient``, in its symmetric or smaller form where there is one.

    ``apply`` applies a product in the precision of the forward pass.
    """
    if isinstance(local, Linearisation):
        return Symmetrised(local.adjoint, gradient, lambda v: v)
    reduction = local.reduction
    if reduction is not None:
        expand = reduction.expand
        return Symmetrised(
            reduction.product,
            apply(reduction.restrict, gradient),
            lambda u: map_state(torch.add, gradient, apply(expand, u)),
        )
    return Symmetrised(
        local.scaled,
        apply(local.factor_adjoint, gradient),
        lambda w: map_state(torch.add, gradient, apply(lambda w: local.curvature(local.factor(w)), w)),
    )


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
