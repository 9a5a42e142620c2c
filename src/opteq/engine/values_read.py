"""What a user's code reads from classes, modules and closures: constants and plain values.

No object of a problem holds these, so no pickle has them, and a graph made with them would be stale once they change.
Objects that can change inside are not compared: code that reads one is neither traced nor captured.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from enum import Enum
from functools import _lru_cache_wrapper, lru_cache
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, GenericAlias, ModuleType, UnionType
from typing import Any

import numpy as np
import torch

from opteq.penalties import Penalty

_PLAIN = (
    bool, int, float, complex, str, bytes, range, slice, type(None), type(...), Enum, np.generic, np.dtype, torch.dtype,
    torch.device, torch.memory_format, torch.layout, torch.finfo, torch.iinfo,
)  # fmt: skip
_CONSTANT = (
    type, FunctionType, _lru_cache_wrapper, ModuleType, UnionType, GenericAlias, np.ufunc, type(np.sum),
    torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip
_GETTERS = ("__func__", "fget", "func")
_MOST_ENTRIES = 64
_UNSEEN = {"getenv", "import_module", "open"}  # functions that read what their callers' code does not show
_CHANGING = {"datetime", "io", "pathlib", "random", "secrets", "time", "uuid"}  # modules of clocks, files and noise
_WITHOUT = {"opteq", "torch", "builtins"}  # packages whose code is not searched


class NotFlattenableError(Exception):
    """A problem that holds or reads more than modules, tensors, functions and plain values."""


def values_read(item: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """Plain values that the code of a class or a function can see, with names, and constants in the same order.

    Includes code of the same package, and of packages that are not installed. Raises :class:`NotFlattenableError` for
    an object that is neither plain nor constant.
    """
    item = _undecorated(item)
    package = _package(item)
    plain: list[Any] = []
    constants: list[Any] = []
    seen = [] if package in _WITHOUT else [item]
    for place, one in enumerate(seen):
        for name, value in _of_class(one) if isinstance(one, type) else _of_function(one, cells=place > 0):
            if type(value) is not FunctionType and _entries(value) <= _MOST_ENTRIES:
                plain.append((place, name, repr(value)))
                continue
            if not _is_constant(value):
                kind = f"a{'n' * (type(value).__name__[0] in 'aeiouAEIOU')} {type(value).__name__}"
                raise NotFlattenableError(f"it reads the {name}, {kind}: pass it as an attribute of the module")
            plain.append((place, name))
            constants.append(value)
            inner = _undecorated(value, package)
            if isinstance(inner, type | FunctionType) and _is_followed(inner, package) and inner not in seen:
                seen.append(inner)
    return tuple(plain), constants


@lru_cache
def pickling_method(kind: type) -> str | None:
    """A method of a user by which objects are pickled: they may have more than that shows."""
    methods = ((name, getattr(kind, name, None)) for name in ("__getstate__", "__reduce__", "__reduce_ex__"))
    return next((name for name, one in methods if isinstance(one, FunctionType) and _is_local(_package(one))), None)


def _entries(value: Any) -> float:
    """How many plain values it is; infinite for what is none."""
    if isinstance(value, _PLAIN):
        return 1
    if type(value) not in (list, set, frozenset, dict) and not isinstance(value, tuple):
        return float("inf")
    parts = (*value, *value.values()) if isinstance(value, dict) else value
    return max(1, sum(map(_entries, parts))) if len(value) <= _MOST_ENTRIES else float("inf")


def _is_constant(value: Any) -> bool:
    if str(getattr(value, "__module__", "")).partition(".")[0].lstrip("_") in _CHANGING:
        return False
    if isinstance(value, BuiltinFunctionType):  # not the methods of an object, such as random.random
        return value.__self__ is None or isinstance(value.__self__, type | ModuleType)
    return isinstance(value, _CONSTANT) or type(value).__module__ == "typing"


def _undecorated(item: Any, package: str = "") -> Any:
    """A function without the decorators of torch and other installed packages."""
    wrapped = getattr(item, "__wrapped__", None) if isinstance(item, FunctionType | _lru_cache_wrapper) else None
    known = not isinstance(wrapped, FunctionType) or (isinstance(item, FunctionType) and _is_followed(item, package))
    return item if known else _undecorated(wrapped, package)


def _is_followed(item: Any, package: str) -> bool:
    return _package(item) == package or _is_local(_package(item))


def _package(item: Any) -> str:
    module = item.__globals__.get("__name__") if isinstance(item, FunctionType) else item.__module__
    return str(module).partition(".")[0]


@lru_cache
def _is_local(package: str) -> bool:
    """Whether a package is neither Python's, nor this one, nor installed."""
    module = sys.modules.get(package)
    path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    others = package in _WITHOUT or package in sys.stdlib_module_names  # torch may be built where its sources lie
    return package == "__main__" or not (others or "site-packages" in path or "dist-packages" in path)


def _of_class(item: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(item).items():
        bound = hasattr(type(value), "__get__")  # a function, or a descriptor, which has no value of its own
        method = next((found for at in _GETTERS if bound and (found := getattr(value, at, None))), value)
        if isinstance(method, FunctionType | _lru_cache_wrapper):
            if name not in {"__init__", "__new__", "__init_subclass__"}:  # it exists already
                yield f"method {name}", method
        # The bound problem holds its penalty.
        elif not (
            (bound and not isinstance(type(value).__get__, FunctionType))
            or name.startswith(("__", "_abc_"))
            or (name == "penalty" and isinstance(value, Penalty))
        ):
            yield f"class attribute {item.__name__}.{name}", value
    yield from ((f"class {base.__name__}", base) for base in item.__mro__[1:] if _package(base) not in _WITHOUT)


def _of_function(function: FunctionType, cells: bool) -> Iterator[tuple[str, Any]]:
    """Without cells and defaults for a function that the problem holds: they are part of its structure."""
    if cells:
        given = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
        yield from ((f"default {place} of {function.__name__}", value) for place, value in enumerate(given))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if cell != CellType():
                yield f"variable {name}", cell.cell_contents
    yield from (
        (f"attribute {function.__name__}.{name}", value) for name, value in vars(function).items() if name[0] != "_"
    )
    yield from _of_globals(function.__code__, function.__globals__)


def _of_globals(code: CodeType, known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    names, attributes, imported = _names(code)
    found = {name: known[name] for name in names if name in known}
    package = str(known.get("__package__"))  # of relative imports
    imported = [at for name in imported for at in (name, name.partition(".")[0], package, f"{package}.{name}")]
    modules = [sys.modules[name] for name in imported if name in sys.modules]
    modules += [value for value in found.values() if isinstance(value, ModuleType)]
    dynamic = any(_is_local(module.__name__.partition(".")[0]) for module in modules) * ["getattr", "vars"]
    unseen = {"eval", "exec", "globals", *dynamic}.intersection(names) | _UNSEEN.intersection(names + attributes)
    if unseen:
        raise NotFlattenableError(f"it calls {min(unseen)}, which may read anything: use an attribute of the module")
    yield from ((f"global {name}", value) for name, value in found.items())
    for module in modules:
        for at in attributes:  # any of them may be the module's
            if at in vars(module):
                value = vars(module)[at]
                yield f"global {module.__name__}.{at}", value
                if isinstance(value, ModuleType) and value not in modules:
                    modules.append(value)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _of_globals(inner, known)


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> list[list[str]]:
    """The globals that code reads, the attributes, and the modules that it imports."""
    kinds = {"LOAD_GLOBAL", "LOAD_NAME"}, {"LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"}, {"IMPORT_NAME"}
    found = dict.fromkeys((step.opname, step.argval) for step in dis.get_instructions(code))
    return [[name for operation, name in found if operation in kind] for kind in kinds]
