"""A user's functions, evaluated again and again: what depends on the input and the weights alone is computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_IMPURE = ("dropout", "rand", "bernoulli", "multinomial", "poisson", "binomial", "gumbel", "rrelu", "attention", "seed")
"""Parts of the names of operations that draw random numbers, or may do so; ``normal`` itself is another one."""


class InputOnly(TorchFunctionMode):
    """While this mode is entered, operations on known tensors alone are computed once.

    Known are the given tensors (input, parameters, buffers) and the results of such operations. An operation is
    recognised by its function and its arguments, tensors by identity: values come out as if nothing were kept.
    Operations that write to a tensor, draw random numbers or see a state are left alone. A result that is written to is
    computed every time.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.roots = list(tensors)
        self.results: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Tensor]] = []
        self.written: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Tensor]] = []
        self.tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        self._index()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        key = self._key(func, args, kwargs)
        if key is None:
            self._drop(_target(func, args, kwargs))
            return func(*args, **kwargs)
        if key in self._found:
            return self._found[key]
        result = func(*args, **kwargs)
        # What is computed without autograd is of no use where a gradient is wanted; what a transformation of torch.func
        # has wrapped is of no use after it (``v.to(v.dtype)`` gives v itself outside, and a wrapped one inside).
        wrapped = isinstance(result, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(result)
        kept = type(result) is Tensor and not wrapped and not self._loses_gradient(result)
        if kept and key not in self._written and not any(result is argument for argument in args):
            self.results.append((func, args, kwargs, result))
            self._found[key] = result
            self._known.add(id(result))
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {"roots": self.roots, "results": self.results, "written": self.written, "tracked": self.tracked}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self.roots, self.results, self.tracked = state["roots"], state["results"], state["tracked"]
        self.written = state["written"]
        self._index()

    def _index(self) -> None:
        self._known = {id(tensor) for tensor in self.roots}
        self._found: dict[Any, Tensor] = {}
        for func, args, kwargs, result in self.results:
            self._known.add(id(result))
            self._found[self._key(func, args, kwargs)] = result
        self._written = {self._key(func, args, kwargs) for func, args, kwargs, _ in self.written}

    def _drop(self, target: Any) -> None:
        """Keep nothing that lies in the memory of ``target``, which is about to be written to."""
        if isinstance(target, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(target):
            memory = target.untyped_storage()._cdata
            lost = [entry for entry in self.results if entry[3].untyped_storage()._cdata == memory]
            if lost:
                self.written += lost
                self.results = [entry for entry in self.results if entry[3].untyped_storage()._cdata != memory]
                self._index()

    def _key(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The key of an operation on known tensors; None for every other operation."""
        name = getattr(func, "__name__", "")
        if name.endswith("_") or name == "normal" or any(part in name for part in _IMPURE):
            return None
        if "out" in kwargs or "generator" in kwargs:
            return None
        seen = [False]
        try:
            key = (func, self._frozen(args, seen), self._frozen(tuple(sorted(kwargs.items())), seen), _mode())
            hash(key)
        except (_UnknownTensorError, TypeError):
            return None
        return key if seen[0] else None

    def _frozen(self, value: Any, seen: list[bool]) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in self._known:
                raise _UnknownTensorError
            seen[0] = True
            return ("tensor", id(value))
        if isinstance(value, tuple | list):
            return tuple(self._frozen(part, seen) for part in value)
        return (type(value), str(value) if isinstance(value, float) else value)  # 0.0 == -0.0

    def _loses_gradient(self, result: Tensor) -> bool:
        return self.tracked and not torch.is_grad_enabled() and not result.requires_grad


class _UnknownTensorError(Exception):
    """An argument depends on more than the input and the weights."""


_WRITING_DUNDERS = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"}


def _target(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor that an operation writes to; None where there is none."""
    name = getattr(func, "__name__", "")
    writes = name in _WRITING_DUNDERS or (name.endswith("_") and not name.startswith("__"))
    return kwargs.get("out", args[0] if writes and args else None)


def _mode() -> tuple[object, ...]:
    """Global settings that change the result of an operation."""
    kinds = [kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)
