"""Where captured solves leave their answers: buffers that are copied out in a few launches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from opteq.solvers.buffers import Buffer, Lot

# What is told about a solve is numbers of eight bytes, one a sample: they are handed out together.
_NUMBERS = (torch.float64, torch.int64)


class Answers:
    """Buffers for a list of tensors with fixed shapes, but for the first dimension of the last, the history.

    Args:
        lot: where buffers are taken from.
        tensors: an answer, for its form.
        longest: as many entries as the history can have.
    """

    def __init__(self, lot: Lot, tensors: Sequence[Tensor], longest: int) -> None:
        *fixed, history = tensors
        self._shapes = [*(tensor.shape for tensor in fixed), torch.Size((longest, *history.shape[1:]))]
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._packed = [
            place
            for place, tensor in enumerate(tensors)
            if tensor.dtype in _NUMBERS and (tensor.ndim <= 1 or tensor is history)
        ]
        self._alone = {
            place: lot.take(tensor.new_empty(longest, *tensor.shape[1:]) if tensor is history else tensor)
            for place, tensor in enumerate(tensors)
            if place not in self._packed
        }
        room = sum(math.prod(self._shapes[place]) for place in self._packed)
        self._numbers: Buffer | None = lot.take(history.new_empty(room, dtype=torch.int64)) if room else None

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Bring an answer to the buffers; its history may be shorter than they allow."""
        for place, buffer in self._alone.items():
            tensor = tensors[place]
            own = buffer.tensor
            (own[: len(tensor)] if own.shape != tensor.shape else own).copy_(tensor)
        if self._numbers is not None:
            flat = [tensors[place].reshape(-1).view(torch.int64) for place in self._packed]
            torch.cat(flat, out=self._numbers.tensor[: sum(len(part) for part in flat)])

    def forget(self) -> None:
        """To be called before anything is written: whatever happens then, nobody takes it for what was there."""
        for buffer in self._alone.values():
            buffer.note(None)

    def copies(self, lend: bool = False) -> list[Tensor]:
        """What the buffers hold. A backward pass that soon asks for such a copy will find it there.

        With ``lend`` all but numbers are copied only before they are overwritten (:meth:`Buffer.lend`).
        """
        made: dict[int, Tensor] = {}
        lend = lend and not torch.is_inference_mode_enabled()  # where nobody may put other memory behind a tensor
        for place, buffer in self._alone.items():
            if lend:
                made[place] = buffer.lend()
            else:
                made[place] = buffer.tensor.clone()
                buffer.note(made[place])
        if self._numbers is not None:
            numbers, begin = self._numbers.tensor.clone(), 0
            for place in self._packed:
                shape, dtype = self._shapes[place], self._dtypes[place]
                size = math.prod(shape)
                own = numbers.narrow(0, begin, size)
                own = own if dtype == torch.int64 else own.view(dtype)
                made[place] = own if len(shape) == 1 else own.view(shape)
                begin += size
        return [made[place] for place in range(len(self._shapes))]
