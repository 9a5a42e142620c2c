"""Test images as cards, and the appendix with recipe and environment."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

import torch

from opteq.report.charts.images import heatmap, image_data_url, signed_map
from opteq.report.charts.waterfall import signed, style_of, waterfall
from opteq.report.examples import Example, WhatIf
from opteq.report.html.markup import Html, join, scroller, tag
from opteq.report.html.numbers import decimal, percent
from opteq.report.layer_solve import solve_details
from opteq.report.run import Run
from opteq.report.sections import section


def cards(examples: Sequence[Example], classes: Sequence[str], title: str = "Example images") -> Html:
    """One card per example: prediction, evidence, counterfactuals and the equilibrium step by step."""
    first = examples[0]
    lead = "" if first.label is None else "Mistakes first, the most confident ones. "
    lead += (
        "The bars split the difference between the logits of the predicted class and the runner-up over the channels "
        "or branches that the last layer reads; they add up to it exactly. The colored image splits it over pixels"
    )
    exact = first.evidence.affine
    lead += ", relative to an image of the mean color" + ("." if exact else ", to first order.")
    for solve in first.solves:
        if solve.reason is not None:
            lead += f" There is no objective for {solve.layer or 'this layer'}: {solve.reason}."
    every = tag("div", *(_card(one, classes) for one in examples), class_="cards")
    return section("images", title, every, lead=lead)


def _card(example: Example, classes: Sequence[str]) -> Html:
    predicted, rival = classes[example.predicted], classes[example.evidence.rival]
    likely = [
        tag(
            "li",
            tag("span", classes[index], class_="class"),
            tag("span", tag("i", style=f"--w:{share:.4f}"), class_="gauge"),
            tag("span", percent(share), class_="share"),
            class_="true" if index == example.label else None,
        )
        for index, share in example.likely
    ]
    shares = example.evidence.shares
    finer = None
    if example.evidence.channels:
        bars = waterfall(example.evidence.channels, "together", f"{predicted} against {rival}, strongest channels")
        finer = tag("details", tag("summary", "Strongest channels"), bars)
    return tag(
        "article",
        tag("header", _verdict(example, classes)),
        tag("p", example.name, class_="aside") if example.name else None,
        _images(example, classes),
        tag("ol", *likely, class_="likely", aria_label="Most probable classes"),
        tag("h4", f"Evidence for {predicted} against {rival}"),
        waterfall(shares, "difference", f"{predicted} against {rival}"),
        finer,
        _what_if(example, classes),
        *(solve_details(solve, len(example.solves) > 1) for solve in example.solves),
        class_="card",
    )


def _verdict(example: Example, classes: Sequence[str]) -> Html:
    name = tag("b", classes[example.predicted])
    if example.label is None:
        return name
    if example.right:
        return join(name, tag("span", "right", class_="verdict right"))
    aside = tag("span", f"it is {classes[example.label]}", class_="aside")
    return join(name, tag("span", "wrong", class_="verdict wrong"), aside)


def _images(example: Example, classes: Sequence[str]) -> Html:
    shown = "image" if example.label is None else f"test image: {classes[example.label]}"
    predicted, rival = classes[example.predicted], classes[example.evidence.rival]
    views = [
        tag("figure", tag("img", src=image_data_url(example.pixels), alt=shown), tag("figcaption", "image")),
        tag(
            "figure",
            tag("img", src=signed_map(example.evidence.pixels), alt="evidence of every pixel"),
            tag("figcaption", tag("span", f"for {predicted}", class_="for"), " ", _against(rival)),
        ),
    ]
    if example.attention is not None:
        values = example.attention[torch.isfinite(example.attention)].float()
        low, high = (float(values.min()), float(values.max())) if values.numel() else (0.0, 1.0)
        caption = f"attention, {decimal(low, 2)} to {decimal(high, 2)}"
        image = tag("img", src=heatmap(example.attention, low, high), alt="attention map")
        views.append(tag("figure", image, tag("figcaption", caption)))
    return tag("div", *views, class_="views" if len(views) == 2 else "views three")


def _against(rival: str) -> Html:
    return tag("span", f"for {rival}", class_="against")


def _what_if(example: Example, classes: Sequence[str]) -> Html | None:
    """A table of counterfactuals: a row per term, a column per factor."""
    if not example.what_if:
        return None
    factors = sorted({one.factor for one in example.what_if})
    several = len({one.layer for one in example.what_if}) > 1
    names = {0.0: "off", 0.5: "half", 2.0: "double"}
    rows = []
    for layer, term in dict.fromkeys((one.layer, one.term) for one in example.what_if):
        by_factor = {one.factor: one for one in example.what_if if (one.layer, one.term) == (layer, term)}
        label = f"{layer}: {term}" if several else term
        cells = [_cell(by_factor[factor], example.predicted, classes) for factor in factors if factor in by_factor]
        rows.append(tag("tr", tag("th", tag("i", class_=f"swatch {style_of(term)}"), " ", label, scope="row"), *cells))
    heads = (tag("th", names.get(factor, f"{factor:g} times"), scope="col") for factor in factors)
    head = tag("tr", tag("th", "term", scope="col"), *heads)
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="numbers")
    lead = f"{classes[example.predicted]} over {classes[example.evidence.rival]}"
    caption = f"The lead of {lead} in logits, solved again with one term scaled, and the class where it is another one"
    caption += "; none: no equilibrium found." if not all(one.converged for one in example.what_if) else "."
    note = tag("p", caption, class_="note")
    title = "What if a term were off, halved or doubled?"
    return tag("details", tag("summary", title), scroller(table, title), note)


def _cell(answer: WhatIf, predicted: int, classes: Sequence[str]) -> Html:
    if not answer.converged:
        return tag("td", "none", class_="aside")
    other = None
    if answer.predicted != predicted:
        other = tag("span", f"{classes[answer.predicted]}:", class_="against")
    return tag("td", other, " " if other else None, signed(answer.difference))


def appendix(run: Run) -> Html:
    """Command, recipe, environment and model configuration, collapsed."""
    command = run.environment.get("command")
    shown = shlex.join(str(word) for word in command) if isinstance(command, list) else command
    pieces = []
    if shown:
        pieces.append(_folded("Command", tag("pre", tag("code", shown))))
    if run.recipe_text:
        pieces.append(_folded("Recipe", tag("pre", tag("code", run.recipe_text.strip()))))
    environment = {key: value for key, value in run.environment.items() if key != "command"}
    if environment:
        rows = [tag("tr", tag("th", key, scope="row"), tag("td", _flat(value))) for key, value in environment.items()]
        pieces.append(_folded("Environment", tag("table", tag("tbody", *rows), class_="numbers words")))
    if run.config:
        pieces.append(_folded("Model", tag("pre", tag("code", json.dumps(run.config, indent=2, ensure_ascii=False)))))
    if not pieces:
        pieces.append(tag("p", "The folder holds neither recipe nor environment.", class_="note"))
    return section("details", "Details", *pieces)


def _folded(title: str, content: Html) -> Html:
    return tag("details", tag("summary", title), scroller(content, title))


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items() if inner is not None)
    if isinstance(value, list):
        return ", ".join(str(inner) for inner in value)
    return "none" if value is None else str(value)
