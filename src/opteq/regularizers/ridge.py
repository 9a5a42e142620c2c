"""Small features: half the squared norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from opteq.common.validate import check_not_negative
from opteq.regularizers.base import Regularizer, check_direction, per_sample_sum, working_copy


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
        return per_sample_sum(working_copy(z).square()) / 2

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
