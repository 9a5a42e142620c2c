"""SIGTERM, Ctrl-C and a closed terminal: the loop saves a checkpoint, then stops."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch

from opteq.training.devices import Accelerator

AGREE_EVERY = 10
"""Steps between two checks of several processes whether one of them received a signal."""


class StopRequest:
    """While this context is open, the first SIGTERM, SIGINT or SIGHUP is recorded; a second one has its default effect.

    SIGHUP, which a terminal sends when it closes, stays ignored where nohup has it ignored.

    Several processes do not receive a signal at the same step, so they agree on it every :data:`AGREE_EVERY` steps.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._before: dict[int, Any] = {}
        self.received = 0

    def __enter__(self) -> StopRequest:
        # Only the main thread can handle signals.
        if threading.current_thread() is threading.main_thread():
            hang_up = getattr(signal, "SIGHUP", None)  # not on Windows
            kept = hang_up is None or signal.getsignal(hang_up) is signal.SIG_IGN
            for number in (signal.SIGTERM, signal.SIGINT, *(() if kept else (hang_up,))):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number in list(self._before):
            self._restore(number)

    def agreed_signal(self, step: int) -> int:
        """The signal to stop for after this step, the same in all processes; 0 for none."""
        if self._accelerator.num_processes == 1:
            return self.received
        if step % AGREE_EVERY:
            return 0
        received = torch.tensor([self.received], device=self._accelerator.device)
        return int(self._accelerator.gather(received).max())

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = number
        self._restore(number)

    def _restore(self, number: int) -> None:
        before = self._before.pop(number, None)
        signal.signal(number, signal.SIG_DFL if before is None else before)
