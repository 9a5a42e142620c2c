"""Small trainings that are killed with -9 at random moments and resumed: their weights are those of one left alone."""

from __future__ import annotations

import json
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from training_cases import in_process, make_images, start, train_here

_MORE = ["train.checkpoint_steps=2"]
_A_RUN = 5
"""Kills that one run has to survive at most."""


def exit_with_kills(*options: Any) -> None:
    """:func:`killed` in a process of its own."""
    sys.exit(killed(*options))


def killed(kills: int, seed: int, worker: int, folder: Path) -> int:
    """Kill so often; 1 where a run ended with other bytes. Counts are added to ``kills-seed*.json`` in ``folder``."""
    path = folder / f"kills-seed{seed}-{worker}.json"
    folder.mkdir(parents=True, exist_ok=True)
    count = json.loads(path.read_text()) if path.exists() else {"kills": 0, "runs": 0, "different": 0}
    chance, done = random.Random(f"{seed}/{worker}/{count['runs']}"), 0
    with tempfile.TemporaryDirectory() as place:
        images, alone = make_images(Path(place) / "images"), Path(place) / "alone"
        in_process(train_here, str(images), str(Path(place) / "first"), _MORE)  # which starts the server of processes
        begun = time.monotonic()
        assert in_process(train_here, str(images), str(alone), _MORE) == 0
        seconds = time.monotonic() - begun
        while done < kills:
            out = Path(place) / "run"
            survived = _run(images, out, seconds, min(_A_RUN, kills - done), chance)
            different = not _same(out, alone)
            if different:
                print(f"FAILED: a run that was killed {survived} times has other weights or metrics")
                shutil.copytree(out, folder / f"different-{worker}-{count['runs']}", dirs_exist_ok=True)
            shutil.rmtree(out)
            done += survived
            for key, more in (("kills", survived), ("runs", 1), ("different", int(different))):
                count[key] += more
            count |= {"machine": platform.machine(), "torch": torch.__version__}
            path.write_text(json.dumps(count))
    return int(count["different"] > 0)


def _run(images: Path, out: Path, seconds: float, most: int, chance: random.Random) -> int:
    """A run that is killed up to ``most`` times within its ``seconds``, then left alone; how often it was."""
    survived = 0
    for _ in range(most):
        process = start(train_here, str(images), str(out), _MORE)
        process.join(chance.uniform(0, seconds))
        if not process.is_alive():
            break
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:  # it came to its end just before
            break
        survived += 1
    assert in_process(train_here, str(images), str(out), _MORE) == 0
    return survived


def _same(run: Path, other: Path) -> bool:
    from training_cases import lines

    same = all(
        (run / name).read_bytes() == (other / name).read_bytes() for name in ("model.safetensors", "config.json")
    )
    return same and lines(run) == lines(other)
