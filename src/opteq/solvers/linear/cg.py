"""Conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.solvers.fused.available import supports
from opteq.solvers.linear.base import (
    LinearSession,
    LinearSolver,
    Product,
    columns,
    dots,
    lost,
    ratio,
    unit_rows,
)
from opteq.solvers.loop import Process
from opteq.solvers.status import Status
from opteq.states import Layout, State, blocks


@dataclass(frozen=True, kw_only=True)
class CG(LinearSolver):
    """Conjugate gradients: the fewest products for a symmetric positive definite A, and the least memory.

    A direction of non-positive curvature ends a row with :attr:`Status.INDEFINITE`, since its answer would not
    be one, and :attr:`Status.SINGULAR` ends one whose answer grows out of all proportion.
    """

    def _process(self, product: Product, rhs: Tensor) -> Process:
        return _ConjugateGradients(product, rhs)

    def open_states(self, product: Callable[[State], State], rhs: State, layout: Layout, eps: float) -> LinearSession:
        """As for every linear solver, in fused kernels where they can be used."""
        if not supports(blocks(rhs)):
            return super().open_states(product, rhs, layout, eps)
        from opteq.solvers.fused.conjugate_gradients import FusedConjugateGradients
        from opteq.solvers.fused.ledger import Blocks

        wide = layout.widened()
        rows = wide.pack(rhs)
        unit, scale = unit_rows(rows)
        start = wide.unpack(unit)
        memory = Blocks(blocks(start), layout.rows)
        if not memory.fits:
            return super().open_states(product, rhs, layout, eps)

        def lowered(v: State) -> State:
            return product(layout.restore(blocks(v)))

        return LinearSession(FusedConjugateGradients(lowered, start, memory, self.rule(rows, eps)), scale)


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
        self.point = self.point + columns(length, image) * self.direction
        hidden = lost(self.point, self.size)
        self.codes = torch.where(hidden, int(Status.SINGULAR), 0)
        self.codes = torch.where(active & (curvature <= 0), int(Status.INDEFINITE), self.codes)
        self.codes = torch.where(torch.isfinite(curvature), self.codes, int(Status.NON_FINITE))
        self.residual = self.residual - columns(length, image) * image
        square = dots(self.residual, self.residual)
        self.direction = self.residual + columns(ratio(square, self.square), image) * self.direction
        self.square = square
        return self.point, torch.where(hidden, torch.inf, square.sqrt())

    def dead_ends(self) -> Tensor | None:
        return self.codes
