"""Cases by name, one after the other, and what became of them."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import opteq
from hunt.drawing import Draw, FailureError
from opteq.common.errors import MissingExtraError
from opteq.engine.settings import settings

KINDS = {"problems": 20, "gradients": 3, "certificates": 2, "files": 2, "recipes": 1}
"""The kinds, each a module with a function ``hunt``, and how many cases of each make a round: two of three gradients
can be checked, so that these are 100 problems to 10 gradients, 10 certificates, 10 files and 5 recipes."""
PATHS = ("plain", "engine")
_BOTH = ("problems", "gradients", "certificates")
_SECONDS = 120
"""What a single case may compute: of the processor's time, since other processes may have the machine too."""
_UNCHECKED = ("unsolved", "at a kink", "ill-conditioned", "unrolled", "one step", "skipped")
"""What becomes of cases about which the oracle has nothing to say."""
_APART = 10**7
"""Between the first numbers of two workers: each has cases of its own, however many workers there are."""
_NOTED = 5
"""Seconds between two writes of the counts: a hunt that is killed loses no more."""
_SHOWN = 30
"""Failures that a sum lists; of others it says how many there are."""
_SELDOM = 4
"""On a CPU the engine traces what a user has written, and leaves the rest to the plain path: every fourth round."""


@dataclass(frozen=True)
class Case:
    """A case: all that it is drawn from, and the device of the library."""

    seed: int
    kind: str
    path: str
    number: int
    device: str = "cpu"

    @classmethod
    def named(cls, name: str, device: str = "cpu") -> Case:
        """The inverse of ``str``."""
        seed, kind, path, number = name.split("/")
        if kind not in KINDS or path not in PATHS:
            raise ValueError(f"a case is seed/kind/path/number with a kind of {[*KINDS]} and a path of {[*PATHS]}")
        return cls(int(seed), kind, path, int(number), device)

    def __str__(self) -> str:
        return f"{self.seed}/{self.kind}/{self.path}/{self.number}"

    def run(self) -> str:
        """What was checked; an error where something is wrong."""
        # The same draw on both paths, so that one can be compared with the other.
        captured = self.path == "engine" and self.device.startswith("cuda")
        draw = Draw(f"{self.kind}/{self.seed}/{self.number}", self.device, calls=3 if captured else 1)
        # Imports are not limited: one that is broken off leaves a broken module. torch.func imports this one.
        importlib.import_module("torch._dynamo")
        hunt = importlib.import_module(f"hunt.{self.kind}").hunt
        torch.backends.cudnn.allow_tf32 = False  # on a GPU too, float32 is what its name says
        settings.calls_before_tracing = 0  # objectives that a user has written, on a CPU
        with opteq.engine.off() if self.path == "plain" else nullcontext(), _limited(_SECONDS):
            return str(hunt(draw))

    def failure(self) -> tuple[str, str | None]:
        """What was checked, and what is wrong in a few lines, or None."""
        try:
            return self.run(), None
        except (MissingExtraError, ModuleNotFoundError) as error:
            if isinstance(error, ModuleNotFoundError) and str(error.name).startswith(("opteq", "hunt")):
                return "failed", str(error)
            return f"skipped: {error}", None
        except FailureError as error:
            return "failed", str(error)
        except Exception as error:  # whatever the library did not mean to raise
            last = traceback.extract_tb(error.__traceback__)[-1]
            return "failed", f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"


@dataclass
class Tally:
    """How far a worker has come, and what it has seen; it goes on from here.

    Attributes:
        seconds, computed: by the clock, and of the processor's time.
        next: for ``kind/path``, the number of the next case.
        seen: for ``kind/path``, how many cases were checked as what.
        failed: cases by name, and what is wrong.
    """

    seed: int
    worker: int
    device: str
    machine: str = field(default_factory=platform.machine)
    torch: str = torch.__version__
    seconds: float = 0.0
    computed: float = 0.0
    next: dict[str, int] = field(default_factory=dict)
    seen: dict[str, dict[str, int]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def path(cls, folder: Path, seed: int, worker: int, device: str) -> Path:
        return folder / f"{device.replace(':', '')}-seed{seed}-worker{worker}.json"

    @classmethod
    def read(cls, path: Path, seed: int, worker: int, device: str) -> Tally:
        """That of a file; a new one where there is none."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls(seed, worker, device)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(asdict(self), indent=1))
        os.replace(draft, path)

    def note(self, case: Case, verdict: str, failure: str | None) -> None:
        key = f"{case.kind}/{case.path}"
        self.next[key] = case.number + 1
        counts = self.seen.setdefault(key, {})
        counts[verdict] = counts.get(verdict, 0) + 1
        if failure is not None:
            self.failed[str(case)] = failure[:2000]

    def cases(self, kinds: list[str], paths: list[str]) -> Iterator[Case]:
        """Cases without end, from where this stands."""
        for turn in itertools.count():
            for path in paths:
                if path == "engine" and len(paths) > 1 and self.device == "cpu" and turn % _SELDOM:
                    continue
                for kind in kinds if path == paths[0] else [kind for kind in kinds if kind in _BOTH]:
                    for _ in range(KINDS[kind]):
                        yield Case(self.seed, kind, path, self._number(kind, path), self.device)

    def _number(self, kind: str, path: str) -> int:
        """Of the next case. Paths have cases of their own, too: no problem counts twice."""
        first = self.worker * _APART + (_APART // 2 if path == "engine" else 0)
        return self.next.get(f"{kind}/{path}", first)


def work(seed: int, worker: int, device: str, minutes: float, kinds: list[str], paths: list[str], folder: Path) -> int:
    """Hunt for some minutes; the number of failures. Counts are in ``folder``, and the case under way."""
    torch.set_num_threads(1)
    path = Tally.path(folder, seed, worker, device)
    tally = Tally.read(path, seed, worker, device)
    begun = noted = time.monotonic()
    end, before, failures = begun + 60 * minutes, (tally.seconds, tally.computed - time.process_time()), 0
    folder.mkdir(parents=True, exist_ok=True)
    under_way = path.with_suffix(".case")
    for case in tally.cases(kinds, paths):
        under_way.write_text(str(case))  # where the process itself dies, this is the case
        verdict, failure = case.failure()
        tally.note(case, verdict, failure)
        now = time.monotonic()
        tally.seconds, tally.computed = before[0] + now - begun, before[1] + time.process_time()
        if failure is not None:
            failures += 1
            print(f"FAILED {case}: {failure}\n  again: make hunt SEED={case}", flush=True)
        if now - noted > _NOTED or failure is not None or now >= end:
            tally.write(path)
            noted = now
        if now >= end:
            break
    under_way.unlink()
    return failures


def exit_with_work(*options: Any) -> None:
    """The same in a process of its own, whose exit status is 1 where something failed."""
    sys.exit(int(work(*options) > 0))


def total(folder: Path) -> str:
    """The counts of all workers in ``folder``, as text."""
    tallies = [Tally(**json.loads(path.read_text())) for path in sorted(folder.glob("*-worker*.json"))]
    sums: dict[str, dict[str, int]] = {}
    for tally in tallies:
        for key, counts in tally.seen.items():
            for verdict, number in counts.items():
                sums.setdefault(key, {})[verdict] = sums.setdefault(key, {}).get(verdict, 0) + number
    places = sorted({f"{t.device} {t.machine} torch {t.torch} seed {t.seed}" for t in tallies})
    minutes, computed = (sum(getattr(t, name) for t in tallies) / 60 for name in ("seconds", "computed"))
    lines = [f"{len(tallies)} workers, {minutes:.1f} minutes, {computed:.1f} of them computing: {'; '.join(places)}"]
    for kind in KINDS:
        pairs = [pair for key, counts in sums.items() if key.startswith(kind) for pair in counts.items()]
        run = sum(number for _, number in pairs)
        checked = sum(number for verdict, number in pairs if not verdict.startswith(_UNCHECKED))
        lines += [f"  {kind}: {run}, {checked} of them checked"] if run else []
    for key, counts in sorted(sums.items()):
        lines.append(f"  {key}: " + ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items())))
    for path in sorted(folder.glob("kills-*.json")):
        found = json.loads(path.read_text())
        lines.append(f"  kills: {found['kills']} in {found['runs']} trainings, {found['different']} with other bytes")
    failed = [pair for tally in tallies for pair in tally.failed.items()]
    lines += [f"  failed: make hunt SEED={name}  # {message[:300]}" for name, message in failed[:_SHOWN]]
    return "\n".join(lines + [f"  and {len(failed) - _SHOWN} more that failed"] * (len(failed) > _SHOWN))


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """A failure where it takes longer, as far as the system can tell."""

    def late(*_: object) -> None:
        raise FailureError(f"took more than {seconds} s")

    try:
        before = signal.signal(signal.SIGPROF, late)
    except (AttributeError, ValueError):  # a system without it, or not in the main thread
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
