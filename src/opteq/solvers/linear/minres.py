"""MINRES: the least residual in a Krylov space, for symmetric systems of any sign."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.solvers.linear.base import LinearSolver, RowProduct, dots, is_noise, ratio
from opteq.solvers.loop import Process
from opteq.solvers.status import Status
from opteq.states import per_row, row_norms


@dataclass(frozen=True, kw_only=True)
class MINRES(LinearSolver):
    """Minimal residuals by the Lanczos recurrence: for symmetric A, definite or not; its residual never rises.

    The residual comes from the recurrence. It differs from the true residual by about ``eps cond(A)^2``, far more than
    with conjugate gradients or GMRES, where it differs by ``eps cond(A)``. Where the system has no solution, a row ends
    with :attr:`Status.SINGULAR`.
    """

    def _process(self, product: RowProduct, rhs: Tensor) -> Process:
        return _MinimalResiduals(product, rhs)


class _MinimalResiduals:
    """Lanczos vectors, their tridiagonal matrix reduced by one plane rotation a step, and the short update of x."""

    def __init__(self, product: RowProduct, rhs: Tensor) -> None:
        self.product = product
        nothing = torch.zeros_like(rhs)
        self.point = nothing
        self.older, self.newer = nothing, rhs  # Lanczos vectors (rhs has length one)
        self.path_older, self.path_newer = nothing, nothing  # directions in which x moves
        self.rest = row_norms(rhs)  # signed length of the residual
        one, zero = torch.ones_like(self.rest), torch.zeros_like(self.rest)
        self.link = zero  # off-diagonal entry that joins the two Lanczos vectors
        self.cos_older, self.cos_newer = one, one
        self.sin_older, self.sin_newer = zero, zero
        self.size = zero  # of A, from below

    def first(self) -> tuple[Tensor, Tensor]:
        return self.point, self.rest.abs()

    def advance(self, active: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        image = self.product(self.newer)
        diagonal = dots(self.newer, image)
        image = _minus(_minus(image, diagonal, self.newer), self.link, self.older)
        link = row_norms(image)
        # Two earlier rotations act on the new column of the tridiagonal matrix, then one more clears `link`.
        far = self.sin_older * self.link
        near = self.sin_newer * diagonal + self.cos_older * self.cos_newer * self.link
        pivot = self.cos_newer * diagonal - self.cos_older * self.sin_newer * self.link
        length = torch.hypot(pivot, link)
        self.size = torch.maximum(self.size, torch.hypot(diagonal, link))
        # |A r| / |r| for the residual r before this step. Where nothing is left of it, A r = 0: no step can help, and
        # this one would divide by rounding. Lanczos vectors lose their orthogonality, so that begins well above eps.
        slope = torch.hypot(pivot, self.cos_newer * link)
        stuck = slope <= 4 * torch.finfo(image.dtype).eps ** (2 / 3) * self.size
        cos, sin = ratio(pivot, length), ratio(link, length)
        path = _minus(_minus(self.newer, far, self.path_older), near, self.path_newer)
        path = path * per_row(ratio(torch.ones_like(length), length), image)
        self.point = _minus(self.point, -cos * self.rest, path)
        self.rest = torch.where(length == 0, self.rest, -sin * self.rest)
        self.older, self.newer = self.newer, image * per_row(ratio(torch.ones_like(link), link), image)
        self.path_older, self.path_newer = self.path_newer, path
        self.link = link
        self.cos_older, self.cos_newer = self.cos_newer, cos
        self.sin_older, self.sin_newer = self.sin_newer, sin
        noise = stuck | is_noise(self.point, self.size)
        length = self.rest.abs()
        self.codes = (noise * int(Status.SINGULAR)).masked_fill(~(length < torch.inf), int(Status.NON_FINITE))
        return self.point, length.masked_fill(noise, torch.inf)


def _minus(a: Tensor, numbers: Tensor, b: Tensor) -> Tensor:
    """``a - numbers b`` in one pass over memory."""
    return torch.addcmul(a, per_row(numbers, b), b, value=-1)
