"""What a layer says of samples that failed: at once where that is known, else as soon as it is.

On a GPU a solve may be under way when its answer is handed out (:mod:`opteq.solvers.continued`). To wait for it, only
to learn that all went well, would cost what not waiting has saved. So the status codes are sent after it, and looked at
when they have arrived: by the backward pass, which is launched by then, by the layer's next call, or when the program
ends.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from dataclasses import dataclass

import torch

from opteq._errors import ConvergenceError, ConvergenceWarning, callers_level
from opteq.solution import Report
from opteq.solvers.sent import Sent
from opteq.solvers.status import Status
from opteq.states import State, any_row, blocks

# So many reports may be on their way; the host waits for the oldest one of more.
_MOST_UNSEEN = 8
_FINE = (int(Status.CONVERGED), int(Status.APPROXIMATE))


@dataclass(frozen=True)
class Finding:
    """A solve to be judged.

    Attributes:
        report: how it went.
        what: what a failure means, in words.
        way: forward or backward: a layer warns once of each.
        x: the input, where a failure may be its fault.
    """

    report: Report
    what: str
    way: str
    x: State | None = None

    def refuse_input(self, when: str) -> None:
        """Raise where the input has values that are not finite, and a sample is lost for that reason."""
        if self.x is None or int(Status.NON_FINITE) not in self.report.codes.tolist():
            return
        for bad in (~torch.isfinite(part) for part in blocks(self.x)):
            if any_row(bad):
                first = tuple(int(i) for i in bad.nonzero()[0])
                raise ValueError(
                    f"the input{when} has {int(bad.sum())} values that are not finite, the first at index {first}"
                )


class _Unseen:
    """A finding whose status codes are on their way to the host."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        self.codes = Sent(finding.report.codes)

    def failed(self) -> bool:
        """Whether a sample has; waits for the codes."""
        return any(code not in _FINE for code in self.codes.read())


class Watch:
    """Judges the solves of one layer, and remembers what it has warned of."""

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._unseen: deque[_Unseen] = deque()
        weakref.finalize(self, _last_words, self._unseen, self._warned)

    def judge(self, finding: Finding, on_failure: str) -> None:
        """Warn or raise where samples failed; of a solve that is still under way, later, unless it is to raise."""
        if on_failure == "ignore":
            return
        if on_failure == "warn" and finding.report.late:
            self._unseen.append(_Unseen(finding))
            if len(self._unseen) > _MOST_UNSEEN:
                self._settle(self._unseen.popleft())
        elif any_row(finding.report.failures()):
            finding.refuse_input("")
            _tell(finding, on_failure, self._warned)

    def catch_up(self, wait_for: str | None = None) -> None:
        """Judge what has arrived by now; what went this ``way``, and all before it, is waited for."""
        waiting = self._unseen
        while waiting and (waiting[0].codes.arrived() or any(unseen.finding.way == wait_for for unseen in waiting)):
            self._settle(waiting.popleft())

    def _settle(self, unseen: _Unseen) -> None:
        if unseen.failed():
            unseen.finding.refuse_input(" of an earlier call")
            _tell(unseen.finding, "warn", self._warned)


def _tell(finding: Finding, on_failure: str, warned: set[str]) -> None:
    if on_failure == "warn" and finding.way in warned:
        return
    message = finding.report.describe_failures(finding.what)
    if on_failure == "raise":
        raise ConvergenceError(message)
    warned.add(finding.way)
    warnings.warn(message + "\n  (This layer warns once.)", ConvergenceWarning, stacklevel=callers_level())


def _last_words(unseen: deque[_Unseen], warned: set[str]) -> None:
    """Of a layer that nobody has any more, or at the end of a program."""
    for each in unseen:
        if each.failed():
            _tell(each.finding, "warn", warned)
