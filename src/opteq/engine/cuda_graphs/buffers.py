"""Static buffers that captured graphs read their inputs from and write their outputs to.

The graphs of a stream run one after the other, and each copies its inputs in before and its outputs out after. So one
buffer of a form (shape, strides, dtype) serves them all. A buffer remembers which tensor's values it holds: a backward
pass that follows its forward pass finds weights, input and state where that one left them, and copies none of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


class Buffer:
    """Memory that graphs know by its address, and which tensor's values are in it."""

    age = 0

    def __init__(self, like: Tensor) -> None:
        # Made while a graph is captured, it lies in memory that earlier graphs may write to when they run again.
        self.captured = like.is_cuda and torch.cuda.is_current_stream_capturing()
        self.tensor = torch.empty_like(like)
        self._source: weakref.ref[Tensor] | None = None
        self._version = -1

    def holds(self, tensor: Tensor) -> bool:
        """Whether the values of ``tensor``, as it is now, are here."""
        return self._source is not None and self._source() is tensor and self._version == tensor._version

    def note(self, tensor: Tensor | None) -> None:
        """Remember that the values of ``tensor`` are here; None where they are of no known tensor."""
        if tensor is None or tensor.is_inference():  # which counts no changes
            self._source = None
        else:
            self._source, self._version = weakref.ref(tensor), tensor._version


def fill(buffers: Sequence[Buffer], tensors: Sequence[Tensor]) -> None:
    """Copy the values of ``tensors`` to ``buffers``, where they are not there."""
    absent = [(buffer, tensor) for buffer, tensor in zip(buffers, tensors, strict=True) if not buffer.holds(tensor)]
    if absent:
        copy_all([buffer.tensor for buffer, _ in absent], [tensor for _, tensor in absent])
    for buffer, tensor in absent:
        buffer.note(tensor)


# Entries from which a tensor is copied by itself: one launch for many of them has too few programs for a large one.
_LARGE = 2**20


def copy_all(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy the values of ``tensors`` to ``into``, small ones in one launch."""
    small: tuple[list[Tensor], list[Tensor]] = [], []
    for own, tensor in zip(into, tensors, strict=True):
        if tensor.numel() < _LARGE:
            small[0].append(own)
            small[1].append(tensor)
        else:
            own.copy_(tensor)
    if small[0]:
        torch._foreach_copy_(*small)


def dense(tensor: Tensor) -> Tensor:
    """``tensor``, or a contiguous copy where its entries overlap or leave gaps in memory."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


class BufferSet:
    """The buffers of one graph: no two of them are the same, other graphs may have any of them too."""

    def __init__(self, shared: SharedBuffers) -> None:
        self._shared = shared
        self._taken: dict[Hashable, int] = {}

    def filled(self, tensors: Sequence[Tensor]) -> list[Buffer]:
        """Buffers with the values of ``tensors``."""
        # Buffers of inference mode could not be written to outside of it, and the next batch may come from there.
        with torch.inference_mode(False):
            buffers = [self.take(tensor) for tensor in tensors]
        fill(buffers, tensors)
        return buffers

    def take(self, like: Tensor) -> Buffer:
        """A buffer with shape, strides and dtype of ``like`` that this graph has not taken yet."""
        form = like.shape, like.stride(), like.dtype
        place = self._taken.get(form, 0)
        self._taken[form] = place + 1
        return self._shared.at((*form, place), like)


class SharedBuffers:
    """All buffers of a stream, by form and number. They live as long as a graph has them."""

    def __init__(self) -> None:
        self._buffers: weakref.WeakValueDictionary[Hashable, Buffer] = weakref.WeakValueDictionary()
        self._age = self._youngest = 0

    def at(self, key: Hashable, like: Tensor) -> Buffer:
        """The buffer of this key, made where there is none."""
        found = self._buffers.get(key)
        if found is None:
            found = self._buffers[key] = Buffer(like)
            found.age = self._age
            self._youngest = self._age if found.captured else self._youngest
        return found

    def next_age(self) -> int:
        """To be called when a capture begins; buffers made from then on are of the age that is returned."""
        self._age += 1
        return self._age

    def overwritten_by(self, age: int) -> None:
        """Forget what is in buffers that a graph of this age writes to, because they were not there when it was made.

        Graphs of one pool hand memory on to those that are captured after them, buffers included.
        """
        if age >= self._youngest:
            return
        for buffer in list(self._buffers.values()):
            if buffer.captured and buffer.age > age:
                buffer.note(None)
