"""Conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.solvers.linear.base import LinearSolver, RowProduct, dots, is_noise, ratio
from opteq.solvers.loop import Process
from opteq.solvers.status import Status
from opteq.states import per_row, row_norms, surely_all


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

    def advance(self, active: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        image = self.product(self.direction)
        curvature = dots(self.direction, image)
        positive = curvature > 0
        length = per_row((self.square / curvature).masked_fill(~positive, 0.0), image)
        self.size = torch.maximum(self.size, ratio(curvature, self.square))
        self.point = torch.addcmul(self.point, length, self.direction)
        noise = is_noise(self.point, self.size)
        self.codes = noise * int(Status.SINGULAR)
        if not surely_all(positive & (curvature < torch.inf)):
            # A is `I - S` in a layer, and rounded like a one.
            rounding = 8 * torch.finfo(image.dtype).eps * self.size.clamp_min(1.0) * row_norms(self.direction).square()
            ends = torch.where(curvature < -rounding, int(Status.INDEFINITE), int(Status.SINGULAR))
            codes = torch.where(curvature <= 0, ends, self.codes)
            self.codes = codes.masked_fill(~torch.isfinite(curvature), int(Status.NON_FINITE))
        self.residual = torch.addcmul(self.residual, length, image, value=-1)
        rest, before = row_norms(self.residual), self.square
        self.square = rest.square()
        self.direction = torch.addcmul(self.residual, per_row(ratio(self.square, before), image), self.direction)
        return self.point, rest.masked_fill(noise, torch.inf)
