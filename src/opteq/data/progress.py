"""A progress bar for long work, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

SHORT = 5000  # images; fewer are decoded before a bar could be read
LARGE = 1 << 16  # bytes; above, decoding an image takes longer than opening it


@contextmanager
def progress(what: str, total: int, size: int = 0) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances the bar by a number of items of ``size`` bytes each.

    The bar is drawn on standard error if that is a terminal, if the work is long enough, and if rich is installed.
    """
    drawn = total * max(size / LARGE, 1) >= SHORT and sys.stderr.isatty() and find_spec("rich") is not None
    if not drawn:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
