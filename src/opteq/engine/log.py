"""Which path the latest call took, and why."""

from __future__ import annotations

from typing import Any

_latest: dict[str, str | None] = {}


def note(direction: str, reason: str | None) -> Any:
    """Remember why the plain path runs in a direction, forward or backward; None where a captured graph does.

    It returns None, which tells whoever asked that the plain path should run.
    """
    _latest[direction] = reason
    return None


def latest(direction: str) -> str:
    """What was noted, as a sentence."""
    if direction not in _latest:
        return "plain path: the engine was not asked"
    reason = _latest[direction]
    return "captured CUDA graph" if reason is None else f"plain path: {reason}"


def clear() -> None:
    """Forget what was noted."""
    _latest.clear()
