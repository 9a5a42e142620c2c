"""Products with a convolution in bfloat16, on processors that are several times faster at them."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.nn import functional as F

from opteq._fast import settings
from opteq.operators.base import LinearMap
from opteq.operators.conv import ConvMap

# Below so many channels, units of the processor that multiply tiles stay half empty, and rounding eats what they gain.
_LEAST_CHANNELS = 16


class CoarseConvMap(LinearMap):
    """A convolution whose operands and products are rounded to bfloat16: off by some thousandths, sums in float32.

    It is of use for differences: where ``A v`` is known, ``A v + A~(w - v)`` is ``A w`` up to thousandths of ``w - v``.
    """

    error = 2.0**-8
    """The distance between two neighbours in bfloat16, relative to them. Products of random pictures are off by an
    eighth of it."""

    def __init__(self, linear: ConvMap) -> None:
        self.weight = linear.weight.detach().to(torch.bfloat16)
        self.padding = linear.padding

    def __call__(self, v: Tensor) -> Tensor:
        """``A v`` in bfloat16."""
        return F.conv2d(v.to(torch.bfloat16), self.weight, padding=self.padding)

    def adjoint(self, u: Tensor) -> Tensor:
        """``A' u`` in bfloat16."""
        return F.conv_transpose2d(u.to(torch.bfloat16), self.weight, padding=self.padding)


def coarse_map(linear: LinearMap) -> CoarseConvMap | None:
    """The convolution in bfloat16; None for other maps, and where the processor would not be faster with it."""
    if not isinstance(linear, ConvMap) or not settings.fused:
        return None
    weight = linear.weight
    small = min(weight.shape[:2]) < _LEAST_CHANNELS
    return None if small or weight.dtype != torch.float32 or not _multiplies_tiles() else CoarseConvMap(linear)


def _multiplies_tiles() -> bool:
    """Whether products in bfloat16 have units of their own, and oneDNN, which computes convolutions, may use them."""
    if {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"} & os.environ.keys() or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    asked = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return asked is not None and bool(asked())
