"""The one penalty that mixes entries: a learnt quadratic."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opteq.common import validate as _validate
from opteq.penalties.base import Linearised, Penalty
from opteq.states import Autocast, sum_over_sample, working_dtype


class LinearActivation(nn.Module, Penalty):
    """``sigma(t) = S t``; ``f(y) = (<y, S^-1 y> - |y|^2)/2``, S symmetric positive definite: a learnt quadratic.

    This penalty mixes entries, so it has ``total`` and no ``value``: S acts on dim 1 of t (features or channels,
    ``(B, n, ...)``), the same at every position. ``S = F F'`` is kept as its square factor F, a parameter of the
    module, so S stays symmetric and positive semi-definite under every optimiser; f is finite as long as F is
    invertible.

    Args:
        n: the size of dim 1.
        init: the factor F to start from, ``(n, n)``; by default the identity, for which f = 0. For a given S,
            ``torch.linalg.cholesky(S)``.

    >>> sigma = LinearActivation(2, init=torch.linalg.cholesky(torch.tensor([[2.0, 0.0], [0.0, 0.5]])))
    >>> y = torch.tensor([[1.0, 1.0]])
    >>> sigma.prox(y).detach(), sigma.total(y).detach(), round(sigma.lipschitz, 6)
    (tensor([[2.0000, 0.5000]]), tensor([0.2500]), 2.0)
    """

    name = "linear"
    offset = 0.0

    def __init__(self, n: int, init: Tensor | None = None) -> None:
        super().__init__()
        self.n = n
        _validate.whole(self, "n")
        init = torch.eye(n) if init is None else _validate.check_invertible("LinearActivation.init", init)
        if init.shape != (n, n):
            raise ValueError(
                f"LinearActivation.init should be a ({n}, {n}) factor F of S = F F'; got shape {tuple(init.shape)}"
            )
        self.factor = nn.Parameter(init.detach().clone())

    @property
    def lipschitz(self) -> float:  # type: ignore[override]  # computed, and never assigned
        """``|S| = |F|^2``. Waits for the device: for certificates, not for solver steps."""
        return float(torch.linalg.matrix_norm(self.factor.detach().double(), ord=2)) ** 2

    def forward(self, t: Tensor) -> Tensor:
        return self.prox(t)

    def prox(self, t: Tensor) -> Tensor:
        at_t = self.linearise(t)
        return at_t.factor(at_t.factor_adjoint(t))

    def total(self, y: Tensor) -> Tensor:
        """``(|F^-1 y|^2 - |y|^2)/2`` of each sample; solving with F, for S has the square of its condition number."""
        self._check(y)
        wide = y.to(working_dtype(y.dtype)).movedim(1, 0)
        solved = torch.linalg.solve(self.factor.to(wide.dtype), wide.flatten(1)).reshape(wide.shape)
        return sum_over_sample((solved.square() - wide.square()).movedim(1, 0)) / 2

    def potential(self, t: Tensor) -> Tensor:
        """``<t, S t>/2 = |F' t|^2/2`` of each sample."""
        with Autocast.current(t.device).off():
            wide = t.to(working_dtype(t.dtype))
            return sum_over_sample(self.linearise(wide).factor_adjoint(wide).square()) / 2

    def linearise(self, t: Tensor) -> Linearised:
        """The products with F and F', the same at every t."""
        self._check(t)
        matrix = self.factor.to(t.dtype)

        def factor(v: Tensor) -> Tensor:
            return torch.einsum("ij,bj...->bi...", matrix, v)

        def factor_adjoint(u: Tensor) -> Tensor:
            return torch.einsum("ji,bj...->bi...", matrix, u)

        return Linearised(factor, factor_adjoint, derivative=lambda v: factor(factor_adjoint(v)))

    def extra_repr(self) -> str:
        return f"n={self.n}"

    def _check(self, t: Tensor) -> None:
        if t.ndim < 2 or t.shape[1] != self.n:
            raise ValueError(
                f"LinearActivation acts on dim 1, of size {self.n}; got a tensor of shape {tuple(t.shape)}"
            )
