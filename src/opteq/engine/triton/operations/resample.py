"""Resampling channels-last images on a GPU, in one pass over memory; torch's kernels take several times as long."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opteq.engine.triton.launch import columns, may_launch, may_load
from opteq.states import working_dtype

_WARPS = 4
# What a thread reads at once: the widest load there is.
_BYTES = 16
# As many programs keep a GPU busy; where there are fewer, they are made smaller, down to as many entries.
_BUSY, _FEWEST = 512, 256
# Offsets from here on need 64 bits.
_LARGE = 2**31


def pooled(v: Tensor, factor: int) -> Tensor | None:
    """The mean over squares of ``factor x factor`` pixels; None where torch's own kernels should compute it."""
    batch, channels, height, width = v.shape
    return _resampled("pool", v, (batch, channels, height // factor, width // factor), factor)


def spread(u: Tensor, factor: int) -> Tensor | None:
    """The adjoint of :func:`pooled`; None where torch's own kernels should compute it."""
    batch, channels, height, width = u.shape
    return _resampled("spread", u, (batch, channels, height * factor, width * factor), factor)


def _resampled(name: str, source: Tensor, shape: tuple[int, int, int, int], factor: int) -> Tensor | None:
    if not (may_launch(source) and source.is_contiguous(memory_format=torch.channels_last)):
        return None
    batch, channels, height, width = shape if name == "pool" else source.shape
    pixels = batch * height * width
    wide = columns(channels)
    tall = _pixels(pixels * channels * (1 if name == "pool" else factor), wide, source.element_size())
    large = max(source.numel(), math.prod(shape)) >= _LARGE
    aligned = source.data_ptr() % 16 == 0  # Triton compiles a variant for every one of these
    if not may_load(source, name, source.device, source.dtype, channels, factor, tall, large, aligned):
        return None
    import triton.language as tl

    from opteq.engine.triton.operations import resample_kernels as kernels

    out = torch.empty(shape, dtype=source.dtype, device=source.device, memory_format=torch.channels_last)
    grid = (-(-pixels // tall), -(-channels // wide), 1 if name == "pool" else factor)
    kernel = kernels.pool if name == "pool" else kernels.spread
    with torch.cuda.device_of(source):  # type: ignore[no-untyped-call]  # kernels run on the current device
        kernel[grid](
            source, out, pixels, width, C=channels, K=factor, PIXELS=tall, CHANNELS=wide, LARGE=large,
            WIDE=tl.float64 if working_dtype(source.dtype) == torch.float64 else tl.float32, num_warps=_WARPS,
        )  # fmt: skip
    return out


def _pixels(entries: int, wide: int, size: int) -> int:
    """How many pixels a program takes, a power of two, of ``entries`` in all of ``size`` bytes."""
    tile = _WARPS * 32 * _BYTES // size
    while tile > _FEWEST and entries < tile * _BUSY:
        tile //= 2
    return max(1, tile // wide)
