"""A bound problem taken apart into its structure and its tensors, so that another batch's tensors can take their place.

Two batches of one layer give bound problems that differ in their tensors only. Work that was prepared for one, a
captured graph, serves the other if it reads from copies that are refreshed. Pickle already knows how to walk through
an object and put it together again, and refuses what has no structure to walk, a closure for instance; here tensors are
left out on the way and put in on the way back. Nothing is written anywhere, and nothing is read that was not made here.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from opteq.problems.hidden import BoundMap


@dataclass(frozen=True)
class Frozen:
    """The structure of a bound problem, and its tensors in the order in which they are met.

    ``structure`` is equal for two problems exactly where they differ in nothing but tensors. ``tensors`` are constants;
    ``wanted`` says which of them have a use for a gradient where they come from.
    """

    structure: bytes
    tensors: list[Tensor]
    wanted: tuple[bool, ...]

    def thaw(self, tensors: Sequence[Tensor]) -> BoundMap:
        """The same problem with other tensors."""
        hidden: BoundMap = _Thaw(io.BytesIO(self.structure), tensors).load()
        return hidden


def freeze(hidden: BoundMap) -> Frozen | None:
    """``hidden`` in two parts; None where it holds more than tensors and plain values: a module, or a closure."""
    if hidden.frozen is not None:  # forward and backward ask in turn
        return hidden.frozen if isinstance(hidden.frozen, Frozen) else None
    stream = io.BytesIO()
    freezer = _Freeze(stream)
    try:
        freezer.dump(hidden)
    except (pickle.PicklingError, AttributeError, TypeError):
        hidden.frozen = _WHOLE
        return None
    wanted = tuple(tensor.requires_grad for tensor in freezer.originals)
    frozen = Frozen(stream.getvalue(), freezer.tensors, wanted)
    hidden.frozen, hidden.originals = frozen, freezer.originals
    return frozen


# The mark of a problem that cannot be frozen. It is the problem's own: another of its kind may hold no module.
_WHOLE = "whole"


class _Freeze(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.tensors: list[Tensor] = []
        self.originals: list[Tensor] = []

    # Not persistent_id, which is asked of every number and string on the way.
    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            # Pickle itself knows an object that it meets again.
            self.tensors.append(item.detach())
            self.originals.append(item)
            return _tensor_at, (len(self.tensors) - 1,)
        if isinstance(item, nn.Module):
            # A module may do anything in its forward, and what it does may change between two calls.
            raise pickle.PicklingError(f"a {type(item).__name__} has a life of its own")
        return NotImplemented


def _tensor_at(place: int) -> Tensor:
    """Stands for a tensor in a structure: only who thaws it knows which one."""
    raise pickle.UnpicklingError(f"tensor {place} of a frozen problem; only Frozen.thaw puts one in its place")


class _Thaw(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(stream)
        self.tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == _tensor_at.__name__:
            return self.tensors.__getitem__
        return super().find_class(module, name)
