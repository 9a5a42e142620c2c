"""Axes: where numbers go on paper, and which of them are written beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """A straight or logarithmic map from numbers to places.

    Attributes:
        low, high: the numbers at the two ends.
        start, end: their places.
        log: whether equal ratios are equal distances.
        ticks: the numbers to write.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    ticks: tuple[float, ...] = ()

    def __call__(self, value: float) -> float:
        """The place of a number; those outside the ends lie on them."""
        value = min(max(value, self.low), self.high)
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        share = ((math.log10(value) if self.log else value) - low) / ((high - low) or 1.0)
        return round(self.start + share * (self.end - self.start), 2)


def linear_axis(values: Iterable[float], start: float, end: float, ceiling: float | None = None) -> Axis:
    """A straight axis with round ends around ``values``; it does not pass ``ceiling``.

    >>> linear_axis([0.13, 2.4], 0, 100).ticks
    (0.0, 1.0, 2.0, 3.0)
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if high - low < 1e-9 * max(abs(high), 1e-3):
        pad = abs(high) / 10 or 0.5
        low, high = low - pad, high + pad
    step = _round_step((high - low) / 4)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    if ceiling is not None:
        high = min(high, ceiling)
    count = round((high - low) / step)
    ticks = tuple(round(low + index * step, 12) for index in range(count + 1))
    return Axis(low, high, start, end, ticks=tuple(tick for tick in ticks if tick <= high + 1e-12))


def log_axis(values: Iterable[float], start: float, end: float) -> Axis:
    """A logarithmic axis over whole powers of ten, at most some seven of them written.

    >>> log_axis([0.02, 3.0], 0, 100).ticks
    (0.01, 0.1, 1.0, 10.0)
    """
    positive = [value for value in values if math.isfinite(value) and value > 0] or [0.1, 1.0]
    first = math.floor(math.log10(min(positive)) + 1e-9)
    last = max(math.ceil(math.log10(max(positive)) - 1e-9), first + 1)
    every = math.ceil((last - first) / 6)
    ticks = tuple(10.0**power for power in range(first, last + 1, every))
    return Axis(10.0**first, 10.0**last, start, end, log=True, ticks=ticks)


def whole_ticks(low: int, high: int, most: int = 6) -> tuple[int, ...]:
    """Round whole numbers between two, and both ends if nothing lies close to them.

    >>> whole_ticks(1, 60), whole_ticks(1, 3), whole_ticks(5, 5)
    ((1, 10, 20, 30, 40, 50, 60), (1, 2, 3), (5,))
    """
    if high <= low:
        return (low,)
    step = max(1, round(_round_step((high - low) / most)))
    inner = [value for value in range((low // step) * step, high + 1, step) if value >= low]
    ends = [end for end in (low, high) if all(abs(end - value) > 0.6 * step for value in inner)]
    return tuple(sorted({*inner, *ends}))


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * part for part in (1, 2, 2.5, 5, 10) if power * part >= rough * (1 - 1e-9))
