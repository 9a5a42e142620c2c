"""Times and memory: medians of interleaved repetitions, so that clock changes affect all variants alike."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from opteq import engine

Work = Callable[[], object]

# Least duration of a repetition. A GPU is idle at its start and waits for the first launches, which would be a large
# part of a short one.
_LEAST_SECONDS, _LEAST_SECONDS_ON_GPU = 0.005, 0.1
# Warm-up ends after this time, but not before this number of calls.
_MOST_SECONDS, _LEAST_CALLS = 0.3, 4


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: median, fastest and slowest of ``repeats`` repetitions with ``calls`` calls each."""

    median: float
    low: float
    high: float
    repeats: int
    calls: int


@dataclass(frozen=True)
class Memory:
    """Peak bytes allocated by tensors and reserved by the allocator, above those before."""

    allocated: int
    reserved: int


class Clock:
    """Times work on one device.

    Calls of a repetition follow each other without synchronisation, as the steps of a training do; the device is
    synchronised before and after. Warm-up compiles kernels and captures graphs.

    Args:
        device: where the work runs.
        repeats: repetitions per variant.
        warm_up: calls before the first repetition, fewer where they take long.
    """

    def __init__(self, device: torch.device, repeats: int, warm_up: int) -> None:
        self.device = device
        self.repeats = repeats
        self.warm_up = warm_up

    def wait(self) -> None:
        """Synchronise the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def clear(self) -> None:
        """Free captured solves and cached memory."""
        engine.forget()
        gc.collect()
        if self.device.type == "cuda":
            self.wait()
            torch.cuda.empty_cache()

    def interleaved(self, works: Mapping[str, Work]) -> dict[str, Timing | str]:
        """Time all ``works`` interleaved; for one that raises, the reason instead of a time."""
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
        """Peak memory of ``work`` from its first call on, with captured graphs and their buffers; None on a CPU."""
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
        """Calls per repetition; or the reason of a failure."""
        try:
            begun = time.perf_counter()
            for call in range(self.warm_up):
                work()
                if call + 1 >= _LEAST_CALLS and time.perf_counter() - begun > _MOST_SECONDS:
                    break
            spent = self._seconds(work, 1)
        except Exception as error:  # the others are still timed
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


def built_at_first_call(build: Callable[[], Work]) -> Work:
    """Work that is built at its first call, where a failure is reported like any other."""
    made: list[Work] = []

    def work() -> object:
        if not made:
            made.append(build())
        return made[0]()

    return work


def reason(error: Exception) -> str:
    """``fails:`` and the message of an exception, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return f"fails: {text[:160]}"
