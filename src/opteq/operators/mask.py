"""Masks: some entries are seen, others are not."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.operators.base import LinearMap, Operator


class MaskMap(LinearMap):
    """Multiplication by fixed numbers."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __call__(self, v: Tensor) -> Tensor:
        return self.mask.to(v.dtype) * v

    def adjoint(self, u: Tensor) -> Tensor:
        return self(u)


class Mask(Operator):
    """Multiplication of every entry by a fixed number: 1 where it is seen, 0 where not, or any weight.

    Args:
        mask: numbers that broadcast against images ``(B, c, h, w)``: ``(h, w)`` for instance.

    >>> Mask(torch.tensor([1.0, 0.0, 1.0]))(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[1., 0., 3.]])
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        if not isinstance(mask, Tensor) or mask.numel() == 0 or mask.is_complex():
            raise ValueError(f"Mask.mask should be a tensor of real numbers; got {mask!r}")
        self.register_buffer("mask", mask.detach().to(torch.get_default_dtype()).clone())

    def prepare(self) -> MaskMap:
        return MaskMap(self.mask)

    def norm(self) -> Tensor:
        return self.mask.abs().amax()

    def least_singular_value(self) -> Tensor:
        """The smallest singular value: 0 where anything is hidden."""
        return self.mask.abs().amin()
