"""The history of a solve's residuals, where its length is known, and where only the device knows it yet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LateTrace:
    """Residuals of a solve that the host has not waited for.

    Attributes:
        room: a row a step, more of them than were taken; the others hold anything.
        steps: how many were taken, a sample.
    """

    room: Tensor
    steps: Tensor

    def read(self) -> Tensor:
        """Those of the steps that were taken, ``(steps + 1, B)``; waits for the device."""
        return self.room[: max(self.steps.tolist(), default=0) + 1]


Trace = Tensor | LateTrace


def read_trace(trace: Trace) -> Tensor:
    """The residuals, ``(steps + 1, B)``."""
    return trace.read() if isinstance(trace, LateTrace) else trace
