"""The certificate in words: what the weights guarantee, and which statement says so."""

from __future__ import annotations

import re
from collections.abc import Sequence

from opteq.problems.certificate import Certificate
from opteq.report.html.markup import Html, join, tag
from opteq.report.html.numbers import decimal, readable
from opteq.report.sections import section

_PART = re.compile(r"(?:^|\. |; )part (\d+): ")


def guarantees(certificates: Sequence[tuple[str, Certificate | str]]) -> Html:
    """The certificate in words."""
    lead = "Computed from the weights as they are now, not measured on pictures: it holds for every input."
    blocks = []
    for layer, certificate in certificates:
        title = tag("h3", tag("code", layer)) if len(certificates) > 1 else None
        if isinstance(certificate, str):
            blocks.append(join(title, tag("p", f"No certificate could be computed: {certificate}", class_="note")))
        else:
            blocks.append(join(title, tag("ul", *_statements(certificate), class_="certificate")))
    return section("guarantees", "What is guaranteed", *blocks, lead=lead)


def _statements(certificate: Certificate) -> list[Html]:
    exists = {
        True: "An equilibrium exists for every input.",
        False: "For some inputs there is no equilibrium.",
        None: "Whether an equilibrium exists for every input is unknown.",
    }[certificate.exists]
    unique = {
        True: "It is the only one, wherever the solver begins.",
        False: "There may be several, and where the solver begins decides.",
        None: "Whether it is the only one is unknown.",
    }[certificate.unique]
    factor, slope = certificate.contraction, certificate.lipschitz
    if factor is None:
        contraction = "How far a step can stretch distances is unknown."
    elif factor < 1:
        contraction = f"Every step brings two states together, to at most {decimal(factor)} of their distance."
    else:
        contraction = f"A step may push two states apart, to at most {decimal(factor)} times their distance."
    lipschitz = (
        "How far the features can move with the input is unknown."
        if slope is None
        else f"The features move at most {decimal(slope)} times as far as the layer's input does."
    )
    states = [
        ("exists", exists, certificate.exists),
        ("unique", unique, certificate.unique),
        ("contraction", contraction, None if factor is None else factor < 1),
        ("lipschitz", lipschitz, None if slope is None else True),
    ]
    marks = {True: ("yes", "✓"), False: ("no", "!"), None: ("unknown", "?")}
    return [
        tag(
            "li",
            tag("span", marks[good][1], class_="mark", aria_hidden="true"),
            tag("div", tag("b", sentence), _reason(certificate.reasons.get(name, ""), good is None)),
            class_=marks[good][0],
        )
        for name, sentence, good in states
    ]


def _reason(words: str, unknown: bool) -> Html:
    """A reason. Those of several parts, which are long, are folded away, and told once where they are the same.

    What is unknown of all parts together is unknown of one of them: the rule that joins them then explains nothing, and
    the first part's reason stands in its place.
    """
    head, *rest = _PART.split(words)
    if not rest:
        return tag("p", readable(words))
    parts = list(zip(rest[::2], rest[1::2], strict=True))
    if len({reason for _, reason in parts}) == 1:
        told = f"Each of the {len(parts)} parts: {readable(parts[0][1])}"
        return tag("p", told if unknown else f"{readable(head)} {told}")
    first = tag("p", f"The first of {len(parts)} parts: {readable(parts[0][1])}" if unknown else readable(head))
    listed = tag("ol", *(tag("li", readable(reason)) for _, reason in parts), start="0")
    return join(first, tag("details", tag("summary", f"All {len(parts)} parts"), listed))
