"""Whether the fused kernels can be used here; without them the same steps run as tensor operations."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq._fast import has_triton, settings

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

MOST_COLUMNS = 8
"""Differences that the fused Anderson step can remember: its small system is one tile of a GPU program."""


def supports(parts: tuple[Tensor, ...]) -> bool:
    """Whether states made of ``parts`` can be advanced by the fused kernels."""
    first = parts[0]
    return (
        settings.fused
        and (first.is_cuda or settings.interpreted)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and all(part.dtype in _DTYPES and part.numel() > 0 for part in parts)
        and has_triton()
    )
