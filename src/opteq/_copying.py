"""Tensors copied into others of the same shapes, by a device in little time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opteq._triton import may_launch
from opteq.states import is_channels_last

# Entries from which a tensor is copied by itself: one launch for many of them has too few programs for a large one.
_LARGE = 2**17
# Samples and tiles of a sample that one launch may have.
_MOST = 2**16


def copy_all(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Bring the values of ``tensors`` to ``into``."""
    pairs = list(zip(into, tensors, strict=True))
    small = [(own, tensor) for own, tensor in pairs if tensor.numel() < _LARGE]
    if small:
        torch._foreach_copy_([own for own, _ in small], [tensor for _, tensor in small])
    for own, tensor in pairs:
        if tensor.numel() < _LARGE:
            continue
        if _is_turned(own, tensor):
            from opteq._copying_kernels import turn

            turn(tensor, own)
        else:
            own.copy_(tensor)


def _is_turned(own: Tensor, tensor: Tensor) -> bool:
    """Whether pictures are brought from one common layout to the other, and a kernel may do it."""
    return (
        tensor.ndim == 4
        and tensor.dtype == own.dtype
        and tensor.is_contiguous()
        and is_channels_last(own)
        and len(tensor) < _MOST
        and tensor[0].numel() < _MOST * 64
        and may_launch(own, tensor)
    )
