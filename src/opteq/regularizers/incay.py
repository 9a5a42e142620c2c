"""Large features: the reciprocal of the squared norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from opteq.common.validate import positive
from opteq.regularizers.base import Regularizer, per_sample_factor, per_sample_sum, working_copy


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
        return (per_sample_factor(factor, features) * features).to(z.dtype)

    @property
    def gradient_lipschitz(self) -> float:
        """``1 / eps^2``.

        Across z the Hessian has the eigenvalue ``-4 / (|z|^2 + 2 eps)^2``. Along z it has
        ``(12 |z|^2 - 8 eps) / (|z|^2 + 2 eps)^3``, which rises from ``-1 / eps^2`` at z = 0 to
        ``1 / (4 eps^2)`` at ``|z|^2 = 2 eps``. Both are largest in size at z = 0.
        """
        return 1 / self.eps**2

    def _denominator(self, features: Tensor) -> Tensor:
        return per_sample_sum(features.square()) + 2 * self.eps
