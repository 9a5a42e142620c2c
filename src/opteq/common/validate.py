"""Checks of option fields, with messages that name the option, the value and what would be right."""

from __future__ import annotations

import math


def positive(options: object, field: str) -> None:
    """Raise unless the field is a positive finite number."""
    value = getattr(options, field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{type(options).__name__}.{field} should be a positive number; got {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{type(options).__name__}.{field} should be a positive finite number; got {value!r}")


def whole(options: object, field: str, least: int = 1) -> None:
    """Raise unless the field is a whole number of at least ``least``."""
    value = getattr(options, field)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{type(options).__name__}.{field} should be a whole number; got {value!r}")
    if value < least:
        raise ValueError(f"{type(options).__name__}.{field} should be at least {least}; got {value!r}")


def share(options: object, field: str) -> None:
    """Raise unless the field lies in ``(0, 1]``."""
    positive(options, field)
    value = getattr(options, field)
    if value > 1:
        raise ValueError(f"{type(options).__name__}.{field} should lie in (0, 1]; got {value!r}")


def not_negative(options: object, field: str) -> None:
    """Raise unless the field is a finite number of at least 0."""
    value = getattr(options, field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{type(options).__name__}.{field} should be a number of at least 0; got {value!r}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{type(options).__name__}.{field} should be a finite number of at least 0; got {value!r}")
