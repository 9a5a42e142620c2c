"""The confusion matrix: a table for few classes, an image with tooltips for many."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch import Tensor

from opteq.report.charts.images import matrix_image
from opteq.report.html.markup import Html, join, scroller, tag
from opteq.report.html.numbers import percent, plural

_LARGEST_TABLE = 12
_PAIRS = 8


def confusion_matrix(confusion: Tensor, classes: Sequence[str]) -> Html:
    """Rows are the true classes, columns the predicted ones; ``confusion`` holds counts."""
    return _table(confusion, classes) if len(classes) <= _LARGEST_TABLE else _large(confusion, classes)


def confused_pairs(confusion: Tensor, classes: Sequence[str], noun: str = "image") -> Html:
    """The most frequent confusions as a list; ``noun`` is the unit that is counted."""
    wrong = confusion.clone()
    wrong.fill_diagonal_(0)
    order = wrong.flatten().argsort(descending=True, stable=True)[:_PAIRS].tolist()
    rows = []
    for place in order:
        true, predicted = divmod(place, len(classes))
        times = int(wrong[true, predicted])
        if times == 0:
            break
        share = times / int(confusion[true].sum())
        rows.append(
            tag(
                "li",
                tag("b", classes[true]),
                " predicted as ",
                tag("b", classes[predicted]),
                tag("span", f"{plural(times, 'time')}, {percent(share)} of its {noun}s", class_="aside"),
            )
        )
    if not rows:
        return tag("p", f"No {noun} was misclassified.", class_="note")
    return tag("ol", *rows, class_="pairs")


def class_accuracies(confusion: Tensor, classes: Sequence[str]) -> Html | None:
    """Accuracy per class, the lowest first; None where the table shows it."""
    if len(classes) <= _LARGEST_TABLE:
        return None
    totals, right = confusion.sum(dim=1).tolist(), confusion.diagonal().tolist()
    shares = [(right[i] / totals[i], name) for i, name in enumerate(classes) if totals[i]]
    rows = [tag("li", tag("span", name), tag("span", percent(share))) for share, name in sorted(shares)]
    return tag("details", tag("summary", "Accuracy of every class"), tag("ol", *rows, class_="columns"))


def _table(confusion: Tensor, classes: Sequence[str]) -> Html:
    totals = confusion.sum(dim=1).tolist()
    counts = confusion.tolist()
    largest = max(
        (counts[i][j] / totals[i] for i in range(len(counts)) for j in range(len(counts)) if i != j and totals[i]),
        default=0.0,
    )
    longest = max(len(name) for name in classes)
    width = round(min(1.4 + 0.42 * longest, 7.5), 1)  # of the column with the names, about half an em per letter
    head = tag(
        "tr",
        tag("th", tag("span", "true \\ predicted", class_="hidden"), class_="corner"),
        *(tag("th", tag("span", name), scope="col") for name in classes),
        tag("th", tag("span", "right"), scope="col", class_="recall"),
    )
    rows = []
    for i, name in enumerate(classes):
        cells = []
        for j, other in enumerate(classes):
            times = counts[i][j]
            share = times / totals[i] if totals[i] else 0.0
            strength = share if i == j else share / largest if largest else 0.0
            kind = ("hit" if i == j else "miss") if times else "none"
            cells.append(
                tag(
                    "td",
                    str(times) if times else "·",
                    class_=kind,
                    style=f"--s:{round(0.12 + 0.88 * strength, 3)}" if times else None,
                    data_tip=f"true {name}\npredicted {other}\n{plural(times, 'image')}" if times else None,
                )
            )
        right = percent(counts[i][i] / totals[i]) if totals[i] else "–"
        rows.append(tag("tr", tag("th", tag("span", name), scope="row"), *cells, tag("td", right, class_="recall")))
    kind = "confusion long" if longest > 3 else "confusion"
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_=kind, style=f"--names:{width}rem")
    return scroller(table, "Confusion matrix: a row for each true class, a column for each predicted one")


def _large(confusion: Tensor, classes: Sequence[str]) -> Html:
    cells = [[i, j, int(confusion[i, j])] for i, j in confusion.nonzero().tolist()]
    accuracy = float(confusion.diagonal().sum() / confusion.sum().clamp(min=1))
    data = json.dumps({"classes": list(classes), "cells": cells}, separators=(",", ":"))
    return tag(
        "div",
        tag("span", "predicted class →", class_="across"),
        tag("span", "true class →", class_="down"),
        tag(
            "div",
            tag("img", src=matrix_image(confusion), alt=""),
            tag("i", class_="cursor", hidden=True),
            class_="cells",
            tabindex="0",
            role="img",
            data_matrix=data,
            aria_label=(
                f"Confusion matrix of {len(classes)} classes as an image: {percent(accuracy)} lie on the diagonal. "
                "Arrow keys read out cells; the list names the most frequent mistakes."
            ),
        ),
        class_="big-matrix",
    )


def legend() -> Html:
    """The legend of the two colors."""
    return join(
        tag("span", tag("i", class_="swatch hit"), " right", class_="key"),
        tag("span", tag("i", class_="swatch miss"), " wrong", class_="key"),
    )
