"""Products of matrices whose precision does not depend on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opteq.states import Autocast


def matrix_product(multiply: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """``multiply(*operands)``, a product of matrices; numbers of 16 bits are multiplied in float32 on a CPU.

    On ARM, torch (2.13) hands a product of 16-bit matrices, one of them transposed, to oneDNN without asking whether
    the CPU has instructions for it. Where it has none that fails, and torch turns oneDNN off for the rest of the
    process: later products of float32, of other layers too, are then others. So none is handed over, here or by the
    derivative of this.
    """
    first = operands[0]
    if first.device.type != "cpu" or first.dtype == torch.float64:
        return multiply(*operands)
    autocast = Autocast.current(first.device)
    dtype = autocast.dtype if autocast.enabled else first.dtype
    if dtype is None or dtype == torch.float32:
        return multiply(*operands)
    with autocast.off():
        return multiply(*(operand.float() for operand in operands)).to(dtype)
