"""``python -m hunt``: hunt for some minutes, run one case again, sum up, or kill trainings."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

from hunt.run import KINDS, PATHS, Case, exit_with_work, total, work


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where something failed."""
    given = _parser().parse_args(arguments)
    if given.kills:
        failed = _kill(given)
        print(total(given.folder))
        return failed
    if "/" in given.seed:
        case = Case.named(given.seed, given.device)
        verdict, failure = case.failure()
        print(f"{case}: {verdict}" if failure is None else f"FAILED {case}: {failure}")
        return 0 if failure is None else 1
    failed = 0 if given.sum else _hunt(given)
    print(total(given.folder))
    return failed


def _hunt(given: argparse.Namespace) -> int:
    options = (given.device, given.minutes, given.kinds or list(KINDS), given.paths or list(PATHS), given.folder)
    seed = int(given.seed)
    if given.processes == 1:
        return int(work(seed, 0, *options) > 0)
    # CUDA does not survive a fork; a server that has imported torch, and computed nothing, starts others quickly.
    context = multiprocessing.get_context("spawn" if given.device.startswith("cuda") else "forkserver")
    if not given.device.startswith("cuda"):
        context.set_forkserver_preload(["hunt.run", "torch._dynamo"])
    workers = [
        context.Process(target=exit_with_work, args=(seed, number, *options)) for number in range(given.processes)
    ]
    return _joined(workers, given.folder)


def _kill(given: argparse.Namespace) -> int:
    """Trainings one after the other in every process, each with kills of its own."""
    from hunt.kills import exit_with_kills, killed

    if given.processes == 1:
        return killed(given.kills, int(given.seed), 0, given.folder)
    context = multiprocessing.get_context("spawn")
    share, more = divmod(given.kills, given.processes)
    workers = [
        context.Process(target=exit_with_kills, args=(share + (number < more), int(given.seed), number, given.folder))
        for number in range(given.processes)
    ]
    return _joined(workers, given.folder)


def _joined(workers: list[Any], folder: Path) -> int:
    """Waits for processes, and says how far they are about once a minute; 1 where one failed or died."""
    for worker in workers:
        worker.start()
    begun = time.monotonic()
    while any(worker.is_alive() for worker in workers):
        next(worker for worker in workers if worker.is_alive()).join(60)
        print(f"{time.monotonic() - begun:.0f} s: " + "; ".join(total(folder).splitlines()[1:6]), flush=True)
    for number, worker in enumerate(workers):
        if worker.exitcode not in (0, 1):
            print(f"worker {number} died ({worker.exitcode}); its case is in a file *-worker{number}.case in {folder}")
    return int(any(worker.exitcode for worker in workers))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hunt", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long; 5 by default")
    parser.add_argument("--seed", default="0", help="a number; or seed/kind/path/number, a case that a report names")
    parser.add_argument("--processes", type=int, default=1, help="workers, each with cases of its own")
    parser.add_argument("--device", default="cpu", help="where the library computes: cpu or cuda")
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), help="all by default")
    parser.add_argument("--paths", nargs="*", choices=list(PATHS), help="both by default")
    parser.add_argument("--folder", type=Path, default=Path("runs/hunt"), help="for counts; a hunt goes on from them")
    parser.add_argument("--sum", action="store_true", help="only print the counts in the folder")
    parser.add_argument("--kills", type=int, default=0, help="kill small trainings so often, and compare their weights")
    return parser


if __name__ == "__main__":
    sys.exit(main())
