"""Times and memory: medians of calls in turns, so that a change of clock meets every variant alike."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from opteq.solvers import graphs

Work = Callable[[], object]

# A turn lasts at least this long, by as many calls as that takes: one short call would measure the looking. A GPU is
# idle at the beginning of a turn, and waits for its first launches; in a short turn that would be a good part of it.
_LEAST_SECONDS, _LEAST_SECONDS_ON_GPU = 0.005, 0.1
# Warming up ends early once it has taken so long, but not before so many calls.
_MOST_SECONDS, _LEAST_CALLS = 0.3, 4


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call: the median of ``repeats`` turns with ``calls`` calls each, and the fastest and slowest."""

    median: float
    low: float
    high: float
    repeats: int
    calls: int


@dataclass(frozen=True)
class Memory:
    """Bytes above what was held before: what tensors took at the peak, and what the allocator asked the device for."""

    allocated: int
    reserved: int


class Clock:
    """Times work on one device.

    Calls of a turn follow each other without waiting, as the steps of a training do; the device is waited for before a
    turn and after it. Warming up is part of it: the first calls of a solve compile kernels and capture graphs.

    Args:
        device: where the work runs.
        repeats: turns a variant.
        warm_up: calls before the first turn, fewer where they take long.
    """

    def __init__(self, device: torch.device, repeats: int, warm_up: int) -> None:
        self.device = device
        self.repeats = repeats
        self.warm_up = warm_up

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def clear(self) -> None:
        """Give back what earlier work held: captured solves, and memory kept for the next one."""
        graphs.forget()
        gc.collect()
        if self.device.type == "cuda":
            self.wait()
            torch.cuda.empty_cache()

    def in_turns(self, works: Mapping[str, Work]) -> dict[str, Timing | str]:
        """Time all ``works`` side by side; one that raises is left out, with its reason instead of a time."""
        found: dict[str, Timing | str] = {}
        ready: dict[str, tuple[Work, int]] = {}
        for name, work in works.items():
            calls = self._warmed(work)
            if isinstance(calls, str):
                found[name] = calls
            else:
                ready[name] = (work, calls)
        times: dict[str, list[float]] = {name: [] for name in ready}
        for _ in range(self.repeats):
            for name, (work, calls) in ready.items():
                times[name].append(self._seconds(work, calls))
        for name, seconds in times.items():
            ms = [1e3 * each for each in seconds]
            found[name] = Timing(statistics.median(ms), min(ms), max(ms), self.repeats, ready[name][1])
        return {name: found[name] for name in works}

    def memory(self, work: Work) -> Memory | None:
        """What ``work`` takes from its very first call on, captured graphs and their buffers included; None on a CPU.

        A replayed graph uses memory that was set aside when it was captured, so the peak of a later call alone would
        say too little.
        """
        if self.device.type != "cuda":
            return None
        self.clear()
        torch.cuda.reset_peak_memory_stats(self.device)
        allocated, reserved = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        for _ in range(self.warm_up):
            work()
        self.wait()
        return Memory(
            torch.cuda.max_memory_allocated(self.device) - allocated,
            torch.cuda.max_memory_reserved(self.device) - reserved,
        )

    def _warmed(self, work: Work) -> int | str:
        """Calls that fill a turn; or why there cannot be any."""
        try:
            begun = time.perf_counter()
            for call in range(self.warm_up):
                work()
                if call + 1 >= _LEAST_CALLS and time.perf_counter() - begun > _MOST_SECONDS:
                    break
            spent = self._seconds(work, 1)
        except Exception as error:  # a rival may fail in any way; the others are still worth timing
            return reason(error)
        least = _LEAST_SECONDS_ON_GPU if self.device.type == "cuda" else _LEAST_SECONDS
        return max(1, math.ceil(least / max(spent, 1e-6)))

    def _seconds(self, work: Work, calls: int) -> float:
        self.wait()
        begun = time.perf_counter()
        for _ in range(calls):
            work()
        self.wait()
        return (time.perf_counter() - begun) / calls


def later(build: Callable[[], Work]) -> Work:
    """Work that is put together at its first call, where a failure is reported like any other."""
    made: list[Work] = []

    def work() -> object:
        if not made:
            made.append(build())
        return made[0]()

    return work


def reason(error: Exception) -> str:
    """``fails:`` and what an exception says, in one short line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return f"fails: {text[:160]}"
