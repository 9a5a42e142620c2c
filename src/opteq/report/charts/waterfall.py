"""A waterfall chart of shares that add up, and the table of an objective's terms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate

from opteq.report.charts.axes import Axis
from opteq.report.html.markup import Html, scroller, tag, text
from opteq.report.html.numbers import decimal

_WIDTH, _ROW, _TOP = 360, 30, 6
_LEFT, _RIGHT = 96, 290

STYLES = {
    "penalty": "t-penalty",
    "quadratic": "t-quadratic",
    "input": "t-input",
    "coupling": "t-coupling",
    "gaussian": "t-coupling",
    "similarity": "t-coupling",
    "heritage": "t-coupling",
    "self": "t-coupling",
    "smooth": "t-coupling",
    "inhibition": "t-coupling",
    "diversity": "t-prior",
    "regularizer": "t-prior",
}
"""The CSS class of a term: the same in the formula, the charts and the tables."""


def style_of(term: str) -> str:
    """The CSS class of a term, also for terms of a user's own problem."""
    return STYLES.get(term, "t-other")


def waterfall(shares: Mapping[str, float], total: str, about: str) -> Html:
    """Bars from zero through every share to their sum; positive and negative ones differ in color.

    Args:
        shares: by name, in the order in which they are shown.
        total: name of the sum.
        about: description for screen readers.
    """
    levels = [0.0, *accumulate(shares.values())]
    if not all(math.isfinite(level) for level in levels):
        return tag("p", "The shares are not finite here.", class_="note")
    low, high = min(levels), max(levels)
    axis = Axis(low, high if high > low else low + 1.0, _LEFT, _RIGHT)
    rows = []
    for index, (name, share) in enumerate(shares.items()):
        ends = sorted((axis(levels[index]), axis(levels[index + 1])))
        rows.append(_row(name, signed(share), index, ends, "for" if share >= 0 else "against"))
        rows.append(_thread(axis(levels[index + 1]), index))
    rows.append(_row(total, signed(levels[-1]), len(shares), sorted((axis(0.0), axis(levels[-1]))), "total"))
    zero, height = axis(0.0), _TOP * 2 + _ROW * (len(shares) + 1)
    words = "; ".join(f"{name} {signed(share)}" for name, share in shares.items())
    return tag(
        "svg",
        tag("line", x1=zero, x2=zero, y1=_TOP, y2=height - _TOP, class_="zero"),
        *rows,
        viewBox=f"0 0 {_WIDTH} {height}",
        class_="chart waterfall",
        role="img",
        tabindex="0",
        aria_label=f"{about}: {words}; together {signed(levels[-1])}.",
    )


def signed(value: float) -> str:
    """A number with its sign, plus included."""
    return f"+{decimal(value)}" if value > 0 else decimal(value)


def _row(name: str, shown: str, row: int, ends: list[float], style: str) -> Html:
    left, right = ends
    top = _TOP + row * _ROW
    middle = top + _ROW / 2
    return tag(
        "g",
        tag("rect", x=0, y=top, width=_WIDTH, height=_ROW, class_="reach"),
        tag("text", name, x=_LEFT - 10, y=middle, class_="row-name"),
        tag("rect", x=left, y=top + 6, width=max(round(right - left, 2), 1.5), height=_ROW - 12, rx=2, class_="bar"),
        tag("text", shown, x=_WIDTH - 2, y=middle, class_="row-value"),
        class_=f"row {style}",
        data_tip=f"{name}\n{shown}",
    )


def _thread(x: float, row: int) -> Html:
    """A thin line that connects a level to the next row."""
    y = _TOP + row * _ROW
    return tag("line", x1=x, x2=x, y1=y + _ROW - 6, y2=y + _ROW + 6, class_="thread")


def terms_table(start: Mapping[str, float], end: Mapping[str, float]) -> Html:
    """The values of the terms as a table, without those that are zero at both ends, such as the penalty of ReLU."""
    rows = [
        tag(
            "tr",
            tag("th", tag("i", class_=f"swatch {style_of(name)}"), " ", name, scope="row"),
            tag("td", decimal(start[name], 4)),
            tag("td", decimal(end[name], 4)),
        )
        for name in end
        if start[name] or end[name]
    ]
    total = tag(
        "tr",
        tag("th", "objective", scope="row"),
        tag("td", decimal(sum(start.values()), 4)),
        tag("td", decimal(sum(end.values()), 4)),
        class_="sum",
    )
    head = tag("tr", *(tag("th", text(name), scope="col") for name in ("term", "at the start", "at the equilibrium")))
    table = tag("table", tag("thead", head), tag("tbody", *rows, total), class_="numbers")
    return scroller(table, "Terms of the objective")
