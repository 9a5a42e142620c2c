"""The linear system of the implicit gradient, ``(I - J') v = g`` at a state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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

    def solve(self, gradient: State | None, at_features: State | None = None) -> tuple[State, Report]:
        """The adjoint vector v, NaN for samples whose gradient is not finite, and how its system was solved.

        Both gradients are as in :func:`symmetrised`.
        """
        with self.autocast.off(), torch.no_grad():
            product, rhs, recover = symmetrised(self.local, gradient, at_features, self._in, self.layout.coupled)
            layout = Layout.of(rhs, self.layout.coupled)
            finish = self.linear.open_states(lambda v: self._in(product, v), rhs, layout, self.eps).run()
            vector = recover(layout.restore(finish.point))
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
