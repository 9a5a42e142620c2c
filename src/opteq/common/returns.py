"""Checks of what the functions of a user's objective return."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

State = TypeVar("State")


def check_start(start: State, x: Any, who: str) -> State:
    """The start of a state if it is what it should be: a tensor, or a tuple of them, batch first."""
    return _check_tensors(start, (x[0] if isinstance(x, tuple) else x).shape[0], f"{who}.start(x)")


def check_features(features: State, y: Any, who: str) -> State:
    """The features at a state if they are what they should be: a tensor, or a tuple of them, batch first."""
    return _check_tensors(features, (y[0] if isinstance(y, tuple) else y).shape[0], f"{who}.features(y)")


def _check_tensors(value: State, batch: int, who: str) -> State:
    for part in value if isinstance(value, tuple) and value else (value,):
        if not isinstance(part, Tensor) or part.shape[:1] != (batch,):
            got = f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            raise ValueError(f"{who} should be a tensor of shape ({batch}, ...) or a tuple of them; got {got}")
    return value


def check_terms(terms: Any, batch: int, who: str) -> dict[str, Tensor]:
    """The terms of an objective if they are what they should be: names, and one value per sample each."""
    if not isinstance(terms, dict) or not terms:
        got = "an empty dict" if terms == {} else type(terms).__name__
        raise TypeError(f"{who} should return a dict from names to tensors, one value per sample each; got {got}")
    for name, values in terms.items():
        if not isinstance(values, Tensor) or values.shape != (batch,):
            got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            which = "it" if name == "smooth" else f"{name!r}"
            raise ValueError(
                f"{who}: {which} should be one value per sample, shape ({batch},); got {got}. "
                "Sum over every dimension but the first"
            )
    return terms
