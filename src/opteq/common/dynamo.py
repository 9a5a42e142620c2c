"""Marks for ``torch.compile`` that do not load it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """``function`` as ``torch.compiler.assume_constant_result`` makes it, which is no more than this mark."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
