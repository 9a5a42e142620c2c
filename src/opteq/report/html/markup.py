"""Elements of the page as text. What is not markup already is escaped: no recipe or class name can break the page."""

from __future__ import annotations

import html
import re

_RAISED = re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_LOWERED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "−0123456789")
_VOID = frozenset({"img", "br", "hr", "meta"})


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def text(value: object) -> Html:
    """``value`` as markup: escaped, unless it is markup.

    >>> text("a < b"), text(Html("<b>x</b>"))
    ('a &lt; b', '<b>x</b>')
    """
    return value if isinstance(value, Html) else Html(html.escape(str(value), quote=True))


def join(*parts: object, between: str = "") -> Html:
    """The parts one after the other; None leaves nothing."""
    return Html(between.join(text(part) for part in parts if part is not None))


def tag(name: str, *children: object, **attributes: object) -> Html:
    """An element. ``class_`` is ``class``, other underscores are hyphens, None leaves an attribute out.

    >>> tag("p", "5 < 6", class_="note", aria_label=None)
    '<p class="note">5 &lt; 6</p>'
    """
    opening = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        shown = key.rstrip("_").replace("_", "-")
        opening += f" {shown}" if value is True else f' {shown}="{text(value)}"'
    if name in _VOID:
        return Html(f"<{opening}>")
    return Html(f"<{opening}>{join(*children)}</{name}>")


def raised(value: str) -> Html:
    """Text whose superscript signs become raised ones: in large type, fonts draw the signs unevenly.

    >>> raised("4·10⁻³")
    '4·10<sup>−3</sup>'
    """
    return Html(_RAISED.sub(lambda found: f"<sup>{found[0].translate(_LOWERED)}</sup>", text(value)))
