"""Tensors copied into others of the same shapes, by a device in little time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from opteq._triton import is_capturing, may_launch
from opteq.states import is_channels_last

# Entries from which a tensor is copied by itself: one launch for many of them has too few programs for a large one.
_LARGE = 2**20
# Bytes from which the time that a kernel saves a GPU is more than its launch costs Python.
_WORTH = 2**25
# Samples and tiles of a sample that one launch may have.
_MOST = 2**16
# Variants of the kernel that have been launched, and so compiled and loaded.
_ready: set[Hashable] = set()


def copy_all(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Bring the values of ``tensors`` to ``into``."""
    small: tuple[list[Tensor], list[Tensor]] = [], []
    for own, tensor in zip(into, tensors, strict=True):
        if tensor.numel() < _LARGE:
            small[0].append(own)
            small[1].append(tensor)
        elif not (tensor.nbytes >= _WORTH and _is_turned(own, tensor) and _turn(own, tensor)):
            own.copy_(tensor)
    if len(small[0]) == 1:  # which has a quicker way
        small[0][0].copy_(small[1][0])
    elif small[0]:
        torch._foreach_copy_(*small)


def in_layout_of(tensor: Tensor, wanted: Tensor) -> Tensor:
    """``tensor`` with the strides of ``wanted``; itself where it has them."""
    if tensor.stride() == wanted.stride():
        return tensor
    own = torch.empty_like(wanted, dtype=tensor.dtype)
    if tensor.numel() < _LARGE or not _is_turned(own, tensor) or not _turn(own, tensor):
        own.copy_(tensor)
    return own


def best_turned_inside(tensor: Tensor, wanted: Tensor) -> bool:
    """Whether a graph that is to have ``tensor`` in the layout of ``wanted`` should be given it as it is.

    A kernel inside of it takes no time of Python's. Large tensors are turned on their way, which saves their memory.
    """
    small = tensor.numel() >= _LARGE and tensor.nbytes < _WORTH
    return small and _is_turned(wanted, tensor)


def _is_turned(own: Tensor, tensor: Tensor) -> bool:
    """Whether pictures are brought from one common layout to the other, and a kernel may do it."""
    return (
        tensor.ndim == 4
        and tensor.dtype == own.dtype
        and tensor.is_contiguous()
        and is_channels_last(own)
        and len(tensor) < _MOST
        and tensor.numel() < _MOST * 64 * len(tensor)
        and may_launch(own, tensor)
    )


def _turn(own: Tensor, tensor: Tensor) -> bool:
    """Copy pictures by the kernel; false where it can't be loaded now."""
    variant = (tensor.device, tensor.dtype, tensor.shape[1:], own.data_ptr() % 16, tensor.data_ptr() % 16)
    if variant not in _ready and is_capturing(tensor):
        return False
    from opteq._copying_kernels import turn

    with torch.cuda.device_of(own):  # type: ignore[no-untyped-call]  # kernels run on the current device
        turn(tensor, own)
    _ready.add(variant)
    return True
