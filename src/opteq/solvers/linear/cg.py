"""Conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.solvers.linear.base import LinearSolver, RowProduct, dots, is_noise, ratio
from opteq.solvers.loop import Process
from opteq.solvers.status import Status
from opteq.states import per_row, row_norms


@dataclass(frozen=True, kw_only=True)
class CG(LinearSolver):
    """Conjugate gradients: the fewest products for a symmetric positive definite A, and the least memory.

    A row ends with :attr:`Status.INDEFINITE` at a direction of negative curvature, where A is not positive definite,
    and with :attr:`Status.SINGULAR` at one without curvature, or when its solution grows without bound.
    """

    def _process(self, product: RowProduct, rhs: Tensor) -> Process:
        return _ConjugateGradients(product, rhs)


class _ConjugateGradients:
    def __init__(self, product: RowProduct, rhs: Tensor) -> None:
        self.product = product
        self.point = torch.zeros_like(rhs)
        self.residual = rhs
        self.direction = rhs
        self.square = dots(rhs, rhs)
        self.size = torch.zeros_like(self.square)  # of A, from below

    def first(self) -> tuple[Tensor, Tensor]:
        return self.point, self.square.sqrt()

    def advance(self, active: Tensor) -> tuple[Tensor, Tensor]:
        image = self.product(self.direction)
        curvature = dots(self.direction, image)
        length = torch.where(curvature > 0, ratio(self.square, curvature), 0.0)
        self.size = torch.maximum(self.size, ratio(curvature, self.square))
        self.point = torch.addcmul(self.point, per_row(length, image), self.direction)
        noise = is_noise(self.point, self.size)
        self.codes = torch.where(noise, int(Status.SINGULAR), 0)
        ends = torch.where(curvature < -self._rounding(), int(Status.INDEFINITE), int(Status.SINGULAR))
        self.codes = torch.where(active & (curvature <= 0), ends, self.codes)
        self.codes = torch.where(torch.isfinite(curvature), self.codes, int(Status.NON_FINITE))
        self.residual = torch.addcmul(self.residual, per_row(length, image), image, value=-1)
        square = row_norms(self.residual).square()
        self.direction = torch.addcmul(self.residual, per_row(ratio(square, self.square), image), self.direction)
        self.square = square
        return self.point, torch.where(noise, torch.inf, square.sqrt())

    def _rounding(self) -> Tensor:
        """By how much the curvature may be off; A is ``I - S`` in a layer, and rounded like a one."""
        square = row_norms(self.direction).square()
        return 8 * torch.finfo(self.point.dtype).eps * self.size.clamp_min(1.0) * square
