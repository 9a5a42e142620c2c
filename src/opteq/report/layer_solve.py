"""How the equilibria of example images were found: objective and residual step by step, terms, and state maps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.analysis.terms import equilibrium_inputs, objective_terms
from opteq.common.errors import ConvergenceWarning
from opteq.report.charts.curves import Chart, Series, line_chart
from opteq.report.charts.images import heatmap
from opteq.report.charts.waterfall import terms_table
from opteq.report.html.markup import Html, join, tag
from opteq.report.html.numbers import decimal, scientific
from opteq.states import blocks

MOST_MAPS = 8
"""State maps that are shown of a layer: those of the channels with the largest norm."""


@dataclass(frozen=True)
class LayerSolve:
    """The solve of one layer for one image.

    Attributes:
        layer: its name.
        tol: the solver's tolerance.
        residuals: the relative residual after every step, from the start on.
        objective: the objective after every step; empty where the problem has none.
        start, end: the terms of the objective at the start and at the equilibrium; empty where it has none.
        reason: why there are none.
        states: maps of the state at the equilibrium, ``(h, w)`` each, with the channel's name.
    """

    layer: str
    tol: float
    residuals: list[float]
    objective: list[float]
    start: dict[str, float]
    end: dict[str, float]
    reason: str | None
    states: list[tuple[str, Tensor]]


@torch.no_grad()
def layer_solves(model: nn.Module, x: Tensor) -> list[list[LayerSolve]]:
    """The solves of every image of ``x``, one per layer. The model is in evaluation mode."""
    found: list[list[LayerSolve]] = [[] for _ in x]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        terms = [one.merged() for one in objective_terms(model, x)]
        for (name, layer, given), values in zip(equilibrium_inputs(model, x), terms, strict=True):
            try:
                solution = layer.solve(given, trace_objective=True)
            except (TypeError, ValueError):  # the problem has no objective
                solution = layer.solve(given)
            objective, residuals = solution.objective_trace, solution.trace
            for place, solves in enumerate(found):
                steps = int(solution.steps[place])
                solves.append(
                    LayerSolve(
                        name,
                        solution.report.tol,
                        [] if residuals is None else _until(residuals[:, place], steps),
                        [] if objective is None else _until(objective[:, place], steps),
                        _numbers(values.start, place),
                        _numbers(values.end, place),
                        values.reason,
                        _maps(blocks(solution.state), place),
                    )
                )
    return found


def _until(trace: Tensor, steps: int) -> list[float]:
    """The values up to the sample's last step; other samples of the batch may take more steps."""
    return [float(value) for value in trace[: steps + 1].double().cpu()]


def _numbers(terms: dict[str, Tensor], place: int) -> dict[str, float]:
    return {name: float(values[place]) for name, values in terms.items()}


def _maps(state: Sequence[Tensor], place: int) -> list[tuple[str, Tensor]]:
    maps = [
        (f"{index}.{channel}" if len(state) > 1 else str(channel), one.cpu())
        for index, block in enumerate(state)
        if block.ndim == 4
        for channel, one in enumerate(block[place])
    ]
    maps.sort(key=lambda pair: -float(pair[1].norm()) if bool(torch.isfinite(pair[1]).all()) else math.inf)
    return maps[:MOST_MAPS]


def solve_details(solve: LayerSolve, named: bool) -> Html:
    """The solve of a layer, collapsed: charts, terms and state maps."""
    name = f" of {solve.layer}" if named else ""
    figures = []
    for title, values, log in (("Objective", solve.objective, False), ("Relative residual", solve.residuals, True)):
        if len(values) > 1 and any(math.isfinite(value) and (value > 0 or not log) for value in values):
            tick = (lambda value: scientific(value, 0)) if log else decimal
            mark = (solve.tol, f"tolerance {scientific(solve.tol, 0)}") if log and solve.tol > 0 else None
            show = scientific if log else decimal
            series = [Series(title.lower().removeprefix("relative "), values, "s-test")]
            chart = Chart(f"{title} after every step", "solver step", 0, series, show, tick, log, mark=mark)
            figures.append(tag("figure", tag("figcaption", title, class_="title"), line_chart(chart)))
    low = min((float(one.min()) for _, one in solve.states), default=0.0)
    high = max((float(one.max()) for _, one in solve.states), default=1.0)
    maps = [
        tag(
            "figure",
            tag("img", src=heatmap(one, low, high), alt=f"state of channel {channel}"),
            tag("figcaption", channel),
        )
        for channel, one in solve.states
    ]
    states = None
    if maps:
        caption = f"State at the equilibrium, strongest channels, {decimal(low, 2)} to {decimal(high, 2)}"
        states = join(tag("h4", caption), tag("div", *maps, class_="states"))
    terms = join(tag("h4", "Terms of the objective"), terms_table(solve.start, solve.end)) if solve.end else None
    return tag("details", tag("summary", f"Equilibrium{name}, step by step"), *figures, terms, states)
