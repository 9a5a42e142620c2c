"""Whether a model is still the one that its configuration describes.

Parts of a model are ordinary attributes, and any may be replaced: a stem, a penalty, a solver. Where the new part has
tensors of the same names and shapes, a file of weights would not tell; so the two are compared part by part.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

# Attributes that do not affect what a model computes, or are compared elsewhere.
_ASIDE = {
    *vars(nn.Module()),
    "last",
    "evaluations",
    "observer",
    "on_failure",
    "config",
    "forward",
    "_monitor",
    "_observers",
}


def replaced_parts(model: nn.Module, described: nn.Module) -> list[str]:
    """The names of the parts of ``model`` that are not as in ``described``; only the outermost of each."""
    theirs = dict(described.named_modules(remove_duplicate=False))
    names: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if any(name == part or name.startswith(f"{part}.") for part in names):
            continue
        other = theirs.get(name)
        if other is None or not _same_kind(module, other) or set(module._modules) != set(other._modules):
            names.append(name or "the model itself")
        else:
            options = _options(module)
            names += [
                f"{name}.{option}".lstrip(".")
                for option, value in _options(other).items()
                if option not in options or not _comparably_same(options[option], value)
            ]
    return names


def _same_kind(a: nn.Module, b: nn.Module) -> bool:
    # Several processes share the statistics of a batch by normalisations of other classes, which compute the same.
    return _same_type(a, b) or (isinstance(a, _BatchNorm) and isinstance(b, _BatchNorm))


def _same_type(a: Any, b: Any) -> bool:
    """A class that a function makes is another one at every call, with the same name."""
    names = [(kind.__module__, kind.__qualname__) for kind in (type(a), type(b))]
    return names[0] == names[1]


def _options(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _ASIDE}


def _comparably_same(a: Any, b: Any) -> bool:
    try:
        return _same(a, b)
    except Exception:  # objects that refer to themselves, arrays of other shapes: of a user, and never in the way
        return False


def _same(a: Any, b: Any) -> bool:
    """Whether two options say the same; tensors and modules in them are compared elsewhere."""
    if not _same_type(a, b):
        return False
    if a is b or isinstance(a, Tensor | nn.Module):
        return True
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if dataclasses.is_dataclass(a):
        return all(_same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    if callable(a) and hasattr(a, "__qualname__"):
        return (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__)
    if getattr(type(a), "__eq__", None) is getattr(object, "__eq__", None) and hasattr(a, "__dict__"):
        return _same(dict(vars(a)), dict(vars(b)))
    equal = a == b
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)  # of arrays, in every entry
