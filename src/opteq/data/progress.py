"""A bar for work that takes long, where somebody is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

SHORT = 5000  # fewer small pictures are decoded before a bar could be read
LARGE = 1 << 16  # bytes from which on decoding a picture, not opening it, takes the time


@contextmanager
def progress(what: str, total: int, size: int = 0) -> Iterator[Callable[[int], None]]:
    """A function that takes how many more are done, each of ``size`` bytes.

    It draws only on a terminal (standard error), only where there is time to read it, and only with rich.
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
