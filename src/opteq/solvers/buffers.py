"""Buffers that captured solves read their inputs from and write their answers to, shared by all solves of a stream.

The solves of a stream run one after the other, and each copies its inputs in before and its answers out after. So one
buffer of a form serves them all. It remembers what it holds: a backward pass that follows its forward pass finds
weights, input and state where that one has left them, and copies none of them again. And it remembers to whom it lent
what it holds, so that answers are copied only before somebody else writes there.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from opteq._copying import copy_all


class Buffer:
    """Memory that graphs know by its address, and which tensor's values are in it."""

    age = 0

    def __init__(self, like: Tensor, taken: bool = False) -> None:
        # Made while a graph is captured, it lies in memory that earlier graphs may write to when they run again.
        self.captured = like.is_cuda and torch.cuda.is_current_stream_capturing()
        self.tensor = like if taken else torch.empty_like(like)
        self._source: weakref.ref[Tensor] | None = None
        self._version = -1
        self._lent: weakref.ref[Tensor] | None = None

    def holds(self, tensor: Tensor) -> bool:
        """Whether the values of ``tensor``, as it is now, are here."""
        return self._source is not None and self._source() is tensor and self._version == tensor._version

    def note(self, tensor: Tensor | None) -> None:
        """Remember that the values of ``tensor`` are here; None where nobody has them.

        To be called before anything is written: who was lent what is here has a copy from then on.
        """
        lent = None if self._lent is None else self._lent()
        if lent is not None and lent is not tensor:
            with torch.inference_mode(False):
                lent.data = lent.clone()
            del lent._lender  # type: ignore[attr-defined]
            self._lent = None
        if tensor is None or tensor.is_inference():  # which counts no changes
            self._source = None
        else:
            self._source, self._version = weakref.ref(tensor), tensor._version

    def lend(self) -> Tensor:
        """What is here, not copied before somebody else writes here. Whoever takes views of it should :func:`own` it.

        Most answers are looked at once, by the next solve, and gone before the one after that.
        """
        self.note(None)
        lent = self.tensor.data  # whose changes are counted apart
        lent._lender = self  # type: ignore[attr-defined]  # which lives as long
        self._lent = weakref.ref(lent)
        self.note(lent)
        return lent


def own(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy of what was lent."""
    return tensor.clone() if hasattr(tensor, "_lender") else tensor


def fill(buffers: Sequence[Buffer], tensors: Sequence[Tensor]) -> None:
    """Bring the values of ``tensors`` to ``buffers``, where they are not there."""
    absent = [(buffer, tensor) for buffer, tensor in zip(buffers, tensors, strict=True) if not buffer.holds(tensor)]
    for buffer, _ in absent:
        buffer.note(None)
    if absent:
        copy_all([buffer.tensor for buffer, _ in absent], [tensor for _, tensor in absent])
    for buffer, tensor in absent:
        buffer.note(tensor)


class Lot:
    """The buffers of one solve: no two of them are the same, other solves may have any of them too."""

    def __init__(self, shared: SharedBuffers) -> None:
        self._shared = shared
        self._taken: dict[Hashable, int] = {}

    def filled(self, tensors: Sequence[Tensor], forms: Sequence[Tensor] | None = None) -> list[Buffer]:
        """Buffers with the values of ``tensors``, and with the strides of ``forms`` where these are given."""
        # Buffers of inference mode could not be written to outside of it, and the next batch may come from there.
        with torch.inference_mode(False):
            buffers = [self.take(tensor) for tensor in (tensors if forms is None else forms)]
        fill(buffers, tensors)
        return buffers

    def take(self, like: Tensor, itself: bool = False) -> Buffer:
        """A buffer with shape, strides and dtype of ``like`` that this solve has not taken yet.

        It may be ``like`` ``itself``, of which the caller makes no other use.
        """
        form = like.shape, like.stride(), like.dtype
        place = self._taken.get(form, 0)
        self._taken[form] = place + 1
        return self._shared.at((*form, place), like, itself)


class SharedBuffers:
    """All buffers of a stream, by form and number. They live as long as a solve has them."""

    def __init__(self) -> None:
        self._buffers: weakref.WeakValueDictionary[Hashable, Buffer] = weakref.WeakValueDictionary()
        self._age = self._youngest = 0

    def lot(self) -> Lot:
        """The beginning of a solve's buffers."""
        return Lot(self)

    def at(self, key: Hashable, like: Tensor, itself: bool = False) -> Buffer:
        """The buffer of this key, made where there is none, maybe of ``like`` ``itself``."""
        found = self._buffers.get(key)
        if found is None:
            found = self._buffers[key] = Buffer(like, itself)
            found.age = self._age
            self._youngest = self._age if found.captured else self._youngest
        return found

    def next_age(self) -> int:
        """To be called when the capture of a solve begins; what is made from then on is of the age that is returned."""
        self._age += 1
        return self._age

    def overwritten_by(self, age: int) -> None:
        """Forget what is in buffers that a solve of this age writes to, because they were not there when it was made.

        Graphs of one pool hand memory on to those that are captured after them, buffers included.
        """
        if age >= self._youngest:
            return
        for buffer in list(self._buffers.values()):
            if buffer.captured and buffer.age > age:
                buffer.note(None)
