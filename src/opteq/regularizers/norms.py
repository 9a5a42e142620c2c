"""Small, sparse or large features: priors on the norm of a sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from opteq.common.validate import check_not_negative, positive
from opteq.regularizers.base import Regularizer, check_direction, working_copy
from opteq.states import per_row, sum_over_sample


@dataclass(frozen=True)
class Ridge(Regularizer):
    """``R(z) = 1/2 |z|^2``: features of small norm.

    Its prox is ``z / (1 + w)``. Where a paper writes ``lambda |z|^2`` the weight is ``w = 2 lambda``.

    >>> import torch
    >>> Ridge().value(torch.tensor([[3.0, 4.0]]))
    tensor([12.5000])
    >>> Ridge().prox(torch.tensor([[3.0, 4.0]]), weight=1.0)
    tensor([[1.5000, 2.0000]])
    """

    name: ClassVar[str] = "ridge"
    convex: ClassVar[bool] = True
    smooth: ClassVar[bool] = True
    couples_batch: ClassVar[bool] = False

    def value(self, z: Tensor) -> Tensor:
        return sum_over_sample(working_copy(z).square()) / 2

    def gradient(self, z: Tensor) -> Tensor:
        return working_copy(z).to(z.dtype, copy=True)

    def curvature(self, z: Tensor, v: Tensor) -> Tensor:
        check_direction(z, v)
        return v.to(z.dtype, copy=True)

    def prox(self, z: Tensor, weight: float) -> Tensor:
        check_not_negative("Ridge.weight", weight)
        return (working_copy(z) / (1 + weight)).to(z.dtype)

    @property
    def gradient_lipschitz(self) -> float:
        return 1.0


@dataclass(frozen=True)
class L1(Regularizer):
    """``R(z) = |z|_1``: features of which many are zero.

    Its prox is soft thresholding, ``sign(z) max(|z| - w, 0)``. The gradient, ``sign(z)``, jumps at zero, so
    gradient steps hover around a zero feature and never reach it: use the prox.

    >>> import torch
    >>> L1().value(torch.tensor([[3.0, -4.0]]))
    tensor([7.])
    >>> L1().prox(torch.tensor([[3.0, -0.5]]), weight=1.0)
    tensor([[2., 0.]])
    """

    name: ClassVar[str] = "l1"
    convex: ClassVar[bool] = True
    smooth: ClassVar[bool] = False
    couples_batch: ClassVar[bool] = False

    def value(self, z: Tensor) -> Tensor:
        return sum_over_sample(working_copy(z).abs())

    def gradient(self, z: Tensor) -> Tensor:
        """``sign(z)``: the subgradient of least norm."""
        return working_copy(z).sign().to(z.dtype)

    def prox(self, z: Tensor, weight: float) -> Tensor:
        check_not_negative("L1.weight", weight)
        features = working_copy(z)
        return (features - features.clamp(-weight, weight)).to(z.dtype)


@dataclass(frozen=True)
class Incay(Regularizer):
    """``R(z) = 2 / (|z|^2 + 2 eps)``, one term per sample: the opposite of decay, features of large norm.

    Its gradient is ``-4 z / (|z|^2 + 2 eps)^2``, so the layer ``I - w grad R`` expands: it is
    ``(1 + 4 w / (|z|^2 + 2 eps)^2) z``. (Table 2 of OptEq prints a minus there, which would shrink the
    features.) R is not convex: a fixed point of the layer is stationary, not certainly a minimiser, and at
    z = 0 every direction is equally good, so there is no prox.

    The experiments of OptEq name a second form, ``1 / (|z|^2 + eps)``. It is ``Incay(eps / 2)`` with half the
    weight.

    Args:
        eps: Keeps R finite at zero. The gradient has Lipschitz constant ``1 / eps^2`` (reached at z = 0), so
            the default 1.0 gives it the constant of :class:`Ridge`: a weight then means the same size of step
            for both.

    >>> import torch
    >>> Incay().value(torch.tensor([[1.0, 1.0]]))
    tensor([0.5000])
    >>> Incay().gradient(torch.tensor([[1.0, 1.0]]))
    tensor([[-0.2500, -0.2500]])
    """

    eps: float = 1.0

    name: ClassVar[str] = "incay"
    convex: ClassVar[bool] = False
    smooth: ClassVar[bool] = True
    couples_batch: ClassVar[bool] = False

    def __post_init__(self) -> None:
        positive(self, "eps")

    def value(self, z: Tensor) -> Tensor:
        return 2 / self._denominator(working_copy(z))

    def gradient(self, z: Tensor) -> Tensor:
        features = working_copy(z)
        factor = -4 / self._denominator(features).square()
        return (per_row(factor, features) * features).to(z.dtype)

    @property
    def gradient_lipschitz(self) -> float:
        """``1 / eps^2``.

        Across z the Hessian has the eigenvalue ``-4 / (|z|^2 + 2 eps)^2``. Along z it has
        ``(12 |z|^2 - 8 eps) / (|z|^2 + 2 eps)^3``, which rises from ``-1 / eps^2`` at z = 0 to
        ``1 / (4 eps^2)`` at ``|z|^2 = 2 eps``. Both are largest in size at z = 0.
        """
        return 1 / self.eps**2

    def _denominator(self, features: Tensor) -> Tensor:
        return sum_over_sample(features.square()) + 2 * self.eps
