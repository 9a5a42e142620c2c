"""Line charts: one place a whole number on the horizontal axis, labels at the lines' ends, a readout at every place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from opteq.report.charts.axes import Axis, linear_axis, log_axis, whole_ticks
from opteq.report.html.markup import Html, join, tag

_WIDTH, _HEIGHT = 460, 272
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 62, 14, 42
_APART = 17
_MOST_DOTS = 16
_MOST_READOUTS = 160
"""More places than these would be narrower than a pixel or two, and each costs bytes."""


@dataclass(frozen=True)
class Series:
    """A line: its name, which is written at its end, its values (NaN leaves a gap) and its style in the style sheet."""

    name: str
    values: Sequence[float]
    style: str


@dataclass(frozen=True)
class Chart:
    """What a line chart shows.

    Attributes:
        title: what it is, for those who can't see it.
        across: name of the horizontal axis.
        first: the whole number of the first place.
        series: the lines.
        show: a number as a readout has it.
        tick: a number as the axis has it.
        log: a logarithmic vertical axis.
        ceiling: the vertical axis does not pass it.
        mark: a level with a name, drawn across.
    """

    title: str
    across: str
    first: int
    series: Sequence[Series]
    show: Callable[[float], str]
    tick: Callable[[float], str]
    log: bool = False
    ceiling: float | None = None
    mark: tuple[float, str] | None = None


def line_chart(chart: Chart) -> Html:
    """The chart as inline SVG. Lines are skipped where they have no finite value."""
    length = max(len(series.values) for series in chart.series)
    values = [value for series in chart.series for value in series.values]
    if chart.mark is not None:
        values.append(chart.mark[0])
    bottom = _HEIGHT - _BOTTOM
    up = log_axis(values, bottom, _TOP) if chart.log else linear_axis(values, bottom, _TOP, chart.ceiling)
    if chart.log:  # an exact zero is drawn at the lowest level, not left out
        floor = up.low
        series = [
            Series(one.name, [max(v, floor) if math.isfinite(v) else math.nan for v in one.values], one.style)
            for one in chart.series
        ]
    else:
        series = list(chart.series)
    across = Axis(chart.first, max(chart.first + length - 1, chart.first + 1), _LEFT, _WIDTH - _RIGHT)
    if length == 1:  # a single place stands in the middle
        across = Axis(chart.first - 1, chart.first + 1, _LEFT, _WIDTH - _RIGHT)
    return tag(
        "svg",
        _grid(chart, up, across, length),
        *(_line(one, chart.first, across, up) for one in series),
        _names(series, chart.first, across, up),
        _readouts(chart, series, across, up, length),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        class_="chart curves",
        role="img",
        tabindex="0",
        aria_label=f"{chart.title}. {_summary(chart, length)}",
    )


def _grid(chart: Chart, up: Axis, across: Axis, length: int) -> Html:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    rows = [
        join(
            tag("line", x1=_LEFT, x2=right, y1=up(tick), y2=up(tick), class_="rule"),
            tag("text", chart.tick(tick), x=_LEFT - 9, y=up(tick), class_="tick left"),
        )
        for tick in up.ticks
    ]
    columns = [
        tag("text", str(place), x=across(place), y=bottom + 18, class_="tick below")
        for place in whole_ticks(chart.first, chart.first + length - 1)
    ]
    name = tag("text", chart.across, x=(_LEFT + right) / 2, y=_HEIGHT - 6, class_="axis")
    if chart.mark is None:
        return join(*rows, *columns, name)
    level, words = chart.mark
    mark = join(
        tag("line", x1=_LEFT, x2=right, y1=up(level), y2=up(level), class_="mark"),
        tag("text", words, x=_LEFT + 4, y=up(level) - 6, class_="mark-name"),
    )
    return join(*rows, *columns, name, mark)


def _line(series: Series, first: int, across: Axis, up: Axis) -> Html:
    places = [(first + index, value) for index, value in enumerate(series.values)]
    pieces = []
    for finite, run in groupby(places, key=lambda place: math.isfinite(place[1])):
        points = [f"{across(x)} {up(y)}" for x, y in run] if finite else []
        if len(points) > 1:
            pieces.append("M" + "L".join(points))
    finite_places = [(x, y) for x, y in places if math.isfinite(y)]
    dots = [tag("circle", cx=across(x), cy=up(y), r=2.6) for x, y in finite_places if len(places) <= _MOST_DOTS]
    path = tag("path", d="".join(pieces)) if pieces else None
    return tag("g", path, *dots, class_=f"line {series.style}")


def _names(series: Sequence[Series], first: int, across: Axis, up: Axis) -> Html:
    """Every line's name at its end, moved apart where they would touch."""
    ends: list[tuple[float, float, Series]] = []
    for one in series:
        finite = [(first + index, value) for index, value in enumerate(one.values) if math.isfinite(value)]
        if finite:
            ends.append((up(finite[-1][1]), across(finite[-1][0]), one))
    ends.sort(key=lambda end: end[0])
    heights = [y for y, _, _ in ends]
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + _APART)
    overhang = max(0.0, heights[-1] - (_HEIGHT - _BOTTOM)) if heights else 0.0
    names = [
        tag("text", one.name, x=x + 9, y=round(y - overhang, 1), class_=f"name {one.style}")
        for y, (_, x, one) in zip(heights, ends, strict=True)
    ]
    return join(*names)


def _readouts(chart: Chart, series: Sequence[Series], across: Axis, up: Axis, length: int) -> Html:
    every = math.ceil(length / _MOST_READOUTS)
    width = (across(chart.first + 1) - across(chart.first)) * every
    bands = []
    for index in range(0, length, every):
        place = chart.first + index
        shown, dots = [], []
        for one, original in zip(series, chart.series, strict=True):
            if index < len(one.values):
                shown.append(f"{one.name} {chart.show(original.values[index])}")
                if math.isfinite(one.values[index]):
                    dots.append(tag("circle", cx=across(place), cy=up(one.values[index]), r=4, class_=one.style))
        x = across(place)
        bands.append(
            tag(
                "g",
                tag("rect", x=round(x - width / 2, 2), y=0, width=round(width, 2), height=_HEIGHT - _BOTTOM),
                tag("line", x1=x, x2=x, y1=_TOP, y2=_HEIGHT - _BOTTOM),
                *dots,
                class_="band",
                data_tip=f"{chart.across} {place}\n" + "\n".join(shown),
            )
        )
    return join(*bands)


def _summary(chart: Chart, length: int) -> str:
    """The ends of every line in words."""
    parts = []
    for one in chart.series:
        finite = [value for value in one.values if math.isfinite(value)]
        if len(finite) > 1:
            parts.append(f"{one.name}: from {chart.show(finite[0])} to {chart.show(finite[-1])}")
        elif finite:
            parts.append(f"{one.name}: {chart.show(finite[0])}")
        else:
            parts.append(f"{one.name}: no finite value")
    last = chart.first + length - 1
    return f"{chart.across} {chart.first} to {last}. {'; '.join(parts)}. Arrow keys read out every place."
