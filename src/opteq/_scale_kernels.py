"""Powers of two that bring numbers into the range of halves, for kernels that round them."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power_for(top):
    """The exponent of :func:`factor_for`."""
    exponent = (top.to(tl.int32, bitcast=True) >> 23) & 255
    return tl.where(top > 0.0, tl.minimum(140 - exponent, 126), 0)  # small enough to have an inverse


@triton.jit
def factor_for(top):
    """The power of two that takes a number of size ``top`` to [2^13, 2^14), which leaves room for rounding."""
    return ((power_for(top) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(factor):
    """The inverse of a power of two, exactly."""
    power = (factor.to(tl.int32, bitcast=True) >> 23) & 255
    return ((254 - power) << 23).to(tl.float32, bitcast=True)
