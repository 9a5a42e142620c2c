"""Checks of a model's options: each is a test and the words of its error message."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from opteq.common.errors import UserError, format_value, unknown_name

MOST = 2**14
"""A width, a kernel's side or a number of steps is at most this, unless its option says otherwise."""
LONGEST = 64
"""So many entries may a list have: more branches or stages than any model has."""
_HUGE = 1e300


@dataclasses.dataclass(frozen=True)
class Check:
    """A test of a value, and what the value should be, in words.

    >>> whole(1).apply("max_steps", 0)
    Traceback (most recent call last):
    ...
    opteq.common.errors.UserError: max_steps should be a whole number of at least 1; got 0
    """

    wanted: str
    test: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    names: tuple[str, ...] = ()
    most: int | None = None  # of a whole number, or of each of a list
    longest: int | None = None  # of a list

    def apply(self, option: str, value: Any) -> Any:
        """``value`` in its usual form, or an error that names the option, the value and what would be right."""
        if self.test(value):
            return self.convert(value)
        if self.names and isinstance(value, str):
            raise unknown_name(option, value, self.names)
        entries = value if isinstance(value, list | tuple) else [value]
        if self.longest is not None and len(entries) > self.longest:
            raise UserError(f"{option} should have at most {self.longest} entries; got {len(entries)}")
        if self.most is not None and any(_is_whole(entry, self.most + 1) for entry in entries):
            raise UserError(f"{option} should be at most {self.most}; got {format_value(value)}")
        raise UserError(f"{option} should be {self.wanted}; got {format_value(value)}")


def option(default: Any, check: Check, help: str) -> Any:
    """A dataclass field with its check and one line that explains it."""
    return dataclasses.field(default=default, metadata={"check": check, "help": help})


def number(least: float = 0.0, most: float = math.inf, *, open_below: bool = True) -> Check:
    """A number between two ends; without ``least`` itself where ``open_below``."""
    above = f"above {least:g}" if open_below else f"of at least {least:g}"
    below = "" if most == math.inf else f" and at most {most:g}"

    def test(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or not -_HUGE < value < _HUGE:
            return False
        return (value > least if open_below else value >= least) and value <= most

    return Check(f"a finite number {above}{below}", test, float)


def whole(least: int = 1, most: int = MOST) -> Check:
    """A whole number of at least ``least`` and at most ``most``."""
    return Check(f"a whole number of at least {least}", lambda value: _is_whole(value, least, most), most=most)


def wholes(least: int = 1, most: int = MOST, longest: int = LONGEST) -> Check:
    """A list of whole numbers, kept as a tuple."""

    def test(value: Any) -> bool:
        if not isinstance(value, list | tuple) or not 0 < len(value) <= longest:
            return False
        return all(_is_whole(entry, least, most) for entry in value)

    wanted = f"a list with at least one entry, all whole numbers of at least {least}"
    return Check(wanted, test, tuple, most=most, longest=longest)


def flag() -> Check:
    """True or False."""
    return Check("true or false", lambda value: isinstance(value, bool))


def one_of(names: Iterable[str]) -> Check:
    """One of some names."""
    known = tuple(names)
    return Check(f"one of {', '.join(known)}", lambda value: value in known, names=known)


def each_of(names: Iterable[str]) -> Check:
    """One of some names, or a list of such, kept as a tuple."""
    single = one_of(names)

    def test(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return len(value) > 0 and all(single.test(entry) for entry in value)
        return single.test(value)

    def convert(value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    return Check(f"{single.wanted}, or a list of such", test, convert, single.names)


def either(first: Check, *rest: Check) -> Check:
    """A value that passes any of the checks."""
    checks = (first, *rest)

    def convert(value: Any) -> Any:
        return next(check for check in checks if check.test(value)).convert(value)

    wanted = ", or ".join(check.wanted for check in checks)
    most, longest = (
        max((limit for check in checks if (limit := getattr(check, name)) is not None), default=None)
        for name in ("most", "longest")
    )
    return Check(wanted, lambda value: any(check.test(value) for check in checks), convert, (), most, longest)


def optional(check: Check) -> Check:
    """A value that passes ``check``, or None, which may be written ``"none"``: TOML has no null."""
    return either(check, Check("none", lambda value: value is None or value == "none", lambda _: None))


def _is_whole(value: Any, least: int, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
