"""Checks of options, with messages that name the option, the value and what would be right.

``check_positive(name, value)`` checks a value and returns it; ``positive(options, field)`` a field of an object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from opteq.common.errors import unknown_name


def check_positive(name: str, value: object) -> float:
    """``value`` as a float if it is positive and finite."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} should be a positive number; got {value!r}")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{name} should be a positive finite number; got {value!r}")
    return float(value)


def check_not_negative(name: str, value: object) -> float:
    """``value`` as a float if it is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} should be a number of at least 0; got {value!r}")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} should be at least 0 and finite; got {value!r}")
    return float(value)


def check_share(name: str, value: object) -> float:
    """``value`` as a float if it lies in ``(0, 1]``."""
    number = check_positive(name, value)
    if number > 1:
        raise ValueError(f"{name} should lie in (0, 1]; got {value!r}")
    return number


def check_whole(name: str, value: object, least: int = 1) -> int:
    """``value`` as an int if it is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} should be a whole number; got {value!r}")
    if value < least:
        raise ValueError(f"{name} should be at least {least}; got {value!r}")
    return int(value)


def check_flag(name: str, value: object) -> bool:
    """``value`` if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} should be True or False; got {value!r}")
    return value


def check_choice(name: str, value: str, known: Sequence[str]) -> str:
    """``value`` if it is one of the ``known`` ones; else the error names the nearest of them."""
    if value not in known:
        raise unknown_name(name, value, known)
    return value


def check_kind(name: str, value: Any, kind: type, wanted: str) -> Any:
    """``value`` if it is a ``kind``, or a ``wanted`` one; the error for a class proposes an object of it."""
    if not isinstance(value, kind):
        hint = f"; did you mean {value.__name__}()?" if isinstance(value, type) and issubclass(value, kind) else ""
        raise TypeError(f"{name} should be {wanted}; got {value!r}{hint}")
    return value


def check_odd(name: str, value: object) -> int:
    """``value`` as an int if it is an odd number above 0."""
    number = check_whole(name, value)
    if number % 2 == 0:
        raise ValueError(f"{name} should be odd; got {value!r}")
    return number


def check_tensor(name: str, value: object) -> Tensor:
    """``value`` if it is a tensor with entries, all of them real and finite."""
    if not isinstance(value, Tensor) or value.is_complex():
        raise TypeError(f"{name} should be a tensor of real numbers; got {value!r}")
    if not value.numel() or not (value.is_meta or bool(value.isfinite().all())):
        raise ValueError(f"{name} should have entries, all of them finite; got {value!r}")
    return value


def check_invertible(name: str, value: object) -> Tensor:
    """``value`` if it is an invertible matrix of floating-point numbers."""
    matrix = check_tensor(name, value)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{name} should be square; got shape {tuple(matrix.shape)}")
    if not matrix.is_floating_point():
        raise TypeError(f"{name} should be a matrix of floating-point numbers; got {matrix.dtype}")
    if not matrix.is_meta:
        spectrum = torch.linalg.svdvals(matrix.detach().double()).tolist()
        if not spectrum[-1] > 1e-10 * spectrum[0]:
            span = f"from {spectrum[0]:.1e} to {spectrum[-1]:.1e}"
            raise ValueError(f"{name} should be invertible; its singular values run {span}")
    return matrix


def _of_field(check: Callable[..., Any]) -> Callable[..., None]:
    """A check of a value, as the same check of a field: ``(options, field, *limits)``."""

    def check_field(options: object, field: str, *limits: Any) -> None:
        check(f"{type(options).__name__}.{field}", getattr(options, field), *limits)

    return check_field


positive = _of_field(check_positive)
not_negative = _of_field(check_not_negative)
share = _of_field(check_share)
whole = _of_field(check_whole)
flag = _of_field(check_flag)
choice = _of_field(check_choice)
