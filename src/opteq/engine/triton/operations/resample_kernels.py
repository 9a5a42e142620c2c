"""Triton kernels that average channels-last images over squares of pixels, and spread them back: one pass each.

In memory a channels-last image is a matrix ``(pixels, C)``. Rows of pixels are counted on from image to image, so
a batch is one tall image: the coarse pixel ``p``, in row ``p // width``, has its square at the fine pixels

    corner + i K width + j,    corner = K (p + (p // width) (K - 1) width),    0 <= i, j < K,

where ``width`` is the coarse one. One program takes ``PIXELS`` coarse pixels and ``CHANNELS`` channels of each, so it
divides once a pixel, and what its threads read or write together lies together. Sums are in ``WIDE``, and rounded once.
Offsets have 64 bits where the fine images are ``LARGE``.

:mod:`opteq.engine.triton.operations.resample` launches them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(
    pixels, width, C: tl.constexpr, K: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, LARGE: tl.constexpr
):  # fmt: skip
    """Offsets of this program's entries in the coarse image and of their corners in the fine one; which exist."""
    block = tl.program_id(0)
    if LARGE:
        block = block.to(tl.int64)
    pixel = block * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (pixel < pixels)[:, None] & (channel < C)[None, :]
    corner = K * (pixel + pixel // width * ((K - 1) * width))
    return pixel[:, None] * C + channel[None, :], corner[:, None] * C + channel[None, :], inside


@triton.jit(do_not_specialize=["pixels", "width"])
def pool(
    fine, coarse, pixels, width, C: tl.constexpr, K: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
    LARGE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The mean over the square of every coarse pixel."""
    if LARGE:
        width = width.to(tl.int64)
    there, corner, inside = _place(pixels, width, C, K, PIXELS, CHANNELS, LARGE)
    total = tl.zeros((PIXELS, CHANNELS), dtype=WIDE)
    # As many loads under way at once as registers are happy with; a long loop of them would only take long to compile.
    if K <= 4:
        for i in tl.static_range(K):
            for j in tl.static_range(K):
                total += tl.load(fine + corner + (i * K * width + j) * C, mask=inside, other=0.0).to(WIDE)
    elif K <= 16:
        for i in range(K):
            for j in tl.static_range(K):
                total += tl.load(fine + corner + (i * K * width + j) * C, mask=inside, other=0.0).to(WIDE)
    else:
        for i in range(K):
            for j in range(K):
                total += tl.load(fine + corner + (i * K * width + j) * C, mask=inside, other=0.0).to(WIDE)
    tl.store(coarse + there, (total / (K * K)).to(coarse.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pixels", "width"])
def spread(
    coarse, fine, pixels, width, C: tl.constexpr, K: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
    LARGE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Every coarse pixel divided by ``K^2``, at all fine ones of its square: this program's in one of their ``K`` rows.

    The coarse image is read once a row, from the cache but for the first time. In return a program writes one
    stretch of memory, and there are enough of them where the coarse image is small.
    """
    if LARGE:
        width = width.to(tl.int64)
    here, corner, inside = _place(pixels, width, C, K, PIXELS, CHANNELS, LARGE)
    share = tl.load(coarse + here, mask=inside, other=0.0).to(WIDE) / (K * K)
    share = share.to(fine.dtype.element_ty)
    corner += tl.program_id(2) * K * width * C
    if K <= 16:
        for j in tl.static_range(K):
            tl.store(fine + corner + j * C, share, mask=inside)
    else:
        for j in range(K):
            tl.store(fine + corner + j * C, share, mask=inside)
