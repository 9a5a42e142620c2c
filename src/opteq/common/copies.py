"""Copies of modules that hold what can't be copied."""

from __future__ import annotations

from copy import deepcopy
from typing import Any


def copied(module: Any) -> Any:
    """A deep copy, which shares what can't be copied: an open file, or a tensor with its tape."""
    memo: dict[int, Any] = {}
    for part in reversed(list(module.modules())):  # parts before what holds them
        for value in vars(part).values():
            try:
                deepcopy(value, memo)
            except Exception:  # noqa: PERF203 - a user's objects may raise anything
                memo[id(value)] = value
    return deepcopy(module, memo)
