"""Conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.solvers.linear.base import LinearSolver, Product, columns, dots, ratio
from opteq.solvers.loop import Process
from opteq.solvers.status import Status


@dataclass(frozen=True, kw_only=True)
class CG(LinearSolver):
    """Conjugate gradients: the fewest products for a symmetric positive definite A, and the least memory.

    A direction of non-positive curvature ends a row with :attr:`Status.INDEFINITE`, since its answer would not
    be one.
    """

    def _process(self, product: Product, rhs: Tensor) -> Process:
        return _ConjugateGradients(product, rhs)


class _ConjugateGradients:
    def __init__(self, product: Product, rhs: Tensor) -> None:
        self.product = product
        self.point = torch.zeros_like(rhs)
        self.residual = rhs
        self.direction = rhs
        self.square = dots(rhs, rhs)
        self.codes = torch.zeros_like(self.square, dtype=torch.int64)

    def first(self) -> tuple[Tensor, Tensor]:
        return self.point, self.square.sqrt()

    def advance(self, active: Tensor) -> tuple[Tensor, Tensor]:
        image = self.product(self.direction)
        curvature = dots(self.direction, image)
        self.codes = torch.where(active & (curvature <= 0), int(Status.INDEFINITE), 0)
        self.codes = torch.where(torch.isfinite(curvature), self.codes, int(Status.NON_FINITE))
        length = torch.where(curvature > 0, ratio(self.square, curvature), 0.0)
        self.point = self.point + columns(length, image) * self.direction
        self.residual = self.residual - columns(length, image) * image
        square = dots(self.residual, self.residual)
        self.direction = self.residual + columns(ratio(square, self.square), image) * self.direction
        self.square = square
        return self.point, square.sqrt()

    def dead_ends(self) -> Tensor | None:
        return self.codes
