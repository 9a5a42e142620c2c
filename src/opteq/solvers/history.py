"""The last few differences that a quasi-Newton method remembers, a ring of columns for every row."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.states import choose_rows, zeros_a_row


class History:
    """``memory`` vectors a row, written round and round: a tensor ``(R, memory, N)`` that starts at zero.

    Only finite columns are written, so the weight zero is enough to leave one out.
    """

    def __init__(self, like: Tensor, memory: int) -> None:
        self.columns = zeros_a_row(like, memory, like.shape[1])
        self.slot = -1

    @property
    def following(self) -> int:
        """The slot that is written next, which holds the oldest column."""
        return (self.slot + 1) % self.columns.shape[1]

    def push(self, column: Tensor, rows: Tensor) -> None:
        """Write ``column`` over the oldest one in ``rows``; other rows keep theirs."""
        self.slot = self.following
        self._write(self.slot, choose_rows(rows, column, self.columns[:, self.slot]))

    def products(self, *vectors: Tensor) -> Tensor:
        """Inner products of every column with each vector ``(R, N)``: ``(R, memory, len(vectors))``."""
        return self.columns @ torch.stack(vectors, dim=2)

    def combine(self, weights: Tensor) -> Tensor:
        """The sum of the columns with ``weights`` ``(R, memory)``: ``(R, N)``."""
        return (weights.to(self.columns.dtype)[:, None, :] @ self.columns)[:, 0]

    def _write(self, slot: int, column: Tensor) -> None:
        if torch.is_grad_enabled() and (column.requires_grad or self.columns.requires_grad):
            # On a tape the old columns are still needed as they were.
            before, after = self.columns[:, :slot], self.columns[:, slot + 1 :]
            self.columns = torch.cat([before, column[:, None], after], dim=1)
        else:
            self.columns[:, slot] = column


def with_column(matrix: Tensor, slot: int, values: Tensor) -> Tensor:
    """A copy with ``[:, slot]`` replaced; the copy is small, and a tape may still need the original."""
    matrix = matrix.clone()
    matrix[:, slot] = values
    return matrix
