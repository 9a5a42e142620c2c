"""Accuracy of several runs against the setting in which they differ (MOptEq, Figure 3 c; GEQ, Figure 4)."""

from __future__ import annotations

import json
from itertools import cycle
from typing import Any

from opteq.models.registry import default_options
from opteq.report.figures.style import COLORS, CaptionedFigure, panels
from opteq.report.figures.subject import FigureUnavailableError, Subject

_IGNORED = ("name", "reproduces", "data", "guard")


def accuracy_settings(subject: Subject) -> CaptionedFigure:
    """Test accuracy against every number of the recipes that differs, a panel for each.

    In a panel are the runs that agree with the first one in all but its setting. A run of another model is a line.
    """
    if not subject.beside:
        raise FigureUnavailableError(
            "it compares runs: give several, such as those of one recipe with --set of an option"
        )
    runs = [(one.title, settings(one), accuracy(one)) for one in (subject, *subject.beside)]
    _, own, first = runs[0]
    others = [(title, reached) for title, found, reached in runs if found["model.name"] != own["model.name"]]
    lines = {
        key: sorted({(found[key], reached) for _, found, reached in runs if _differ(own, found) <= {key}})
        for key in own
        if any(_differ(own, found) == {key} and _is_number(found[key]) for _, found, _ in runs) and _is_number(own[key])
    }
    if not lines:
        raise FigureUnavailableError("no run differs from the first one in one number of its recipe alone")
    figure, axes = panels(1, len(lines), (4.2, 3.4))
    for (key, points), one, color in zip(lines.items(), axes.flat, COLORS * len(lines), strict=False):
        one.plot([value for value, _ in points], [100 * reached for _, reached in points], "o-", color=color)
        for (title, reached), shade in zip(others, cycle(reversed(COLORS)), strict=False):
            one.axhline(100 * reached, color=shade, linestyle=":", label=title)
        if others:
            one.legend()
        one.set(xlabel=key.removeprefix("model.options."), ylabel="test accuracy, %")
    parts = [
        f"{key}: best {max(points, key=lambda point: point[1])[1]:.1%} at "
        f"{max(points, key=lambda point: point[1])[0]:g}, of {len(points)} runs"
        for key, points in lines.items()
    ]
    beside = "".join(f" {title}: {reached:.1%} (dotted)." for title, reached in others)
    return CaptionedFigure(
        figure,
        f"Test accuracy after the last epoch of runs that differ from {subject.title} ({first:.1%}) in one setting. "
        f"{'; '.join(parts)}.{beside}",
    )


def settings(subject: Subject) -> dict[str, Any]:
    """Every setting of a run by its key, with the model's defaults."""
    recipe = subject.opened.recipe
    tables = recipe.model_dump(exclude=set(_IGNORED))
    tables["model"]["options"] = {**default_options(recipe.model.name), **recipe.model.options}
    tables["train"].pop("seed")
    return _flat(tables, "")


def accuracy(subject: Subject) -> float:
    """Test accuracy of the last epoch that the run recorded."""
    path = subject.opened.path / "metrics.jsonl"
    try:
        return float(json.loads(path.read_text(encoding="utf-8").splitlines()[-1])["test_accuracy"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise FigureUnavailableError(f"{path} records no accuracy") from error


def _flat(tables: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _differ(own: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {key for key in own.keys() | other.keys() if own.get(key) != other.get(key)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
