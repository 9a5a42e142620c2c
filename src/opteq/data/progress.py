"""A bar for work that takes long, where somebody is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHORT = 5000  # fewer pictures are decoded before a bar could be read


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function that takes how many more are done; it draws only on a terminal (standard error)."""
    if total < SHORT or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
