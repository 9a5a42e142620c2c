"""The plain values that a user's code reads from its classes and modules: no object holds them, so no pickle has them.
A graph that was made with a number of a notebook cell would be stale once it changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from types import CodeType, FunctionType, ModuleType
from typing import Any

_PLAIN = (bool, int, float, complex, str, type(None), list, tuple, dict, set)


def values_read(item: Any) -> tuple[tuple[str, str], ...]:
    """Names and values that the code of a class or of a function can see, helpers of the same package included."""
    package, found, seen = _package(item), {}, [item]
    for one in seen if package not in {"opteq", "torch", "builtins"} else ():
        for name, value in _of_class(one) if isinstance(one, type) else _of_code(one.__code__, one.__globals__):
            if isinstance(value, _PLAIN) and (not isinstance(value, Sized) or len(value) <= 64):
                found[name] = repr(value)
            elif isinstance(value, type | FunctionType) and _package(value) == package and value not in seen:
                seen.append(value)
    return tuple(sorted(found.items()))


def _package(item: Any) -> str:
    return str(getattr(item, "__module__", "")).partition(".")[0]


def _of_class(item: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(item).items():
        if not name.startswith("__"):
            yield f"{item.__qualname__}.{name}", getattr(value, "__func__", getattr(value, "fget", value))
    yield from ((base.__qualname__, base) for base in item.__mro__[1:])


def _of_code(code: CodeType, known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in ((name, known[name]) for name in code.co_names if name in known):
        yield f"{known.get('__name__')}.{name}", value
        if isinstance(value, ModuleType):
            yield from ((f"{value.__name__}.{at}", vars(value)[at]) for at in code.co_names if at in vars(value))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _of_code(inner, known)
