"""A few test pictures as cards, and what a run was made with, at the end of the page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

import torch

from opteq.report.charts.images import heat, photograph
from opteq.report.charts.waterfall import terms_table, waterfall
from opteq.report.examples import Example
from opteq.report.html.markup import Html, join, tag
from opteq.report.html.numbers import decimal, percent
from opteq.report.run import Run
from opteq.report.sections import section


def cards(examples: Sequence[Example], classes: Sequence[str]) -> Html:
    """Every example with its prediction, the fall of its objective and where the model looked."""
    kind = examples[0].kind
    views = {
        "attention": "The second picture shows how much weight each patch has at the equilibrium.",
        "saliency": "The second picture shows how strongly each pixel moves the score of the predicted class.",
    }
    lead = f"Mistakes first, the surest of them. {views[kind]}"
    if examples[0].terms:
        lead += " The bars lead from the objective where the solver began, term by term, down to where it ended."
    for layer, why in examples[0].reasons.items():
        lead += f" There is no objective to draw for {layer or 'this layer'}: {why}."
    every = tag("div", *(_card(one, classes) for one in examples), class_="cards")
    return section("pictures", "A few pictures, explained", every, lead=lead)


def _card(example: Example, classes: Sequence[str]) -> Html:
    true, predicted = classes[example.label], classes[example.predicted]
    if example.right:
        verdict = join(tag("b", predicted), tag("span", "right", class_="verdict right"))
    else:
        verdict = join(
            tag("b", predicted),
            tag("span", "wrong", class_="verdict wrong"),
            tag("span", f"it is {true}", class_="aside"),
        )
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
    falls = [
        join(
            tag("h4", tag("code", layer)) if len(example.terms) > 1 else None,
            waterfall(start, end, f"{predicted}, {layer or 'the layer'}"),
            tag("details", tag("summary", "Terms in numbers"), terms_table(start, end)),
        )
        for layer, start, end in example.terms
    ]
    return tag(
        "article",
        tag("header", verdict),
        _pictures(example, true),
        tag("ol", *likely, class_="likely", aria_label="Most probable classes"),
        *falls,
        class_="card",
    )


def _pictures(example: Example, true: str) -> Html:
    values = example.view[torch.isfinite(example.view)].float()
    if example.kind == "attention":
        low, high = (float(values.min()), float(values.max())) if values.numel() else (0.0, 1.0)
        caption = f"attention, {decimal(low, 2)} to {decimal(high, 2)}"
    else:
        # One pixel in a hundred may lie above the brightest colour, so that a single one does not darken all others.
        low, high = 0.0, float(torch.quantile(values, 0.99)) if values.numel() else 1.0
        caption = "saliency"
    alternative = f"{example.kind} map: bright where the prediction looks"
    return tag(
        "div",
        tag(
            "figure",
            tag("img", src=photograph(example.pixels), alt=f"test picture: {true}"),
            tag("figcaption", "picture"),
        ),
        tag("figure", tag("img", src=heat(example.view, low, high), alt=alternative), tag("figcaption", caption)),
        class_="views",
    )


def appendix(run: Run) -> Html:
    """Recipe, environment and command, folded away."""
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
    return section("details", "How it was made", *pieces)


def _folded(title: str, content: Html) -> Html:
    region = tag("div", content, class_="scroller", tabindex="0", role="region", aria_label=title)
    return tag("details", tag("summary", title), region)


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items() if inner is not None)
    if isinstance(value, list):
        return ", ".join(str(inner) for inner in value)
    return "none" if value is None else str(value)
