"""The last few differences that a quasi-Newton method remembers, a ring of columns for every row."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.states import zeros_a_row


class History:
    """At most ``memory`` vectors a row, written round and round.

    Only finite columns are written, so the weight zero is enough to leave one out. The place for a column is taken when
    there is one: the first steps of a solve, which on a CPU are most of them, read and clear no empty ones.
    """

    def __init__(self, like: Tensor, memory: int) -> None:
        self.memory = memory
        self.slot = -1
        self.filled = 0
        plain = not torch._C._are_functorch_transforms_active()
        shape = (memory, like.shape[1])
        self._ring = like.new_empty(like.shape[0], *shape) if plain else zeros_a_row(like, *shape)

    @property
    def columns(self) -> Tensor:
        """The vectors that were written, ``(R, filled, N)``."""
        return self._ring[:, : self.filled]

    @property
    def following(self) -> int:
        """The slot that is written next, which holds the oldest column."""
        return (self.slot + 1) % self.memory

    @property
    def newest(self) -> Tensor:
        """What was written last, ``(R, N)``."""
        return self._ring[:, self.slot]

    def push(self, vector: Tensor, scale: Tensor, rows: Tensor) -> None:
        """Write ``vector / scale`` over the oldest column in ``rows``; others keep theirs, or zeros."""
        slot = self.slot = self.following
        new = slot == self.filled
        self.filled += new
        taped = torch.is_grad_enabled() and (vector.requires_grad or self._ring.requires_grad)
        column = torch.where(rows[:, None], vector / scale, 0.0 if new else self._ring[:, slot])
        if taped:  # the old columns are still needed as they were
            self._ring = torch.cat([self._ring[:, :slot], column[:, None], self._ring[:, slot + 1 :]], dim=1)
        else:
            self._ring[:, slot] = column

    def products(self, vector: Tensor) -> Tensor:
        """Inner products of every column with a vector ``(R, N)``: ``(R, memory)``, zeros where there is none yet."""
        # With the vector on the left: a CPU takes less than half the time that it takes the other way round.
        found = (vector[:, None] @ self.columns.mT)[:, 0]
        return torch.nn.functional.pad(found, (0, self.memory - self.filled))

    def combine(self, weights: Tensor) -> Tensor:
        """The sum of the columns with ``weights`` ``(R, memory)``: ``(R, N)``."""
        return (self._weights(weights) @ self.columns)[:, 0]

    def subtract(self, vector: Tensor, weights: Tensor) -> Tensor:
        """``vector`` without the sum of the columns with ``weights``, in one pass."""
        return torch.baddbmm(vector[:, None], self._weights(weights), self.columns, alpha=-1)[:, 0]

    def _weights(self, weights: Tensor) -> Tensor:
        return weights[:, None, : self.filled].to(self._ring.dtype)


def with_column(matrix: Tensor, slot: int, values: Tensor) -> Tensor:
    """A copy with ``[:, slot]`` replaced; the copy is small, and a tape may still need the original."""
    matrix = matrix.clone()
    matrix[:, slot] = values
    return matrix
