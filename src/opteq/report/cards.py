"""Test images as cards, and the appendix with recipe and environment."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

import torch

from opteq.report.charts.images import heatmap, image_data_url
from opteq.report.charts.waterfall import terms_table, waterfall
from opteq.report.examples import Example
from opteq.report.html.markup import Html, join, tag
from opteq.report.html.numbers import decimal, percent
from opteq.report.run import Run
from opteq.report.sections import section


def cards(examples: Sequence[Example], classes: Sequence[str]) -> Html:
    """One card per example: prediction, objective term by term, and attention or saliency map."""
    kind = examples[0].kind
    views = {
        "attention": "The second image shows the weight of each patch at the equilibrium.",
        "saliency": "The second image shows the sensitivity of the predicted class's score to each pixel.",
    }
    lead = f"Mistakes first, the most confident ones. {views[kind]}"
    if examples[0].terms:
        lead += " The bars show the change of the objective from the initial state to the equilibrium, term by term."
    for layer, why in examples[0].reasons.items():
        lead += f" There is no objective for {layer or 'this layer'}: {why}."
    every = tag("div", *(_card(one, classes) for one in examples), class_="cards")
    return section("images", "Example images", every, lead=lead)


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
        _images(example, true),
        tag("ol", *likely, class_="likely", aria_label="Most probable classes"),
        *falls,
        class_="card",
    )


def _images(example: Example, true: str) -> Html:
    values = example.view[torch.isfinite(example.view)].float()
    if example.kind == "attention":
        low, high = (float(values.min()), float(values.max())) if values.numel() else (0.0, 1.0)
        caption = f"attention, {decimal(low, 2)} to {decimal(high, 2)}"
    else:
        # The 99th percentile is the brightest color, so that single pixels do not darken the others.
        low, high = 0.0, float(torch.quantile(values, 0.99)) if values.numel() else 1.0
        caption = "saliency"
    alternative = f"{example.kind} map"
    return tag(
        "div",
        tag(
            "figure",
            tag("img", src=image_data_url(example.pixels), alt=f"test image: {true}"),
            tag("figcaption", "image"),
        ),
        tag("figure", tag("img", src=heatmap(example.view, low, high), alt=alternative), tag("figcaption", caption)),
        class_="views",
    )


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
    region = tag("div", content, class_="scroller", tabindex="0", role="region", aria_label=title)
    return tag("details", tag("summary", title), region)


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items() if inner is not None)
    if isinstance(value, list):
        return ", ".join(str(inner) for inner in value)
    return "none" if value is None else str(value)
