"""A waterfall: how the objective comes from its value at the start to that at the equilibrium, term by term."""

from __future__ import annotations

import math
from collections.abc import Mapping

from opteq.report.charts.axes import Axis
from opteq.report.html.markup import Html, tag, text
from opteq.report.html.numbers import decimal

_WIDTH, _ROW, _TOP = 360, 30, 6
_LEFT, _RIGHT = 96, 290
_SMALL_FALL = 0.2

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
    "diversity": "t-prior",
    "regularizer": "t-prior",
}
"""The colour of a term in the style sheet: the same in the formula, the charts and the tables."""


def style_of(term: str) -> str:
    """The style of a term; those that a user named have one too."""
    return STYLES.get(term, "t-other")


def waterfall(start: Mapping[str, float], end: Mapping[str, float], about: str) -> Html:
    """Bars from the objective at ``start`` through the change of every term to that at ``end``.

    Terms that are zero at both are left out: the penalty of relu, for one, where the state obeys its constraint.

    Args:
        start: the value of every term where the solver began.
        end: the same at the equilibrium.
        about: whose objective it is, for those who can't see the chart.
    """
    first, last = sum(start.values()), sum(end.values())
    if not (math.isfinite(first) and math.isfinite(last)):
        return tag("p", "The objective is not finite here, so there is nothing to draw.", class_="note")
    changes = [(name, end[name] - start[name]) for name in end if start[name] or end[name]]
    levels = [first]
    for _, change in changes:
        levels.append(levels[-1] + change)
    axis = _axis(levels)
    rows = [_total("start", first, 0, axis)]
    for index, (name, change) in enumerate(changes):
        ends = sorted((axis(levels[index]), axis(levels[index + 1])))
        rows.append(_bar(name, change, index + 1, ends[0], ends[1], style_of(name), start[name], end[name]))
        rows.append(_thread(axis(levels[index]), index))
    rows.append(_thread(axis(levels[-1]), len(changes)))
    rows.append(_total("equilibrium", last, len(changes) + 1, axis))
    zero = axis(0.0)
    from_zero = axis.low <= 0 <= axis.high
    height = _TOP * 2 + _ROW * (len(changes) + 2)
    words = "; ".join(f"{name} changes by {decimal(change)}" for name, change in changes)
    return tag(
        "svg",
        tag("line", x1=zero, x2=zero, y1=_TOP, y2=height - _TOP, class_="zero") if from_zero else None,
        *rows,
        viewBox=f"0 0 {_WIDTH} {height}",
        class_="chart waterfall",
        role="img",
        tabindex="0",
        aria_label=f"{about}: the objective goes from {decimal(first)} to {decimal(last)}. {words}.",
    )


def _axis(levels: list[float]) -> Axis:
    """From zero where the fall can be seen beside it, and over the fall alone where it would be too small to see."""
    low, high = min(levels), max(levels)
    if high - low >= _SMALL_FALL * max(abs(low), abs(high)):
        low, high = min(0.0, low), max(0.0, high)
    if high == low:
        high = low + 1.0
    return Axis(low, high, _LEFT, _RIGHT)


def _total(name: str, value: float, row: int, axis: Axis) -> Html:
    tip = f"Objective at the {name}\n{decimal(value, 4)}"
    # On an axis without zero the length of a bar would mean nothing: a mark stands at the value.
    ends = sorted((axis(0.0), axis(value))) if axis.low <= 0 <= axis.high else [axis(value) - 2, axis(value) + 2]
    return _row(name, decimal(value, 4 if axis.low > 0 or axis.high < 0 else 3), row, ends[0], ends[1], "total", tip)


def _bar(name: str, change: float, row: int, left: float, right: float, style: str, old: float, new: float) -> Html:
    shown = decimal(change)
    shown = shown if change <= 0 else f"+{shown}"
    return _row(name, shown, row, left, right, style, f"{name}: {decimal(old, 4)} → {decimal(new, 4)}\nchange {shown}")


def _row(name: str, shown: str, row: int, left: float, right: float, style: str, tip: str) -> Html:
    top = _TOP + row * _ROW
    middle = top + _ROW / 2
    return tag(
        "g",
        tag("rect", x=0, y=top, width=_WIDTH, height=_ROW, class_="reach"),
        tag("text", name, x=_LEFT - 10, y=middle, class_="row-name"),
        tag("rect", x=left, y=top + 6, width=max(round(right - left, 2), 1.5), height=_ROW - 12, rx=2, class_="bar"),
        tag("text", shown, x=_WIDTH - 2, y=middle, class_="row-value"),
        class_=f"row {style}",
        data_tip=tip,
    )


def _thread(x: float, row: int) -> Html:
    """A fine line that carries a level on to the next row."""
    y = _TOP + row * _ROW
    return tag("line", x1=x, x2=x, y1=y + _ROW - 6, y2=y + _ROW + 6, class_="thread")


def terms_table(start: Mapping[str, float], end: Mapping[str, float]) -> Html:
    """The same in numbers."""
    rows = [
        tag(
            "tr",
            tag("th", tag("i", class_=f"swatch {style_of(name)}"), " ", name, scope="row"),
            tag("td", decimal(start[name], 4)),
            tag("td", decimal(end[name], 4)),
        )
        for name in end
    ]
    total = tag(
        "tr",
        tag("th", "objective", scope="row"),
        tag("td", decimal(sum(start.values()), 4)),
        tag("td", decimal(sum(end.values()), 4)),
        class_="sum",
    )
    head = tag("tr", *(tag("th", text(name), scope="col") for name in ("term", "at the start", "at the equilibrium")))
    return tag("table", tag("thead", head), tag("tbody", *rows, total), class_="numbers")
