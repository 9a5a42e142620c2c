"""Whether the fused kernels can be used here; without them the same steps run as tensor operations."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq._triton import may_launch

MOST_COLUMNS = 8
"""Differences that the fused Anderson step can remember: its small system is one tile of a GPU program."""


def supports(parts: tuple[Tensor, ...]) -> bool:
    """Whether states made of ``parts`` can be advanced by the fused kernels."""
    return not torch.is_grad_enabled() and may_launch(*parts)
