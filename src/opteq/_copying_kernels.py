"""Pictures that lie channel by channel, copied to lie pixel by pixel: torch reads or writes them in small steps."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 64


@triton.jit
def _turn(source, out, channels, pixels, TILE: tl.constexpr):
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    pixel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    base = tl.program_id(2).to(tl.int64) * channels * pixels
    inside = (channel < channels)[:, None] & (pixel < pixels)[None, :]
    tile = tl.load(source + base + channel[:, None] * pixels + pixel[None, :], mask=inside)
    there = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    tl.store(out + base + pixel[:, None] * channels + channel[None, :], tl.trans(tile), mask=there)


def turn(source: Tensor, out: Tensor) -> None:
    """Copy ``source (batch, channels, height, width)``, contiguous, to ``out``, channels last, of the same dtype."""
    batch, channels, height, width = source.shape
    grid = (-(-channels // _TILE), -(-height * width // _TILE), batch)
    _turn[grid](source, out, channels, height * width, TILE=_TILE, num_warps=4)
