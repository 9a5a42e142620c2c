"""Mathematics in plain HTML, written almost as one would type it."""

from __future__ import annotations

from opteq.report.html.markup import Html, join, tag

_FUNCTIONS = frozenset({"exp", "prox"})


def typeset(source: str) -> Html:
    """Letters as variables; ``_i`` is an index, ``^2`` an exponent and ``'`` a transpose.

    >>> typeset("W'y_i")
    '<i>W</i><sup>⊤</sup><i>y</i><sub><i>i</i></sub>'
    """
    parts: list[Html] = []
    word = ""
    place = 0
    while place < len(source):
        letter = source[place]
        if letter.isalpha() and letter.isascii():
            word += letter
            place += 1
            continue
        parts.append(_word(word))
        word = ""
        if letter in "_^" and place + 1 < len(source):
            end = place + 2
            while end < len(source) and letter == "_" and source[end] == "+":  # z_i+1 is written z_i+1
                end += 2
            parts.append(tag("sub" if letter == "_" else "sup", typeset(source[place + 1 : end])))
            place = end
            continue
        parts.append(tag("sup", "⊤") if letter == "'" else join(letter))
        place += 1
    return join(*parts, _word(word))


def _word(word: str) -> Html:
    """Functions upright, variables slanted."""
    return join(word) if word in _FUNCTIONS else join(*(tag("i", letter) for letter in word))
