"""Learned potentials of filter responses in one pass over memory on a GPU; torch takes a dozen."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.engine.triton.launch import may_launch, may_load
from opteq.potentials import Curve
from opteq.potentials.spline import SplineCurve
from opteq.states import is_channels_last

_BLOCK = 1024


def scaled_derivative(u: Tensor, curve: Curve, inverse: Tensor, force: Tensor) -> Tensor | None:
    """``force psi'(u inverse)``; None where torch should compute it."""
    return _launched(u, curve, inverse, force, second=False)


def scaled_second(u: Tensor, curve: Curve, inverse: Tensor, weight: Tensor) -> Tensor | None:
    """``weight psi''(u inverse)``; None as above."""
    return _launched(u, curve, inverse, weight, second=True)


def _launched(u: Tensor, curve: Curve, inverse: Tensor, weight: Tensor, second: bool) -> Tensor | None:
    if not isinstance(curve, SplineCurve) or u.ndim != 4:
        return None
    parts = u, curve.table, inverse, weight
    if torch.is_grad_enabled() or not may_launch(*parts) or any(part.dtype != torch.float32 for part in parts):
        return None
    channels_last = is_channels_last(u)
    batch, channels = u.shape[:2]
    everywhere = weight.shape == u.shape
    rows = (batch, channels, 1, 1)
    if not (u.is_contiguous() or channels_last) or inverse.shape != rows or not inverse.is_contiguous():
        return None
    if everywhere and weight.stride() != u.stride():
        return None
    if not everywhere and (weight.shape != rows or not weight.is_contiguous()):
        return None
    _, tables, intervals = curve.table.shape
    if not may_load(u, "spline", u.device, channels, tables, intervals, curve.odd, second, everywhere):
        return None
    from opteq.engine.triton.operations import spline_kernels as kernels

    values = torch.empty_like(u)
    with torch.cuda.device_of(u):  # type: ignore[no-untyped-call]  # kernels run on the current device
        kernels.evaluate[(-(-u.numel() // _BLOCK),)](
            u, curve.table.contiguous(), inverse, weight, values, u.numel(),
            1 if channels_last else u[0, 0].numel(), u[0].numel(), curve.width, channels=channels, tables=tables,
            last=intervals - 1, ODD=curve.odd, SECOND=second, EVERYWHERE=everywhere, BLOCK=_BLOCK,
        )  # fmt: skip
    return values
