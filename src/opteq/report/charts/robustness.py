"""The section on robustness: the figure that was drawn, and the numbers behind it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from opteq.report.html.markup import Html, join, tag
from opteq.report.html.numbers import decimal, percent, plural
from opteq.report.sections import section


def robustness(record: dict[str, Any], folder: Path) -> Html:
    """The section of a run that was evaluated with ``--corruptions`` or ``--curves``.

    Args:
        record: ``robustness.json``.
        folder: of the run, with ``robustness.png``.
    """
    parts = [_plot_image(folder / "robustness.png")]
    words = []
    if "corruptions" in record:
        corruptions = record["corruptions"]
        words.append(
            f"On {plural(corruptions['images'], 'test image')} the accuracy is {percent(corruptions['mean'])} over all "
            f"corruptions and severities, {percent(corruptions['clean'])} without."
        )
        relative = corruptions.get("relative")
        if relative is not None:
            words.append(
                f"Errors relative to {relative['reference']}: {decimal(relative['mean'])} (mean corruption error)."
            )
        parts.append(_corruptions(corruptions))
    if "curves" in record:
        curves = record["curves"]
        radius = curves["radius"]
        words.append(
            f"Under APGD of {255 * radius['radii'][-1]:.3g}/255 it is {percent(radius['apgd'][-1])} "
            f"({plural(curves['images'], 'test image')})."
        )
        certified = curves["certified"]
        if "reason" in certified:
            words.append(f"There is no certified accuracy: {certified['reason']}.")
        else:
            pairs = zip(certified["radii"], certified["accuracy"], strict=True)
            held = max((radius for radius, accuracy in pairs if accuracy >= 0.5), default=0.0)
            sure = "" if certified["source"] == "weights" else f", each with probability {certified['probability']:g}"
            words.append(f"At least half of the images are certified up to a Euclidean radius of {held:g}{sure}.")
    return section("robustness", "Robustness", *parts, lead=" ".join(words))


def _plot_image(path: Path) -> Html | None:
    try:
        content = base64.b64encode(path.read_bytes()).decode()
    except OSError:
        return None
    alt = "Accuracy under corruptions and attacks; the numbers are in robustness.md"
    image = tag("img", src=f"data:image/png;base64,{content}", alt=alt, style="max-width: 100%; background: white")
    return tag("figure", image)


def _corruptions(record: dict[str, Any]) -> Html:
    heads = ("corruption", *(f"severity {level}" for level in range(1, 6)), "mean")
    head = tag("tr", *(tag("th", name, scope="col") for name in heads))
    rows = [
        tag("tr", tag("th", name.replace("_", " "), scope="row"), *(tag("td", percent(v)) for v in (*row, _mean(row))))
        for name, row in record["accuracy"].items()
    ]
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="numbers")
    label = "Accuracy by corruption and severity"
    scroller = tag("div", table, class_="scroller", tabindex="0", role="region", aria_label=label)
    return tag("details", tag("summary", label), join(scroller))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
