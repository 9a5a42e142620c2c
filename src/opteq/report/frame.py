"""The frame of every page: style, script, title and footer, in one file that needs no network."""

from __future__ import annotations

from datetime import datetime
from importlib import resources
from string import Template

from opteq.report.html.markup import Html, join


def html_page(title: str, kind: str, subtitle: Html, headline: Html | None, notes: Html | None, body: Html) -> str:
    """A self-contained HTML page.

    Args:
        title: the heading.
        kind: what the page is, above the heading.
        subtitle: below the heading.
        headline: a row of numbers, or None.
        notes: warnings above the body, or None.
        body: the sections.
    """
    here = resources.files("opteq.report") / "web"
    page = Template(here.joinpath("page.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=join(title),
        kind=join(kind),
        # The page's style sheet comes last: its rules for small screens override the others.
        style="\n".join(here.joinpath(name).read_text(encoding="utf-8") for name in ("figures.css", "style.css")),
        script=here.joinpath("page.js").read_text(encoding="utf-8"),
        subtitle=subtitle,
        headline=headline or "",
        notes=notes or "",
        body=body,
        colophon=join(
            f"Written by opteq on {datetime.now().astimezone():%Y-%m-%d at %H:%M}. This page needs no network."
        ),
    )
