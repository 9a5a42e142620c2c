"""Flags of the device written into memory of the host, by a kernel: in a graph a copy takes several times as long."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_AT_A_TIME = 1024


@triton.jit(do_not_specialize=["rows"])
def _tell(flags, told, rows, BLOCK: tl.constexpr):
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        tl.store(told + row, tl.load(flags + row, mask=row < rows, other=0), mask=row < rows)


def tell(flags: Tensor, told: Tensor) -> None:
    """Copy int32 ``flags`` to ``told``, which is page-locked."""
    _tell[(1,)](flags, told, flags.numel(), BLOCK=_AT_A_TIME, num_warps=4)
