"""Copies of layers, to be called and thrown away."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor


@contextmanager
def silent_copy(layer: Any, given: Sequence[Tensor]) -> Iterator[Any]:
    """A copy of a layer, to be called with what is given: it does not warn, and random numbers stay as they were."""
    copy = _copied(layer)
    copy.on_failure = "ignore"
    with torch.random.fork_rng([part.device for part in given if part.is_cuda]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield copy


def _copied(module: Any) -> Any:
    """A deep copy, which shares what can't be copied: an open file, or a tensor with its tape."""
    memo: dict[int, Any] = {}
    for part in reversed(list(module.modules())):  # parts before what holds them
        for value in vars(part).values():
            try:
                deepcopy(value, memo)
            except Exception:  # noqa: PERF203 - a user's objects may raise anything
                memo[id(value)] = value
    return deepcopy(module, memo)
