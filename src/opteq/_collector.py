"""Captures of CUDA graphs, kept apart from Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collected() -> Iterator[None]:
    """What the collector destroys may be graphs, events or streams: a capture that sees that is void."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
