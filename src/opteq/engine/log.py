"""Which path the latest call took, and why."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from opteq.diagnostics.copies import silent_copy
from opteq.engine.flatten import flatten
from opteq.engine.settings import settings
from opteq.engine.traced import traces_of
from opteq.engine.values_read import NotFlattenableError
from opteq.states import blocks

latest_notes: dict[str, str] = {}


def note(direction: str, reason: str | None, graph: str = "captured CUDA graph") -> None:
    """Remember why the plain path runs in a direction, forward or backward; None where a graph does."""
    latest_notes[direction] = graph if reason is None else f"plain path: {reason}"


def latest(direction: str) -> str:
    """The latest note as a sentence."""
    return latest_notes.get(direction, "plain path: this gradient does not use the engine")


def describe(layer: Any, x: Any) -> str:
    """The text of :func:`opteq.engine.report`."""
    if settings.offs:
        return "forward: plain path: the engine is off\nbackward: plain path: the engine is off"
    if not hasattr(layer, "problem"):
        raise TypeError(f"engine.report takes an opteq.Equilibrium and its input; got {type(layer).__name__}")
    latest_notes.clear()
    with silent_copy(layer, blocks(x)) as layer:
        for _ in range(settings.calls_before_tracing + 2):  # the last one replays
            if tracked := [part for part in blocks(layer(x)) if part.requires_grad]:
                torch.autograd.grad(tracked, [p for p in (*layer.parameters(), *blocks(x)) if p.requires_grad],
                                    [torch.ones_like(part) for part in tracked], allow_unused=True)  # fmt: skip
        after = latest("backward") if tracked else "nothing wants a gradient"
        said = f"forward: {latest('forward')}\nbackward: {after}"
        with suppress(NotFlattenableError):
            traces = traces_of(flatten(layer.problem(x)), layer.compile_functions)
            said += "" if traces.reason is None else f"\nfunctions: as they are written: {traces.reason}"
    return said
