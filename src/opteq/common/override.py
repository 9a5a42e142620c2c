"""Functions of this library that take part in PyTorch's own override protocol, as those of torch do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch.overrides import handle_torch_function, has_torch_function_unary

Function = TypeVar("Function", bound=Callable[..., Any])


def overridable(function: Function) -> Function:
    """``function`` of a tensor and more, which ``__torch_function__`` of a subclass or a mode may take over."""

    @functools.wraps(function)
    def call(first: Any, *rest: Any) -> Any:
        if has_torch_function_unary(first):
            return handle_torch_function(call, (first,), first, *rest)
        return function(first, *rest)

    return call  # type: ignore[return-value]


def plain(function: Function) -> Function:
    """The function behind :func:`overridable`, which nothing takes over."""
    return function.__wrapped__  # type: ignore[attr-defined, no-any-return]
