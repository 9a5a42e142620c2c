"""Formatting of numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_SIGNS = (
    ("<=", "≤"),
    (">=", "≥"),
    (r"\^2\b", "²"),
    (r"\bmu\b", "μ"),
    (r"\bgamma\b", "γ"),
    (r"\blambda\b", "λ"),
    (r"\bsigma\b", "σ"),
    (r"\balpha\b", "α"),
    (r"\bbeta\b", "β"),
    (r"\bzeta\b", "ζ"),
    (r"\bphi\b", "φ"),
    (r"\bpsi\b", "ψ"),
    (r"\brho\b", "ρ"),
    (r"\btau\b", "τ"),
    (r"\bepsilon\b", "ε"),
    (r"\bhess (?=\w)", "∇²"),
    (r"\bgrad (?=\w)", "∇"),
    (r"(?<= )- ", "− "),
)
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MISSING = "–"
_SPACE = "\u00a0"
"""A non-breaking space between a number and its unit."""


def percent(share: float | None, digits: int = 1) -> str:
    r"""A fraction as a percentage, rounded down near 1 so that 100 % means all.

    >>> percent(0.97531), percent(0.99999), percent(1.0), percent(None)
    ('97.5\xa0%', '99.9\xa0%', '100\xa0%', '–')
    """
    if share is None or not math.isfinite(share):
        return _MISSING
    if share == 1:
        return f"100{_SPACE}%"
    scale = 10**digits
    shown = min(round(100 * share, digits), 100 - 1 / scale) if share < 1 else 100 * share
    return f"{shown:.{digits}f}{_SPACE}%"


def count(value: float | None) -> str:
    """An integer with thousands separators.

    >>> count(1234567)
    '1,234,567'
    """
    return _MISSING if value is None or not math.isfinite(value) else f"{round(value):,}"


def decimal(value: float | None, digits: int = 3) -> str:
    """A number with significant digits, and a proper minus sign.

    >>> decimal(-12.3456), decimal(0.00001234), decimal(0.0), decimal(1234.5), decimal(float("nan"))
    ('−12.3', '1.23·10⁻⁵', '0', '1,234', 'not finite')
    """
    if value is None:
        return _MISSING
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e7:
        return scientific(value, digits - 1)
    places = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{value:,.{places}f}".replace("-", "−")


def scientific(value: float | None, digits: int = 1) -> str:
    """A number in scientific notation, rounded down just below a power of ten: a residual within 10⁻³ looks so.

    >>> scientific(0.000421), scientific(1e-5, 0), scientific(0.000997), scientific(float("inf"))
    ('4.2·10⁻⁴', '10⁻⁵', '9.9·10⁻⁴', 'not finite')
    """
    if value is None:
        return _MISSING
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    if float(f"1e{exponent}") > abs(value):
        mantissa, exponent = f"{math.copysign(10 - 10**-digits, value):.{digits}f}", str(int(exponent) - 1)
    power = "10" + str(int(exponent)).translate(_SUPERSCRIPTS)
    return (power if float(mantissa) == 1 else f"{mantissa}·{power}").replace("-", "−")


def short_count(value: float) -> str:
    r"""Thousands and millions with k and M.

    >>> short_count(8123), short_count(199_400), short_count(5_012_000), short_count(12)
    ('8.1\xa0k', '199\xa0k', '5.01\xa0M', '12')
    """
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{decimal(value / size, 3 if value >= 100 * size or size == 1e6 else 2)}{_SPACE}{letter}"
    return str(round(value))


def duration(seconds: float) -> str:
    """A time span.

    >>> duration(4.2), duration(192), duration(1860), duration(7380)
    ('4.2 s', '3 min 12 s', '31 min', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes < 10 and rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def plural(number: int, noun: str) -> str:
    """``1 epoch``, ``2 epochs``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def with_symbols(reason: str) -> str:
    """A certificate's reason with mathematical symbols.

    >>> with_symbols("L |W|^2 / mu with L = 1 and |W| <= 0.9; mud stays")
    'L |W|² / μ with L = 1 and |W| ≤ 0.9; mud stays.'
    >>> with_symbols("phi + gamma R is convex, times |I - gamma hess R| <= 2")
    'φ + γ R is convex, times |I − γ ∇²R| ≤ 2.'
    """
    reason = _signs(reason)
    first = reason[:1].upper() if reason[:1].isascii() else reason[:1]  # a capital Greek letter is another symbol
    return f"{first}{reason[1:].rstrip('.')}." if reason else ""


def explain_symbols(meanings: Mapping[str, str]) -> str:
    """The meanings of symbols, in one sentence.

    >>> explain_symbols({"L": "the largest slope of the activation", "mu": "the number that divides the coupling"})
    'L is the largest slope of the activation; μ is the number that divides the coupling'
    """
    return "; ".join(f"{_signs(symbol)} is {meaning}" for symbol, meaning in meanings.items())


def _signs(text: str) -> str:
    for plain, sign in _SIGNS:
        text = re.sub(plain, sign, text)
    return text
