"""Flatten a bound problem into its structure and its tensors, so that the tensors can be replaced.

Two batches of one layer give bound problems that differ in their tensors only. A graph that was captured for one serves
the other if it reads from buffers that are refreshed. Pickle knows how to walk through an object and put it together
again; here tensors are left out on the way and put in on the way back. Classes and functions are kept by identity, with
what their code reads: a class that is defined again is another one. Nothing is written to or read from a file.
"""

from __future__ import annotations

import io
import pickle
import types
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _has_any_global_hook

from opteq.engine.values_read import NotFlattenableError, pickling_method, values_read
from opteq.problems.hidden import BoundMap


@dataclass(frozen=True)
class Flattened:
    """The structure of a bound problem, and its tensors in the order in which they are met.

    Attributes:
        structure: equal for two problems exactly where they differ in nothing but tensors.
        tensors: the tensors as constants.
        originals: the same as the problem holds them, tracked by autograd where they were.
        unread: the places of running statistics that are written, and not read, as long as a layer is trained.
    """

    structure: PickledStructure
    tensors: list[Tensor]
    originals: list[Tensor]
    unread: frozenset[int] = frozenset()

    @property
    def read(self) -> list[Tensor]:
        """The originals that may be read: all but running statistics that the next call of a layer changes."""
        return [tensor for place, tensor in enumerate(self.originals) if place not in self.unread]

    @property
    def wanted(self) -> tuple[bool, ...]:
        """Which tensors have a use for a gradient where they come from."""
        return tuple(tensor.requires_grad for tensor in self.originals)

    def with_tensors(self, tensors: Sequence[Tensor]) -> BoundMap:
        """The same problem with other tensors."""
        hidden: BoundMap = _Unflattener(self.structure, tensors).load()
        return hidden


class PickledStructure:
    """A pickled structure, and the classes, functions and globals in it, which are compared by identity."""

    def __init__(self, pickled: bytes, constants: Sequence[Any]) -> None:
        self.pickled = pickled
        self.constants = tuple(constants)
        self._key = pickled, tuple(map(id, self.constants))
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PickledStructure) and self._key == other._key


# A reason is kept as text: an error has a traceback, and that would keep the problem.
_flattened: weakref.WeakKeyDictionary[BoundMap, Flattened | str] = weakref.WeakKeyDictionary()


def flatten(hidden: BoundMap) -> Flattened:
    """``hidden`` in two parts; raises :class:`NotFlattenableError` with the reason where it can't be taken apart."""
    if (found := _flattened.get(hidden)) is None:  # forward and backward ask in turn
        found = _flattened[hidden] = _try_flatten(hidden)
    if isinstance(found, str):
        raise NotFlattenableError(found)
    return found


def structure_of(options: Any) -> PickledStructure:
    """What decides how options of a user act, such as a solver with a regulariser: their values and their code.

    Raises :class:`NotFlattenableError` where they can't be taken apart, or hold tensors.
    """
    found = _try_flatten(options)
    if isinstance(found, str):
        raise NotFlattenableError(found)
    if found.tensors:
        raise NotFlattenableError(f"{type(options).__name__} holds tensors")
    return found.structure


def _try_flatten(hidden: BoundMap) -> Flattened | str:
    if hasattr(hidden, "bound") and _has_any_global_hook():  # type: ignore[no-untyped-call]
        return "hooks on all modules (register_module_forward_hook) are in force"
    if (hooked := _hooked(hidden)) is not None:
        return f"hooks on {hooked}, which would not be called"
    stream = io.BytesIO()
    flattener = _Flattener(stream)
    try:
        flattener.dump(hidden)
    except NotFlattenableError as error:
        return str(error)
    except Exception as error:  # a parametrised module, a user's code: anything may be raised
        owner = getattr(getattr(hidden, "bound", None), "module", hidden)
        return f"{type(owner).__name__} can't be taken apart: {(str(error) or type(error).__name__).splitlines()[0]}"
    structure = PickledStructure(stream.getvalue(), flattener.constants)
    originals = flattener.originals
    unread = frozenset(place for place, tensor in enumerate(originals) if id(tensor) in flattener.statistics)
    return Flattened(structure, [tensor.detach() for tensor in originals], originals, unread)


def _hooked(hidden: Any) -> str | None:
    """A module inside a user's problem with hooks of the user; those of torch's utilities write its weights."""
    problem = getattr(getattr(hidden, "bound", None), "module", None)
    for name, module in () if problem is None else problem.named_modules():
        hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
        if name and any(str(getattr(hook, "__module__", "")).partition(".")[0] != "torch" for hook in hooks):
            return str(name)
    return None


class _Flattener(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.originals: list[Tensor] = []
        self.constants: list[Any] = []
        self.statistics: set[int] = set()

    # Not persistent_id, which is asked of every number and string on the way.
    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            # Pickle itself knows an object that it meets again.
            self.originals.append(item)
            return _placeholder, ("tensor", len(self.originals) - 1)
        if isinstance(item, types.FunctionType):
            return NotImplemented if item is _placeholder else self._function(item)
        if isinstance(item, _CONSTANTS):
            return self._constant(item)
        if isinstance(item, types.MethodType):  # pickle would look it up by its name
            return types.MethodType, (item.__func__, item.__self__)
        if (name := pickling_method(type(item))) is not None:  # type: ignore[arg-type]
            raise NotFlattenableError(f"{type(item).__name__}.{name} may leave out what is read: remove it")
        if isinstance(item, _NormBase) and item.training:
            self.statistics |= {id(buffer) for buffer in item.buffers(recurse=False)}
        return NotImplemented

    def _constant(self, item: Any) -> Any:
        self.constants.append(item)
        place = len(self.constants) - 1
        read = self._read(item) if isinstance(item, type | types.FunctionType) else ()
        return _placeholder, ("constant", place, read)

    def _read(self, item: Any) -> tuple[Any, ...]:
        plain, constants = values_read(item)
        self.constants += constants
        return plain

    def _function(self, function: types.FunctionType) -> Any:
        cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
        operator = function.__module__ == "torch._tensor"  # of torch, which may refer to itself
        if operator or not (cells or function.__defaults__ or function.__kwdefaults__):
            return self._constant(function)
        # Made anew with what is in its cells: tensors there are tensors of the problem.
        self.constants.append(function.__globals__)
        place = len(self.constants) - 1
        parts = (function.__code__, place, function.__name__, function.__defaults__, function.__kwdefaults__, cells)
        return _placeholder, ("function", *parts, self._read(function))


_CONSTANTS = (
    type, types.BuiltinFunctionType, types.ModuleType, types.CodeType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.GetSetDescriptorType,
)  # fmt: skip


def _placeholder(kind: str, *parts: Any) -> Any:  # noqa: ARG001
    """Stands for a tensor, a constant or a function in a structure."""
    raise pickle.UnpicklingError(f"a {kind} of a flattened problem; only Flattened.with_tensors has it")


class _Unflattener(pickle.Unpickler):
    def __init__(self, structure: PickledStructure, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(structure.pickled))
        # Not a method: the unpickler remembers what it returns, and would hold itself and the problem.
        self._made = partial(_made, structure.constants, tensors)

    def find_class(self, module: str, name: str) -> Any:
        ours = module == __name__ and name == _placeholder.__name__
        return self._made if ours else super().find_class(module, name)


def _made(constants: Sequence[Any], tensors: Sequence[Tensor], kind: str, *parts: Any) -> Any:
    if kind != "function":
        return tensors[parts[0]] if kind == "tensor" else constants[parts[0]]
    code, place, name, defaults, keywords, cells, _ = parts
    made = types.FunctionType(code, constants[place], name, defaults, tuple(types.CellType(cell) for cell in cells))
    made.__kwdefaults__ = keywords
    return made
