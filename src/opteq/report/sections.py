"""The sections of the report: headline, objective, learning curves, convergence, confusions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from opteq.report.charts.curves import Chart, Series, line_chart
from opteq.report.charts.matrix import class_accuracies, confused_pairs, confusion_matrix, legend
from opteq.report.charts.waterfall import style_of
from opteq.report.formula import Formula
from opteq.report.html.markup import Html, join, scroller, superscripts, tag
from opteq.report.html.numbers import count, decimal, percent, plural, scientific
from opteq.report.predictions import Predictions, SolveRecord
from opteq.report.run import Run


def section(name: str, title: str, *content: object, lead: object = None) -> Html:
    """A section with a heading and an introduction."""
    opening = None if lead is None else tag("p", lead, class_="lead")
    return tag("section", tag("h2", title), opening, *content, id=name)


def headline(numbers: Sequence[tuple[str, str, str]]) -> Html:
    """The headline: name, value and note of each number."""
    items = [
        tag(
            "div",
            tag("dt", name),
            tag("dd", tag("b", superscripts(value)), tag("span", superscripts(note))),
            class_="number",
        )
        for name, value, note in numbers
    ]
    return tag("dl", *items, class_="headline")


def objective(formulas: Sequence[tuple[str, Formula]]) -> Html:
    """The objective that the network minimises."""
    lead = join(
        "The middle of this network is an equilibrium layer. For every image it finds a state ",
        tag("i", "y"),
        " where this objective is stationary (its minimum, where there is only one such state).",
    )
    if not formulas:
        return section("objective", "Objective", _no_equilibrium())
    title = "Objective"
    if not any(one.terms for _, one in formulas):
        title = "Equilibrium"
        lead = join("The middle of this network is an equilibrium layer: a fixed point of its steps.")
    several = len({name for name, _ in formulas}) > 1
    return section("objective", title, *(_formula(name, one, several) for name, one in formulas), lead=lead)


def _no_equilibrium() -> Html:
    words = (
        "This model is a baseline without equilibrium layers, so there is no objective, no solver and no certificate."
    )
    return tag("p", words, class_="lead")


def _formula(layer: str, formula: Formula, several: bool) -> Html:
    terms = [
        tag(
            "span",
            tag(
                "span", f"{term.sign} " if term.sign and (index or term.sign == "−") else None, term.body, class_="body"
            ),
            tag("small", tag("b", f"{term.name}: "), term.meaning),
            class_=f"term {style_of(term.name)}",
        )
        for index, term in enumerate(formula.terms)
    ]
    opening = tag("span", tag("span", "minimise over ", formula.over, class_="body"), class_="term opening")
    before = tag("span", tag("span", formula.before, class_="body"), class_="term opening") if formula.before else None
    equation = tag("div", opening, before, *terms, class_="equation") if terms else None
    symbols = [join(tag("dt", symbol), tag("dd", words)) for symbol, words in formula.symbols]
    return tag(
        "div",
        tag("h3", tag("code", layer)) if several else None,
        equation,
        tag("p", tag("span", "One step: ", class_="label"), tag("span", formula.step, class_="math"), class_="step"),
        tag("p", formula.remark, class_="note") if formula.remark else None,
        tag("dl", *symbols, class_="symbols") if symbols else None,
        class_="objective",
    )


def learning(run: Run) -> Html:
    """Loss and accuracy, epoch by epoch."""
    if not run.epochs:
        words = "No epoch is finished yet: metrics.jsonl is empty."
        return section("learning", "Learning curves", tag("p", words, class_="lead"))
    first = int(run.epochs[0]["epoch"])
    lines = [
        ("Loss", [Series(n, run.column(f"{n}_loss"), f"s-{n}") for n in ("train", "test")], decimal, None),
        ("Accuracy", [Series(n, run.column(f"{n}_accuracy"), f"s-{n}") for n in ("train", "test")], percent, 1.0),
    ]
    if _recorded(run, "test_iou"):
        lines.append(("Intersection over union", [Series("test", run.column("test_iou"), "s-test")], percent, 1.0))
    figures = []
    for title, series, show, ceiling in lines:
        if not any(math.isfinite(value) for one in series for value in one.values):
            figures.append(_figure(title, tag("p", "No finite value was recorded.", class_="note")))
            continue
        tick = _percent_tick if show is percent else _plain_tick
        chart = Chart(f"{title} of every epoch", "epoch", first, series, show, tick, ceiling=ceiling)
        figures.append(_figure(title, line_chart(chart)))
    return section(
        "learning", "Learning curves", tag("div", *figures, class_="pair"), _epochs_table(run), lead=_learned(run)
    )


def _learned(run: Run) -> str:
    done, planned = len(run.epochs), run.planned_epochs
    words = f"{plural(done, 'epoch')} of training"
    if planned is not None and done < planned:
        words = f"The run has stopped, or still runs, after {done} of {planned} epochs"
    key, measure = (
        ("test_iou", "intersection over union") if _recorded(run, "test_iou") else ("test_accuracy", "accuracy")
    )
    best = [value for value in run.column(key) if math.isfinite(value)]
    if best:
        words += f"; the best test {measure} was {percent(max(best))}"
    for key, where in (("test_robust_accuracy", "under attack"), ("unseen_accuracy", "on unseen sub-classes")):
        last = [value for value in run.column(key) if math.isfinite(value)]
        if last:
            words += f"; {where} it was {percent(last[-1])}"
    losses = run.column("train_loss") + run.column("test_loss")
    if any(math.isnan(value) or math.isinf(value) for value in losses):
        words += ". Some losses are not finite: the lines have gaps there"
    return words + "."


def _recorded(run: Run, key: str) -> bool:
    return any(math.isfinite(value) for value in run.column(key))


def _epochs_table(run: Run) -> Html:
    columns: list[tuple[str, str, Callable[[float | None], str]]] = [
        ("epoch", "epoch", count),
        ("train_loss", "train loss", decimal),
        ("test_loss", "test loss", decimal),
        ("train_accuracy", "train accuracy", percent),
        ("test_accuracy", "test accuracy", percent),
        ("test_iou", "test intersection over union", percent),
        ("test_robust_accuracy", "test accuracy under attack", percent),
        ("unseen_accuracy", "accuracy on unseen sub-classes", percent),
        ("solver_steps", "solver steps", decimal),
        ("worst_residual", "worst residual", scientific),
        ("lr", "learning rate", decimal),
        ("images_per_second", "images per second", decimal),
        ("peak_memory_mb", "peak memory, MiB", decimal),
        ("seconds", "seconds", decimal),
    ]
    kept = [one for one in columns if _recorded(run, one[0])]
    head = tag("tr", *(tag("th", name, scope="col") for _, name, _ in kept))
    rows = [tag("tr", *(tag("td", show(epoch.get(key, math.nan))) for key, _, show in kept)) for epoch in run.epochs]
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="numbers")
    return tag(
        "details",
        tag("summary", "All epochs in numbers"),
        scroller(table, "All epochs in numbers"),
    )


def solving(records: Sequence[SolveRecord]) -> Html:
    """Residual against solver step."""
    figures = []
    for record in records:
        worst = [value if value >= 0 else math.nan for value in record.worst]
        title = "Relative residual" if len(records) == 1 else f"Relative residual of {record.layer}"
        if not any(math.isfinite(value) and value > 0 for value in [*record.median, *worst]):
            chart = tag("p", "No finite residual was recorded.", class_="note")
        else:
            series = [Series("worst", worst, "s-worst"), Series("median", record.median, "s-test")]
            mark = (record.tol, f"tolerance {scientific(record.tol, 0)}") if record.tol > 0 else None
            chart = line_chart(
                Chart(f"{title} after every solver step", "step", 0, series, scientific, _power_tick, True, mark=mark)
            )
        figures.append(tag("div", _figure(title, chart), _solve_facts(record), class_="beside"))
    lead = (
        "The relative residual ‖T(y) − y‖ / ‖T(y)‖ after each solver step, T being one plain step; median and worst "
        "are over the test images."
    )
    return section("solving", "Convergence", *figures, lead=lead)


def _solve_facts(record: SolveRecord) -> Html:
    facts = [
        ("solver", record.method),
        ("tolerance", scientific(record.tol)),
        ("steps per image", decimal(record.mean_steps)),
        ("converged", percent(record.converged)),
        ("worst residual", scientific(record.worst_residual)),
    ]
    listed = tag(
        "dl", *(join(tag("dt", name), tag("dd", superscripts(value))) for name, value in facts), class_="facts"
    )
    failures = [
        tag("p", tag("b", f"{plural(times, 'image')}: "), f"{status.message}.", class_="note")
        for status, times in record.failures.items()
    ]
    return tag("div", listed, *failures)


def mistakes(predictions: Predictions, classes: Sequence[str]) -> Html:
    """The confusion matrix and the most frequent confusions."""
    wrong = int(predictions.confusion.sum() - predictions.confusion.diagonal().sum())
    seen = len(predictions.order)
    of = (
        f"{plural(seen, 'test image')}"
        if predictions.complete
        else f"the {seen:,} of {predictions.total:,} evaluated test images"
    )
    lead = f"Of {of}, {wrong:,} {'was' if wrong == 1 else 'were'} misclassified. Rows are true classes."
    matrix = tag(
        "figure",
        confusion_matrix(predictions.confusion, classes),
        tag(
            "figcaption",
            "Shade: fraction of the row. Mistakes are shaded relative to the most frequent one. ",
            legend(),
        ),
        class_="matrix",
    )
    accuracies = class_accuracies(predictions.confusion, classes)
    aside = tag("div", tag("h3", "Most frequent mistakes"), confused_pairs(predictions.confusion, classes))
    return section("mistakes", "Mistakes", tag("div", matrix, aside, class_="beside"), accuracies, lead=lead)


def _figure(title: str, content: Html) -> Html:
    return tag("figure", tag("figcaption", title, class_="title"), content)


def _plain_tick(value: float) -> str:
    return f"{value:g}".replace("-", "−")


def _percent_tick(value: float) -> str:
    return f"{100 * value:g}\u00a0%"


def _power_tick(value: float) -> str:
    return scientific(value, 0)
