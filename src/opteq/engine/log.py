"""Which path the latest call took, and why."""

from __future__ import annotations

_latest: dict[str, str | None] = {}


def note(direction: str, reason: str | None) -> None:
    """Remember why the plain path runs in a direction, forward or backward; None where a captured graph does."""
    _latest[direction] = reason


def latest(direction: str) -> str:
    """The latest note as a sentence."""
    if direction not in _latest:
        return "plain path: the engine was not asked"
    reason = _latest[direction]
    return "captured CUDA graph" if reason is None else f"plain path: {reason}"


def clear() -> None:
    """Forget what was noted."""
    _latest.clear()
