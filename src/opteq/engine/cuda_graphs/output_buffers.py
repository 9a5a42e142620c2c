"""Where captured solves leave their outputs: buffers that are copied out in a few launches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opteq.engine.cuda_graphs.buffers import BufferSet

# Statistics of a solve have eight bytes per sample: they are handed out together.
_STATISTICS = (torch.float64, torch.int64)


class OutputBuffers:
    """Buffers for a list of tensors, the last of which is the history of residuals.

    Args:
        buffers: where buffers are taken from.
        tensors: an output, which is copied to the buffers.
    """

    def __init__(self, buffers: BufferSet, tensors: list[Tensor]) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._dtypes = [tensor.dtype for tensor in tensors]
        last = len(tensors) - 1
        self._packed = [
            place
            for place, (shape, dtype) in enumerate(zip(self._shapes, self._dtypes, strict=True))
            if dtype in _STATISTICS and (len(shape) <= 1 or place == last)
        ]
        self._sizes = [math.prod(self._shapes[place]) for place in self._packed]
        device = tensors[0].device
        self._statistics = buffers.take(torch.empty(sum(self._sizes), dtype=torch.int64, device=device))
        self._alone = {i: buffers.take(tensor) for i, tensor in enumerate(tensors) if i not in self._packed}
        for place, buffer in self._alone.items():
            buffer.tensor.copy_(tensors[place])
        flat = [tensors[place].reshape(-1).view(torch.int64) for place in self._packed]
        torch.cat(flat, out=self._statistics.tensor)

    def forget(self) -> None:
        """To be called before a graph writes here: the buffers no longer hold what they held."""
        for buffer in (self._statistics, *self._alone.values()):
            buffer.note(None)

    def copies(self) -> list[Tensor]:
        """Copies of the buffers. A backward pass that reads such a copy finds its values in the buffer."""
        made: dict[int, Tensor] = {}
        for place, buffer in self._alone.items():
            made[place] = buffer.tensor.clone()
            buffer.note(made[place])
        parts = self._statistics.tensor.clone().split_with_sizes(self._sizes)
        for place, own in zip(self._packed, parts, strict=True):
            shape, dtype = self._shapes[place], self._dtypes[place]
            own = own if dtype == torch.int64 else own.view(dtype)
            made[place] = own if len(shape) == 1 else own.view(shape)
        return [made[place] for place in range(len(self._shapes))]
