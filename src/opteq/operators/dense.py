"""A matrix as an operator."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opteq.common.precision import matrix_product
from opteq.common.validate import check_whole
from opteq.operators.base import LinearMap, Operator, check_bound, initial_norm, wrong_shape
from opteq.operators.spectral.bound import bounded
from opteq.operators.spectral.norms import certified_norm, kernel_norm


class DenseMap(LinearMap):
    """``A v = v @ weight.T`` on the last dimension, with a prepared weight ``(n, m)``."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, v: Tensor) -> Tensor:
        n, m = self.weight.shape
        if v.ndim == 0 or v.shape[-1] != m:
            raise wrong_shape(f"Dense({m}, {n})", f"(..., {m})", v)
        return matrix_product(F.linear, v, self.weight)

    def adjoint(self, u: Tensor) -> Tensor:
        n, m = self.weight.shape
        if u.ndim == 0 or u.shape[-1] != n:
            raise wrong_shape(f"the adjoint of Dense({m}, {n})", f"(..., {n})", u)
        return matrix_product(F.linear, u, self.weight.mT)


class Dense(Operator):
    """A matrix: ``(..., m) -> (..., n)``, ``A v = v @ weight.T``.

    With ``bound=b`` the spectral norm never exceeds ``b``; where the bound acts, it lies at most 0.2 % below ``b``.

    Args:
        m: size of the input.
        n: size of the output.
        bound: largest spectral norm allowed, or None for none.

    ``weight`` has the shape ``(n, m)`` of ``nn.Linear``. It starts normal, scaled to a norm just
    within ``bound`` (0.9 without one).

    >>> A = Dense(3, 5, bound=0.95)
    >>> v, u = torch.randn(2, 3), torch.randn(2, 5)
    >>> A(v).shape, A.adjoint(u).shape
    (torch.Size([2, 5]), torch.Size([2, 3]))
    """

    weight: nn.Parameter
    other_names = {"in_features": "m", "out_features": "n"}  # noqa: RUF012  # read by the metaclass; those of nn.Linear

    def __init__(self, m: int, n: int, bound: float | None = None) -> None:
        super().__init__()
        self.in_features = check_whole("m", m)
        self.out_features = check_whole("n", n)
        self.bound = check_bound(bound)
        self.keeps_shape = m == n
        self.weight = nn.Parameter(torch.empty(n, m))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight again and scale it to the initial norm."""
        if self.weight.is_meta:
            return
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        self.weight.mul_(initial_norm(self.bound) / kernel_norm(self.weight))

    def prepare(self) -> DenseMap:
        return DenseMap(bounded(self.weight, self.bound))

    def norm(self) -> Tensor:
        return certified_norm(self.prepare().weight, self.bound)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bound={self.bound}"
