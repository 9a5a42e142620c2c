"""Docstrings for the site: ``:class:`~a.b.C` `` becomes ``C`` in code font, since the pages are Markdown."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`(~?)([^`]+)`")
_EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


def plain(text: str) -> str:
    """The text without roles, and with its examples as code."""

    def name(found: re.Match[str]) -> str:
        short, target = found.groups()
        return f"`{target.rpartition('.')[2] if short else target}`"

    return _EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", _ROLE.sub(name, text))


class Roles(griffe.Extension):
    """Applies :func:`plain` to every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)
