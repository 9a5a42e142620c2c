"""Triton kernels for the bias of channels-last pictures: added to all pixels, and its derivative, a sum over them.

In memory such a batch is a matrix ``(pixels, C)``. One program takes tiles of ``PIXELS`` pixels and ``CHANNELS``
channels of each. Sums are in ``WIDE``; those of the derivative come in as many parts as there are programs, which the
caller adds up, always in the same order.

:mod:`opteq.operators.biased` launches them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pixels"])
def add(
    source, bias, out, pixels, C: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The pictures with the bias added."""
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = pixel[:, None] * C + channel[None, :]
    inside = (pixel < pixels)[:, None] & (channel < C)[None, :]
    own = tl.load(bias + channel, mask=channel < C, other=0.0).to(WIDE)
    value = tl.load(source + there, mask=inside, other=0.0).to(WIDE) + own[None, :]
    tl.store(out + there, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pixels", "tiles"])
def sums(
    source, parts, pixels, tiles, C: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """For this program's ``tiles``, the sum of every channel."""
    part = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros((PIXELS, CHANNELS), dtype=WIDE)
    for tile in range(tiles):
        pixel = (part * tiles + tile) * PIXELS + tl.arange(0, PIXELS)
        inside = (pixel < pixels)[:, None] & (channel < C)[None, :]
        total += tl.load(source + pixel[:, None] * C + channel[None, :], mask=inside, other=0.0).to(WIDE)
    tl.store(parts + part * C + channel, tl.sum(total, axis=0), mask=channel < C)
