"""Which path a layer takes, and why."""

from __future__ import annotations

from typing import Any

import torch

from opteq.engine import log
from opteq.engine.settings import settings
from opteq.states import blocks


def describe(layer: Any, x: Any) -> str:
    """The text of :func:`opteq.engine.report`."""
    if settings.offs:
        return "forward: plain path: the engine is off\nbackward: plain path: the engine is off"
    log.clear()
    for _ in range(settings.calls_before_tracing + 2):  # the last one replays
        features = blocks(layer(x))
        tracked = [part for part in features if part.requires_grad]
        if tracked:
            torch.autograd.grad(tracked, [p for p in (*layer.parameters(), *blocks(x)) if p.requires_grad],
                                [torch.ones_like(part) for part in tracked], allow_unused=True)  # fmt: skip
    backward = log.latest("backward") if tracked else "nothing wants a gradient"
    return f"forward: {log.latest('forward')}\nbackward: {backward}"
