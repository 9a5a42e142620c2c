"""Sparse features: the sum of absolute values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from opteq.common.validate import check_not_negative
from opteq.regularizers.base import Regularizer, check_direction, per_sample_sum, working_copy


@dataclass(frozen=True)
class L1(Regularizer):
    """``R(z) = |z|_1``: features of which many are zero.

    Its prox is soft thresholding, ``sign(z) max(|z| - w, 0)``. The gradient, ``sign(z)``, jumps at zero, so
    gradient steps hover around a zero feature and never reach it: use the prox.

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
        return per_sample_sum(working_copy(z).abs())

    def gradient(self, z: Tensor) -> Tensor:
        """``sign(z)``: the subgradient of least norm."""
        return working_copy(z).sign().to(z.dtype)

    def curvature(self, z: Tensor, v: Tensor) -> Tensor:
        """Zero: R is linear on either side of its kinks."""
        check_direction(z, v)
        return torch.zeros_like(z)

    def prox(self, z: Tensor, weight: float) -> Tensor:
        check_not_negative("L1.weight", weight)
        features = working_copy(z)
        return (features - features.clamp(-weight, weight)).to(z.dtype)
