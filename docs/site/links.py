"""Links that leave the documentation: on the site they are named, since the files are in the repository alone."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page."""
    if "/" in page.file.src_uri:  # `../` of a page in a folder stays inside
        return markdown
    return _OUTSIDE.sub(r"\1 (`\2` in the repository)", markdown)
