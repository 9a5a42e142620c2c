"""Memory that solves on a CPU work in, and give back: what is fresh has to be mapped by the system, page by page."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# A thread keeps no more than so many bytes for its next solve.
_MOST_KEPT = 2**26


class Room:
    """Tensors by name, which one solve after the other writes to; none of them is ever handed out."""

    def __init__(self) -> None:
        self._held: dict[object, Tensor] = {}

    def take(self, name: object, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor on the CPU that holds what its last user left there, or zeros where it has had none."""
        count = math.prod(shape)
        held = self._held.get((name, dtype))
        if held is None or held.numel() < count:
            with torch.inference_mode(False):  # whoever comes later has to be able to write to it
                held = self._held[name, dtype] = torch.zeros(count, dtype=dtype, device="cpu")
        return held[:count].view(shape)

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(held.numel() * held.element_size() for held in self._held.values())


class _Rooms(threading.local):
    def __init__(self) -> None:
        self.free: list[Room] = []


_rooms = _Rooms()


@contextmanager
def room() -> Iterator[Room]:
    """A room that nobody else is in: what this thread has kept, or another where a solve is inside of a solve."""
    mine = _rooms.free.pop() if _rooms.free else Room()
    try:
        yield mine
    finally:
        if not _rooms.free and mine.size <= _MOST_KEPT:
            _rooms.free.append(mine)
