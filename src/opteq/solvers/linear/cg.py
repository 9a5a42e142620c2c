"""Conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq._room import Room
from opteq.solvers.fused.available import supports
from opteq.solvers.linear.base import (
    LinearSession,
    LinearSolver,
    PartialProduct,
    Product,
    columns,
    dots,
    lost,
    ratio,
    sample_norms,
    unit_rows,
)
from opteq.solvers.linear.looking import LookingConjugateGradients, usable_lengths
from opteq.solvers.loop import Process
from opteq.solvers.refined import RefinedRun
from opteq.solvers.scaled import ScaledProduct
from opteq.solvers.status import Status
from opteq.states import Layout, State, all_rows, any_row, blocks, row_norms


@dataclass(frozen=True, kw_only=True)
class CG(LinearSolver):
    """Conjugate gradients: the fewest products for a symmetric positive definite A, and the least memory.

    A direction of non-positive curvature ends a row with :attr:`Status.INDEFINITE`, since its answer would not
    be one, and :attr:`Status.SINGULAR` ends one whose answer grows out of all proportion.
    """

    def _process(self, product: Product, rhs: Tensor) -> Process:
        return _ConjugateGradients(product, rhs)

    def open_states(
        self,
        product: Callable[[State], State],
        rhs: State,
        layout: Layout,
        eps: float,
        added: State | None = None,
        scaled: ScaledProduct | None = None,
    ) -> LinearSession:
        """As for every linear solver, in fused kernels where they can be used."""
        if not supports(blocks(rhs)):
            return super().open_states(product, rhs, layout, eps, added)
        from opteq.solvers.fused.conjugate_gradients import FusedConjugateGradients
        from opteq.solvers.fused.ledger import Blocks

        memory = Blocks(blocks(rhs), layout.rows)
        if not memory.fits:
            return super().open_states(product, rhs, layout, eps, added)
        # Squares of float64 may be too large for any number.
        lengths = sample_norms(rhs, layout.coupled) if torch.float64 in layout.dtypes else None
        rule = self.rule(layout.dtype, layout.device, eps)
        run = FusedConjugateGradients(product, rhs, lengths, added, memory, rule, layout.dtype, scaled)
        return LinearSession(run, None)

    def open_refined(
        self,
        product: PartialProduct,
        coarse: Product | None,
        error: float,
        rhs: Tensor,
        eps: float,
        room: Room | None = None,
    ) -> LinearSession:
        """As for every linear solver; rough products are used where there are any."""
        rule = self.rule(rhs.dtype, rhs.device, eps)
        if coarse is None:
            lengths = usable_lengths(rhs)
            if lengths is None:
                return super().open_refined(product, coarse, error, rhs, eps)
            run = LookingConjugateGradients(lambda rows: product(rows, None), rhs, lengths, rule, room or Room())
            return LinearSession(run, lengths)
        unit, scale = unit_rows(rhs)
        process = _RefinedConjugateGradients(product, coarse, error, unit, rule.tol)
        return LinearSession(RefinedRun(process, rule), scale)


class _ConjugateGradients:
    def __init__(self, product: Product, rhs: Tensor) -> None:
        self.product = product
        self.point = torch.zeros_like(rhs)
        self.residual = rhs
        self.direction = rhs
        self.square = dots(rhs, rhs)
        self.size = torch.zeros_like(self.square)  # of A, from below
        self.codes = torch.zeros_like(self.square, dtype=torch.int64)

    def first(self) -> tuple[Tensor, Tensor]:
        return self.point, self.square.sqrt()

    def advance(self, active: Tensor) -> tuple[Tensor, Tensor]:
        image = self.product(self.direction)
        curvature = dots(self.direction, image)
        length = torch.where(curvature > 0, ratio(self.square, curvature), 0.0)
        self.size = torch.maximum(self.size, ratio(curvature, self.square))
        self.point = torch.addcmul(self.point, columns(length, image), self.direction)
        hidden = lost(self.point, self.size)
        self.codes = torch.where(hidden, int(Status.SINGULAR), 0)
        self.codes = torch.where(active & (curvature <= 0), int(Status.INDEFINITE), self.codes)
        self.codes = torch.where(torch.isfinite(curvature), self.codes, int(Status.NON_FINITE))
        self.residual = torch.addcmul(self.residual, columns(length, image), image, value=-1)
        square = self._measured(active).square()
        self.direction = torch.addcmul(self.residual, columns(ratio(square, self.square), image), self.direction)
        self.square = square
        return self.point, torch.where(hidden, torch.inf, square.sqrt())

    def dead_ends(self) -> Tensor | None:
        return self.codes

    def _measured(self, active: Tensor) -> Tensor:  # noqa: ARG002
        """The lengths of the residuals, which may be put right before the next direction is made of them."""
        return row_norms(self.residual)


class _RefinedConjugateGradients(_ConjugateGradients):
    """Conjugate gradients with rough products, whose residuals are replaced by true ones now and then.

    The recurrence for the residual drifts by thousandths of what it began with, when a row's residual was computed
    last. It is computed again where it falls below ``error`` of that, or within the tolerance; the direction goes on,
    so that nothing of the convergence is lost. Each row decides for itself.
    """

    def __init__(self, product: PartialProduct, coarse: Product, error: float, rhs: Tensor, tol: float) -> None:
        super().__init__(lambda v: v - coarse(v), rhs)
        self.exact = product
        self.error = error
        self.rhs = rhs
        self.tol = tol
        self.anchor = self.square.sqrt()  # the residual that was computed last
        self.measured = torch.ones_like(self.codes, dtype=torch.bool)

    def measure(self, point: Tensor, rows: Tensor) -> Tensor:
        return row_norms(self._residuals(point, rows))

    def _measured(self, active: Tensor) -> Tensor:
        gap = row_norms(self.residual)
        # Written so that what is not finite is measured too.
        self.measured = active & ~((gap > self.tol) & (gap > self.error * self.anchor))
        if all_rows(self.measured):
            self.residual = self._residuals(self.point, None)
        elif any_row(self.measured):
            rows = self.measured.nonzero()[:, 0]
            self.residual = self.residual.index_copy(0, rows, self._residuals(self.point, rows))
        else:
            return gap
        gap = row_norms(self.residual)
        self.anchor = torch.where(self.measured, gap, self.anchor)
        return gap

    def _residuals(self, point: Tensor, rows: Tensor | None) -> Tensor:
        rhs, point = (self.rhs, point) if rows is None else (self.rhs[rows], point[rows])
        return rhs - point + self.exact(point, rows)
