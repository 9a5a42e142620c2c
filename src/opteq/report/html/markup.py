"""HTML elements as text. Everything that is not ``Html`` is escaped."""

from __future__ import annotations

import html
import re

_RAISED = re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_LOWERED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "−0123456789")
_VOID = frozenset({"img", "br", "hr", "meta"})


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: object) -> Html:
    """``value`` as HTML: escaped, unless it is :class:`Html`.

    >>> text("a < b"), text(Html("<b>x</b>"))
    ('a &lt; b', '<b>x</b>')
    """
    return value if isinstance(value, Html) else Html(html.escape(str(value), quote=True))


def join(*parts: object, between: str = "") -> Html:
    """The concatenated parts, without None."""
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


def scroller(content: Html, label: str) -> Html:
    """A region that scrolls sideways, by keys too, where its content is wider than the page."""
    return tag("div", content, class_="scroller", tabindex="0", role="region", aria_label=label)


def superscripts(value: str) -> Html:
    """Text with Unicode superscripts as ``<sup>``, which fonts draw evenly in large type.

    >>> superscripts("4·10⁻³")
    '4·10<sup>−3</sup>'
    """
    return Html(_RAISED.sub(lambda found: f"<sup>{found[0].translate(_LOWERED)}</sup>", text(value)))
