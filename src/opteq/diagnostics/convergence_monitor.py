"""Warnings about samples that failed: at once where the status is known, else as soon as it is.

On a GPU a solve may still be running when its result is returned. Waiting for it, only to learn that it converged,
would cost what asynchronous execution saves. So the status codes are copied to the host without blocking, and read when
they have arrived: by the backward pass, by the layer's next call, or when the program ends.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opteq.common.errors import ConvergenceError, ConvergenceWarning, callers_level
from opteq.solution import Report
from opteq.solvers.status import SUCCESSES, Status
from opteq.states import State, any_row, blocks, map_state

# Most copies of status codes in flight; beyond that the host waits for the oldest.
_MOST_PENDING = 8

_Extents = dict[str, tuple[float, float]]
"""How bad the failures were that were warned of: the share of samples that failed, and the largest finite residual."""


@dataclass(frozen=True)
class FailureCheck:
    """A solve whose status is to be checked.

    Attributes:
        report: how it went.
        what: what a failure means, in words.
        direction: forward or backward: a layer warns of each by itself.
        x: the input, where a failure may be its fault.
    """

    report: Report
    what: str
    direction: str
    x: State | None = None

    def fault(self, when: str = "") -> str:
        """A sentence about non-finite values of the input, if they are why a sample failed; else empty."""
        if self.x is None or int(Status.NON_FINITE) not in self.report.codes.tolist():
            return ""
        for bad in (~torch.isfinite(part) for part in blocks(self.x)):
            if any_row(bad):
                first = tuple(int(i) for i in bad.nonzero()[0])
                return f"the input{when} has {int(bad.sum())} values that are not finite, the first at index {first}"
        return ""


class AsyncHostCopy:
    """A copy of a tensor of integers in host memory, made without waiting for the device."""

    def __init__(self, numbers: Tensor) -> None:
        self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
        self._copy.copy_(numbers, non_blocking=True)
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(numbers.device))

    def arrived(self) -> bool:
        """Whether the values can be read without waiting."""
        return bool(self._event.query())

    def read(self) -> list[int]:
        """The values; waits for them."""
        self._event.synchronize()
        numbers: list[int] = self._copy.tolist()
        return numbers


class _Pending:
    """A check whose status codes are being copied to the host."""

    def __init__(self, check: FailureCheck) -> None:
        self.check = check if check.x is None else replace(check, x=map_state(Tensor.detach, check.x))
        self.codes = AsyncHostCopy(check.report.codes)
        self._versions = self._counted()

    def failed(self) -> bool:
        """Whether a sample has; waits for the codes."""
        return any(code not in SUCCESSES for code in self.codes.read())

    def fault(self) -> str:
        """The same, unless the input was overwritten since."""
        return self.check.fault(" of an earlier call") if self._versions == self._counted() else ""

    def _counted(self) -> list[int | None]:
        """Version counters of the parts of the input; None for inference tensors, which have none."""
        parts = () if self.check.x is None else blocks(self.check.x)
        return [None if part.is_inference() else part._version for part in parts]


class ConvergenceMonitor:
    """Checks the solves of one layer, and remembers what it has warned of."""

    def __init__(self) -> None:
        self._warned: _Extents = {}
        self.pending: deque[_Pending] = deque()
        self._lock = threading.RLock()  # backward passes have threads of their own
        weakref.finalize(self, _check_pending, self.pending, self._warned, os.getpid())

    def __reduce__(self) -> tuple[type[ConvergenceMonitor], tuple[()]]:
        # Reports belong to the process and the layer that made them.
        return ConvergenceMonitor, ()

    def check(self, check: FailureCheck, on_failure: str) -> None:
        """Warn or raise where samples failed; of a solve that still runs, later, unless it is to raise."""
        if on_failure == "ignore":
            return
        if on_failure == "warn" and check.report.pending:
            with self._lock:
                self.pending.append(_Pending(check))
                oldest = self.pending.popleft() if len(self.pending) > _MOST_PENDING else None
            if oldest is not None:
                self._settle(oldest)
        elif any_row(check.report.failures()):
            _report(check, on_failure, self._warned, check.fault())

    def catch_up(self, on_failure: str, wait_for: str | None = None) -> None:
        """Check what has arrived by now; wait for checks of this ``direction``, and for all before them.

        While failures are to be ignored, those of earlier calls are kept for later.
        """
        while on_failure != "ignore" and (next_one := self._next(wait_for)) is not None:
            self._settle(next_one)

    def _next(self, wait_for: str | None) -> _Pending | None:
        with self._lock:
            waiting = self.pending
            if waiting and (waiting[0].codes.arrived() or any(each.check.direction == wait_for for each in waiting)):
                return waiting.popleft()
            return None

    def _settle(self, pending: _Pending) -> None:
        if pending.failed():
            _report(pending.check, "warn", self._warned, pending.fault())


def _report(check: FailureCheck, on_failure: str, warned: _Extents, fault: str = "") -> None:
    if fault and on_failure == "raise":
        raise ValueError(fault)
    # A solve that was slow once does not hide an input that is not finite.
    about = "input" if fault else check.direction
    failed, residual = check.report.failures(), check.report.residual
    share, largest = float(failed.float().mean()), float(residual[failed].nan_to_num(nan=0, posinf=0).amax())
    before, worst = warned.get(about, (0.0, 0.0))
    # Again only when it is clearly worse: twice as many samples, or ten times the residual.
    if on_failure == "warn" and share < 2 * before and largest < 10 * max(worst, 1e-30):
        return
    message = check.report.describe_failures(check.what) + (f"\n  Note: {fault}." if fault else "")
    if on_failure == "raise":
        raise ConvergenceError(message)
    warned[about] = share, largest
    note = "(This layer warns again when it gets clearly worse.)"
    warnings.warn(f"{message}\n  {note}", ConvergenceWarning, stacklevel=callers_level())


def _check_pending(pending: deque[_Pending], warned: _Extents, process: int) -> None:
    """Check what is pending of a layer that is deleted, or at the end of a program."""
    if not pending or process != os.getpid():
        return
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return
    try:
        for each in pending:
            if each.failed():
                _report(each.check, "warn", warned)
    except RuntimeError:  # of a device that has failed, which was reported already
        return
