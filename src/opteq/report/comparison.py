"""The page that compares several runs: results, learning curves, and the keys in which their recipes differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from opteq.common.errors import UserError
from opteq.common.files import plain_errors, write_atomically
from opteq.common.nested import flattened
from opteq.report.charts.curves import Chart, Series, line_chart
from opteq.report.frame import html_page
from opteq.report.html.markup import Html, join, scroller, tag
from opteq.report.html.numbers import count, decimal, duration, percent, plural, scientific
from opteq.report.run import Run, read_run, short_names
from opteq.report.sections import section

MOST = 8
"""Runs on a page: as many as there are colors for lines."""


def compare(folders: Sequence[str | Path], target: str | Path) -> Path:
    """Write the comparison of runs, finished or not, to the HTML file ``target``.

    Only what training recorded is read; no model is run. Runs that are still going on may be compared.

    Raises:
        UserError: fewer than two folders, more than eight, one twice, or one that holds no run.
    """
    target = Path(target)
    if not 2 <= len(folders) <= MOST:
        raise UserError(f"a comparison takes 2 to {MOST} runs; got {len(folders)}")
    runs = dict(zip(short_names([Path(folder) for folder in folders]), map(read_run, map(Path, folders)), strict=True))
    body = join(_results(runs), _curves(runs), _differences(runs))
    notes = [f"{name}: {note}" for name, run in runs.items() for note in run.notes]
    listed = tag("ul", *(tag("li", note) for note in notes), class_="notes") if notes else None
    page = html_page(
        f"{len(runs)} runs", "comparison of runs", join(*(tag("b", name) for name in runs), between=", "), None,
        listed, body,
    )  # fmt: skip
    with plain_errors(f"writing {target}", "or choose another place with --out"):
        write_atomically(target, page.encode(errors="replace"))
    return target


def _results(runs: dict[str, Run]) -> Html:
    def last(key: str, show: Callable[[float | None], str]) -> Callable[[Run], str]:
        return lambda run: show(run.latest(key))

    def best(key: str) -> Callable[[Run], str]:
        return lambda run: percent(max((v for v in run.column(key) if math.isfinite(v)), default=None))

    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("model", lambda run: str(run.section("model").get("name", "–"))),
        ("data", lambda run: str(run.section("data").get("name", "–"))),
        ("epochs", lambda run: f"{len(run.epochs)} of {count(run.planned_epochs)}"),
        ("finished", lambda run: "yes" if run.has_weights else "no"),
        ("test accuracy, last", last("test_accuracy", percent)),
        ("test accuracy, best", best("test_accuracy")),
        ("test loss, last", last("test_loss", decimal)),
        ("mean intersection over union", last("test_iou", percent)),
        ("accuracy under attack", last("test_robust_accuracy", percent)),
        ("solver steps", last("solver_steps", decimal)),
        ("worst residual", last("worst_residual", scientific)),
        ("images per second", last("images_per_second", decimal)),
        ("peak memory, MiB", last("peak_memory_mb", decimal)),
        ("training time", lambda run: duration(sum(v for v in run.column("seconds") if math.isfinite(v)))),
    ]
    shown = [(name, [show(run) for run in runs.values()]) for name, show in rows]
    return section("results", "Results", _table(runs, [row for row in shown if set(row[1]) != {"–"}]))


def _curves(runs: dict[str, Run]) -> Html:
    figures = []
    first = min((int(run.epochs[0]["epoch"]) for run in runs.values() if run.epochs), default=1)
    for title, key, show, ceiling in (
        ("Test accuracy", "test_accuracy", percent, 1.0),
        ("Test loss", "test_loss", decimal, None),
    ):
        series = [Series(name, run.column(key), f"r-{place}") for place, (name, run) in enumerate(runs.items())]
        series = [one for one in series if any(math.isfinite(value) for value in one.values)]
        if series:
            tick = _percent_tick if show is percent else (lambda value: f"{value:g}")
            chart = Chart(f"{title} of every epoch", "epoch", first, series, show, tick, ceiling=ceiling)
            figures.append(tag("figure", tag("figcaption", title, class_="title"), line_chart(chart)))
    if not figures:
        return section("learning", "Learning curves", tag("p", "No run has finished an epoch.", class_="lead"))
    return section("learning", "Learning curves", tag("div", *figures, class_="pair"))


def _percent_tick(value: float) -> str:
    return f"{100 * value:g}\u00a0%"


def _differences(runs: dict[str, Run]) -> Html:
    flat = [flattened(run.recipe) for run in runs.values()]
    keys = sorted({key for one in flat for key in one})
    missing = object()
    rows = [
        (key, [str(one.get(key, "–")) for one in flat])
        for key in keys
        if any(one.get(key, missing) != flat[0].get(key, missing) for one in flat)
    ]
    if not rows:
        return section("recipes", "Recipes", tag("p", "All runs have the same recipe.", class_="lead"))
    lead = f"The recipes differ in {plural(len(rows), 'key')}."
    return section("recipes", "Recipes", _table(runs, rows), lead=lead)


def _table(runs: dict[str, Run], rows: Sequence[tuple[str, list[str]]]) -> Html:
    head = tag("tr", tag("th", "", scope="col"), *(tag("th", name, scope="col") for name in runs))
    body = [tag("tr", tag("th", name, scope="row"), *(tag("td", cell) for cell in cells)) for name, cells in rows]
    table = tag("table", tag("thead", head), tag("tbody", *body), class_="numbers")
    return scroller(table, "Table")
