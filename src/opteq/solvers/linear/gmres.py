"""GMRES: the least residual in a Krylov space, for any system."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.common.validate import whole
from opteq.solvers.linear.base import LinearSolver, RowProduct, is_noise, ratio
from opteq.solvers.loop import Process
from opteq.solvers.status import Status
from opteq.states import per_row, row_norms, widest_dtype, zeros_per_row


@dataclass(frozen=True, kw_only=True)
class GMRES(LinearSolver):
    """Generalised minimal residuals with restarts: for systems without symmetry.

    Where the system has no solution, a row ends with :attr:`Status.SINGULAR`.

    Args:
        restart: number of basis vectors after which the method restarts from its current solution; memory grows with
            it.
    """

    restart: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self, "restart")

    def _process(self, product: RowProduct, rhs: Tensor) -> Process:
        return _ArnoldiCycle(product, rhs, self.restart)


class _ArnoldiCycle:
    """An orthonormal basis of the Krylov space, grown by one vector a step, and the best combination of it.

    Orthogonalisation is classical Gram-Schmidt done twice: two matrix products a pass instead of one a vector,
    and as orthogonal as rounding allows. The small least squares ``min |beta e1 - H w|`` is solved in float64: one
    Givens rotation a step keeps ``turn @ H`` triangular.
    """

    def __init__(self, product: RowProduct, rhs: Tensor, restart: int) -> None:
        self.product, self.rhs, self.restart = product, rhs, restart
        self.point = torch.zeros_like(rhs)
        self.norm = row_norms(self.point)  # of A, from below
        self._begin(rhs)

    def first(self) -> tuple[Tensor, Tensor]:
        return self.point, row_norms(self.rhs)

    def advance(self, active: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        if self.size == self.restart:
            self._begin(self.rhs - self.product(self.point))
        image = self.product(self.basis[:, self.size])
        known = self.basis[:, : self.size + 1]
        shares = torch.zeros_like(self.triangle[:, : self.size + 1, 0])
        for _ in range(2):
            overlap = known @ image[:, :, None]
            image = image - (known.mT @ overlap)[:, :, 0]
            shares = shares + overlap[:, :, 0]
        length = row_norms(image)
        self.basis[:, self.size + 1] = image * per_row(ratio(torch.ones_like(length), length), image)
        self._add_column(shares, length.to(shares.dtype))
        weights, residual = self._least_squares()
        self.point = self.base + (self.basis[:, : self.size].mT @ weights.to(image.dtype))[:, :, 0]
        self.norm = torch.maximum(self.norm, torch.hypot(row_norms(shares), length))
        noise = is_noise(self.point, self.norm)
        self.codes = torch.where(noise | (length == 0), int(Status.SINGULAR), 0)
        self.codes = torch.where(torch.isfinite(residual), self.codes, int(Status.NON_FINITE))
        return self.point, torch.where(noise, torch.inf, residual)

    def _begin(self, residual: Tensor) -> None:
        small = widest_dtype(residual)
        self.base = self.point
        self.length = row_norms(residual).to(small)
        self.basis = zeros_per_row(residual, self.restart + 1, residual.shape[1])
        self.basis[:, 0] = residual * per_row(ratio(torch.ones_like(self.length), self.length), residual)
        self.triangle = zeros_per_row(residual, self.restart, self.restart, dtype=small)
        self.turn = zeros_per_row(residual, self.restart + 1, self.restart + 1, dtype=small)
        self.turn.diagonal(dim1=1, dim2=2).fill_(1.0)
        self.size = 0

    def _add_column(self, shares: Tensor, length: Tensor) -> None:
        """The next column of H, ``(*shares, length)``: rotated as those before, then by one rotation of its own."""
        last = self.size
        column = (self.turn[:, : last + 1, : last + 1] @ shares[:, :, None])[:, :, 0]
        pivot = torch.hypot(column[:, last], length)
        cosine = torch.where(pivot == 0, 1.0, column[:, last] / pivot)[:, None]
        sine = torch.where(pivot == 0, 0.0, length / pivot)[:, None]
        upper, lower = self.turn[:, last].clone(), self.turn[:, last + 1].clone()
        self.turn[:, last] = cosine * upper + sine * lower
        self.turn[:, last + 1] = cosine * lower - sine * upper
        self.triangle[:, :last, last] = column[:, :last]
        self.triangle[:, last, last] = pivot
        self.size += 1

    def _least_squares(self) -> tuple[Tensor, Tensor]:
        """The weights of the basis, ``(B, size, 1)``, and the residual that they leave, ``(B,)``."""
        r = self.triangle[:, : self.size, : self.size]
        goal = self.length[:, None, None] * self.turn[:, : self.size + 1, :1]
        target, missed = goal[:, :-1], goal[:, -1, 0]
        # A pivot of zero means that the space is exhausted: what cannot be reached gets weight zero.
        diagonal = r.diagonal(dim1=-2, dim2=-1)
        largest = diagonal.amax(dim=1, keepdim=True)
        sound = (diagonal > torch.finfo(r.dtype).eps * largest)[:, :, None]
        guarded = torch.where(sound, r, 0.0) + torch.where(sound[:, :, 0], 0.0, 1.0).diag_embed()
        weights = torch.linalg.solve_triangular(guarded, torch.where(sound, target, 0.0), upper=True)
        residual = torch.hypot(row_norms((target - r @ weights)[:, :, 0]), missed)
        return torch.where(torch.isfinite(residual)[:, None, None], weights, 0.0), residual
