"""Which path the latest call took, and why."""

from __future__ import annotations

_latest: dict[str, str] = {}


def note(direction: str, reason: str | None, graph: str = "captured CUDA graph") -> None:
    """Remember why the plain path runs in a direction, forward or backward; None where a graph does."""
    _latest[direction] = graph if reason is None else f"plain path: {reason}"


def latest(direction: str) -> str:
    """The latest note as a sentence."""
    return _latest.get(direction, "plain path: the engine was not asked")


def clear() -> None:
    """Forget what was noted."""
    _latest.clear()
