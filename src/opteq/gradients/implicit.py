"""The exact gradient, by the implicit function theorem."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq._autocast import Autocast
from opteq._validate import positive, whole
from opteq.gradients.attach import attach
from opteq.gradients.base import Gradient, Record, find_without_tape, wants_gradient
from opteq.problems.hidden import BoundMap
from opteq.problems.linearisation import Linearisation, Product, Structure, SymmetricLinearisation
from opteq.solution import Report
from opteq.solvers import Outcome, Solver
from opteq.solvers.linear import CG, GMRES, MINRES, LinearSolver
from opteq.solvers.loop import Finish
from opteq.states import Layout, State, blocks, like

_BY_STRUCTURE: dict[Structure, type[LinearSolver]] = {
    Structure.POSITIVE: CG,
    Structure.SYMMETRIC: MINRES,
    Structure.GENERAL: GMRES,
}


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
        state, outcome = find_without_tape(hidden, solver, start)
        carrier = hidden.step(state)
        if not wants_gradient(carrier):
            return state, outcome
        system = self._system(hidden, state)

        def adjoint(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            solved, report = system.solve(like(state, gradients))
            record(report)
            return blocks(solved)

        return attach(state, carrier, adjoint), outcome

    def solve_adjoint(self, hidden: BoundMap, state: State, gradient: State) -> tuple[State, Report]:
        """The v with ``v = g + J'v`` at ``state``, and how its solve went."""
        return self._system(hidden, state).solve(gradient)

    def _system(self, hidden: BoundMap, state: State) -> _AdjointSystem:
        # Made on the way forward: by the time of the backward pass a user's module may hold other weights
        # (torch.func.functional_call puts them in for the forward pass only).
        layout = Layout.of(state, hidden.coupled)
        with torch.no_grad():
            local = hidden.linearise(state)
        autocast = Autocast.current(blocks(state)[0].device)
        return _AdjointSystem(local, layout, autocast, self._linear_solver(hidden.structure, local, layout.dtype))

    def _linear_solver(
        self, structure: Structure, local: Linearisation | SymmetricLinearisation, dtype: torch.dtype
    ) -> LinearSolver:
        if self.linear is None:
            tol = self.tol or (1e-10 if dtype == torch.float64 else 1e-6)
            return _BY_STRUCTURE[structure](tol=tol, max_steps=self.max_steps)
        if isinstance(local, Linearisation) and isinstance(self.linear, CG | MINRES):
            raise ValueError(
                f"{type(self.linear).__name__} needs a symmetric system, and this problem's Jacobian has no symmetry; "
                "use Implicit(linear=GMRES()) or leave the choice to Implicit()"
            )
        return self.linear


class _AdjointSystem:
    """``(I - J') v = g`` on matrices with a row a sample, products in the precision of the way forward."""

    def __init__(
        self,
        local: Linearisation | SymmetricLinearisation,
        layout: Layout,
        autocast: Autocast,
        linear: LinearSolver,
    ) -> None:
        self.local = local
        self.layout = layout
        self.autocast = autocast
        self.linear = linear
        lowest = [*layout.dtypes, autocast.dtype] if autocast.enabled and autocast.dtype else [*layout.dtypes]
        self.eps = max(torch.finfo(dtype).eps for dtype in lowest)

    def solve(self, gradient: State) -> tuple[State, Report]:
        """The adjoint vector and how its system was solved."""
        layout = self.layout
        with self.autocast.off():
            solved, finish = self._solve_rows(layout.pack(gradient))
        report = Report(
            method=f"adjoint by {type(self.linear).__name__}",
            residual=layout.per_sample(finish.residual),
            steps=layout.per_sample(finish.steps),
            codes=layout.per_sample(finish.codes),
            tol=max(self.linear.tol, self.eps),
            trace=finish.trace,
        )
        return layout.unpack(solved), report

    def _solve_rows(self, gradient: Tensor) -> tuple[Tensor, Finish]:
        local, rows = self.local, self._rows
        if isinstance(local, Linearisation):
            finish = self.linear.solve(lambda v: v - rows(local.adjoint, v), gradient, self.eps)
            return finish.point, finish
        target = rows(local.factor_adjoint, gradient)
        finish = self.linear.solve(lambda w: w - rows(local.scaled, w), target, self.eps)
        back = rows(lambda w: local.curvature(local.factor(w)), finish.point)
        return gradient + back, finish

    def _rows(self, product: Product, matrix: Tensor) -> Tensor:
        with self.autocast.entered():
            image = product(self.layout.unpack(matrix))
        return self.layout.pack(image)
