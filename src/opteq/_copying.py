"""Tensors copied into others of the same shapes, by a device in little time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opteq._triton import may_launch
from opteq.states import is_channels_last

# Entries from which a tensor is copied by itself: one launch for many of them has too few programs for a large one.
_LARGE = 2**20
# Bytes from which the time that a kernel saves a GPU is more than its launch costs Python.
_WORTH = 2**25
# Samples and tiles of a sample that one launch may have.
_MOST = 2**16


def copy_all(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Bring the values of ``tensors`` to ``into``."""
    small: tuple[list[Tensor], list[Tensor]] = [], []
    for own, tensor in zip(into, tensors, strict=True):
        if tensor.numel() < _LARGE:
            small[0].append(own)
            small[1].append(tensor)
        elif _is_turned(own, tensor):
            from opteq._copying_kernels import turn

            with torch.cuda.device_of(own):  # type: ignore[no-untyped-call]  # kernels run on the current device
                turn(tensor, own)
        else:
            own.copy_(tensor)
    if len(small[0]) == 1:  # which has a quicker way
        small[0][0].copy_(small[1][0])
    elif small[0]:
        torch._foreach_copy_(*small)


def _is_turned(own: Tensor, tensor: Tensor) -> bool:
    """Whether pictures are brought from one common layout to the other, and a kernel may do it."""
    return (
        tensor.numel() * tensor.element_size() >= _WORTH
        and tensor.ndim == 4
        and tensor.dtype == own.dtype
        and tensor.is_contiguous()
        and is_channels_last(own)
        and len(tensor) < _MOST
        and tensor[0].numel() < _MOST * 64
        and may_launch(own, tensor)
    )
