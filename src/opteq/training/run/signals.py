"""A polite end: SIGTERM and Ctrl-C ask the loop to save before it leaves."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch

from opteq.training.devices import Accelerator

AGREE_EVERY = 10
"""Steps between two times that several processes ask each other whether one was told to stop."""


class StopRequest:
    """While this context is open, the first SIGTERM or SIGINT is only noted; a second one works as always.

    Processes of one run are not signalled at the same step, and each waits for the others in every step, so they agree
    on when to stop: every :data:`AGREE_EVERY` steps where there are several.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._before: dict[int, Any] = {}
        self.received = 0

    def __enter__(self) -> StopRequest:
        # Python lets only the main thread handle signals; in another one the caller has to see to it.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number in list(self._before):
            self._restore(number)

    def agreed(self, step: int) -> int:
        """The signal that the processes agree to stop for after this step, or 0."""
        if self._accelerator.num_processes == 1:
            return self.received
        if step % AGREE_EVERY:
            return 0
        mine = torch.tensor([self.received], device=self._accelerator.device)
        return int(self._accelerator.gather(mine).max())

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = number
        self._restore(number)

    def _restore(self, number: int) -> None:
        before = self._before.pop(number, None)
        signal.signal(number, signal.SIG_DFL if before is None else before)
