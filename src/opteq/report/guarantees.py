"""The certificate as sentences, with the statements that justify them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from opteq.problems.certificate import Certificate
from opteq.report.html.markup import Html, join, tag
from opteq.report.html.numbers import decimal, explain_symbols, percent, with_symbols
from opteq.report.sections import section

_PART = re.compile(r"(?:^|\. |; )part (\d+): ")


def guarantees(certificates: Sequence[tuple[str, Certificate | str]], certified: float | None = None) -> Html:
    """The section with the certificates.

    Args:
        certificates: of every layer, by name, or why there is none.
        certified: share of the test images whose equilibria are certified, by the weights or at the point.
    """
    lead = "Computed from the current weights: it holds for every input."
    blocks, meanings = [], dict[str, str]()
    for layer, certificate in certificates:
        title = tag("h3", tag("code", layer)) if len(certificates) > 1 else None
        if isinstance(certificate, str):
            blocks.append(join(title, tag("p", f"No certificate could be computed: {certificate}", class_="note")))
        else:
            blocks.append(join(title, tag("ul", *_statements(certificate), class_="certificate")))
            meanings |= certificate.symbols()
    if meanings:
        blocks.append(tag("p", f"Here {explain_symbols(meanings)}.", class_="note"))
    if certified is not None:
        words = f"Of the test images, {percent(certified)} converged to certified equilibria, by the weights or"
        blocks.append(tag("p", f"{words} at the point (see analysis.local_certificate)."))
    return section("guarantees", "Guarantees", *blocks, lead=lead)


def _statements(certificate: Certificate) -> list[Html]:
    exists = {
        True: "An equilibrium exists for every input.",
        False: "For some inputs there is no equilibrium.",
        None: "Whether an equilibrium exists for every input is unknown.",
    }[certificate.exists]
    unique = {
        True: "It is unique, wherever the solver starts.",
        False: "There may be several, and the start of the solver decides.",
        None: "Whether it is unique is unknown.",
    }[certificate.unique]
    factor, slope = certificate.contraction, certificate.lipschitz
    if factor is None:
        contraction = "The contraction factor of a step is unknown."
    elif factor < 1:
        contraction = f"Every step is a contraction with factor at most {decimal(factor)}."
    else:
        contraction = f"A step may increase distances, by a factor of at most {decimal(factor)}."
    lipschitz = (
        "The Lipschitz constant from input to features is unknown."
        if slope is None
        else f"The Lipschitz constant from the layer's input to its features is at most {decimal(slope)}."
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
    """A reason. Those of several parts are collapsed, or shown once where they are equal.

    A property of all parts is unknown if it is unknown for one of them; the first part's reason is shown then.
    """
    head, *rest = _PART.split(words)
    if not rest:
        return tag("p", with_symbols(words))
    parts = list(zip(rest[::2], rest[1::2], strict=True))
    if len({reason for _, reason in parts}) == 1:
        text = f"Each of the {len(parts)} parts: {with_symbols(parts[0][1])}"
        return tag("p", text if unknown else f"{with_symbols(head)} {text}")
    first = tag("p", f"The first of {len(parts)} parts: {with_symbols(parts[0][1])}" if unknown else with_symbols(head))
    listed = tag("ol", *(tag("li", with_symbols(reason)) for _, reason in parts), start="0")
    return join(first, tag("details", tag("summary", f"All {len(parts)} parts"), listed))
