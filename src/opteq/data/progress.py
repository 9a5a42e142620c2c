"""A progress bar for long work, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from opteq.common.errors import needs_extra


@contextmanager
def progress(what: str, total: int, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances the bar by a number of items.

    The bar is drawn on standard error if it is to be ``shown``, if that is a terminal, and if rich is installed.
    """
    if not (shown and sys.stderr.isatty() and find_spec("rich") is not None):
        yield lambda _: None
        return
    with needs_extra("train"):
        from rich.console import Console
        from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
