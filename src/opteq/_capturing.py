"""What captures of CUDA graphs need in common: no garbage collected meanwhile, and a clean end where one failed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


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


def mend_generator() -> None:
    """Let random numbers be drawn again after a capture on the current device that failed.

    The generator was told of the capture's beginning, and of no end: a copy of its state knows of neither.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
