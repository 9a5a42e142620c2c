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
from opteq.problems.linearisation import Linearisation, Structure, SymmetricLinearisation
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

    def run(self, hidden: BoundMap, solver: Solver, start: State | None, record: Record) -> tuple[State, Outcome]:
        """Solve without a tape; the backward pass solves the adjoint system."""
        state, outcome = find_without_tape(hidden, solver, start)
        carrier = hidden.step(state)
        if not wants_gradient(carrier):
            return state, outcome
        autocast = Autocast.current(blocks(state)[0].device)

        def adjoint(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            solved, report = self.solve_adjoint(hidden, state, like(state, gradients), autocast)
            record(report)
            return blocks(solved)

        return attach(state, carrier, adjoint), outcome

    def solve_adjoint(
        self, hidden: BoundMap, state: State, gradient: State, autocast: Autocast | None = None
    ) -> tuple[State, Report]:
        """The v with ``v = g + J'v`` at ``state``, and how its solve went."""
        layout = Layout.of(state, hidden.coupled)
        autocast = autocast or Autocast.current(blocks(state)[0].device)
        with autocast.entered():
            local = hidden.linearise(state)
        linear = self._linear_solver(hidden.structure, local, layout.dtype)
        system = _System(local, layout, autocast)
        with autocast.off():
            solved, finish = system.solve(linear, layout.pack(gradient))
        report = Report(
            method=f"adjoint by {type(linear).__name__}",
            residual=layout.per_sample(finish.residual),
            steps=layout.per_sample(finish.steps),
            codes=layout.per_sample(finish.codes),
            tol=max(linear.tol, system.eps),
            trace=finish.trace,
        )
        return layout.unpack(solved), report

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


class _System:
    """The adjoint system on matrices with a row a sample, products in the caller's precision."""

    def __init__(self, local: Linearisation | SymmetricLinearisation, layout: Layout, autocast: Autocast) -> None:
        self.local = local
        self.layout = layout
        self.autocast = autocast
        lowest = [*layout.dtypes, autocast.dtype] if autocast.enabled and autocast.dtype else [*layout.dtypes]
        self.eps = max(torch.finfo(dtype).eps for dtype in lowest)

    def solve(self, linear: LinearSolver, gradient: Tensor) -> tuple[Tensor, Finish]:
        """The adjoint vector and how its system was solved."""
        local, rows = self.local, self._rows
        if isinstance(local, Linearisation):
            finish = linear.solve(lambda v: v - rows(local.adjoint, v), gradient, self.eps)
            return finish.point, finish
        finish = linear.solve(lambda w: w - rows(local.scaled, w), rows(local.factor_adjoint, gradient), self.eps)
        back = rows(lambda w: local.curvature(local.factor(w)), finish.point)
        return gradient + back, finish

    def _rows(self, product: object, matrix: Tensor) -> Tensor:
        assert callable(product)
        with self.autocast.entered():
            image = product(self.layout.unpack(matrix))
        return self.layout.pack(image)
