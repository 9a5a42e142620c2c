"""Where captured solves leave their answers: buffers that are copied out in a few launches."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from opteq.solvers.buffers import Buffer, Lot

# What is told about a solve is numbers of eight bytes, one a sample: they are handed out together.
_NUMBERS = (torch.float64, torch.int64)


class Answers:
    """Buffers for a list of tensors, the last of which is the history; they hold those of ``tensors``.

    Args:
        lot: where buffers are taken from.
        tensors: an answer. What nobody else refers to becomes a buffer itself, and is not copied, where none is there.
        lasting: those of them of which the same is true, although the solve refers to them: it writes them, at the same
            place in memory whenever it runs, and nobody else does.
    """

    def __init__(self, lot: Lot, tensors: list[Tensor], lasting: Sequence[Tensor] = ()) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._dtypes = [tensor.dtype for tensor in tensors]
        last = len(tensors) - 1
        self._packed = [
            place
            for place, (shape, dtype) in enumerate(zip(self._shapes, self._dtypes, strict=True))
            if dtype in _NUMBERS and (len(shape) <= 1 or place == last)
        ]
        self._sizes = [math.prod(self._shapes[place]) for place in self._packed]
        room = sum(self._sizes)
        device = tensors[0].device
        self._numbers: Buffer | None = None
        if room:
            self._numbers = lot.take(torch.empty(room, dtype=torch.int64, device=device))
        own = {id(tensor) for tensor in lasting}
        apart = [id(tensors[place]) in own or nobody_elses(tensors, place) for place in range(len(tensors))]
        self._alone = {
            place: lot.take(tensors[place], apart[place]) for place in range(len(tensors)) if place not in self._packed
        }
        self.write(tensors)

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Bring an answer to the buffers."""
        for place, buffer in self._alone.items():
            if buffer.tensor is not tensors[place]:
                buffer.tensor.copy_(tensors[place])
        if self._numbers is not None:
            flat = [tensors[place].reshape(-1).view(torch.int64) for place in self._packed]
            torch.cat(flat, out=self._numbers.tensor)

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
            parts = self._numbers.tensor.clone().split_with_sizes(self._sizes)
            for place, own in zip(self._packed, parts, strict=True):
                shape, dtype = self._shapes[place], self._dtypes[place]
                own = own if dtype == torch.int64 else own.view(dtype)
                made[place] = own if len(shape) == 1 else own.view(shape)
        return [made[place] for place in range(len(self._shapes))]


def nobody_elses(tensors: list[Tensor], place: int) -> bool:
    """Whether only this list refers to a tensor, and only this tensor to its memory."""
    alone = [torch.empty(0, device="cpu")]
    dense = tensors[place].untyped_storage().nbytes() == tensors[place].numel() * tensors[place].element_size()
    return (
        dense
        and not tensors[place].requires_grad
        and sys.getrefcount(tensors[place]) == sys.getrefcount(alone[0])
        and tensors[place]._use_count() == alone[0]._use_count()  # type: ignore[attr-defined]
        and _uses(tensors[place]) == _uses(alone[0])
    )


def _uses(tensor: Tensor) -> int:
    """How many tensors have the memory of this one, and one more."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
