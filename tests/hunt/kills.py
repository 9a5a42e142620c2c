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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training_cases import in_process, lines, make_grey_images, make_images, start, train_denoiser_here, train_here

_A_RUN = 5
"""Kills that one run has to survive at most."""


def exit_with_kills(*options: Any) -> None:
    """:func:`killed` in a process of its own."""
    sys.exit(killed(*options))


@dataclass(frozen=True)
class _Training:
    """A small training that can be killed, and a run of it that was left alone.

    Attributes:
        target, options: what a process runs, and its arguments after the folders of images and of the run.
        seconds: that it takes.
    """

    target: Callable[..., None]
    options: list[str]
    images: Path
    alone: Path
    seconds: float

    @classmethod
    def made(cls, target: Callable[..., None], options: list[str], images: Path, place: Path) -> _Training:
        arguments = (str(images), str(place / "first"), options)
        assert in_process(target, *arguments) == 0  # which starts the server of processes
        begun = time.monotonic()
        assert in_process(target, str(images), str(place / "alone"), options) == 0
        return cls(target, options, images, place / "alone", time.monotonic() - begun)

    def run(self, out: Path, most: int, chance: random.Random) -> int:
        """A run that is killed up to ``most`` times, then left alone; how often it was."""
        arguments, survived = (str(self.images), str(out), self.options), 0
        for _ in range(most):
            process = start(self.target, *arguments)
            process.join(chance.uniform(0, self.seconds))
            if not process.is_alive():
                break
            process.kill()
            process.join()
            if process.exitcode != -signal.SIGKILL:  # it came to its end just before
                break
            survived += 1
        assert in_process(self.target, *arguments) == 0
        return survived


def killed(kills: int, seed: int, worker: int, folder: Path) -> int:
    """Kill so often; 1 where a run ended with other bytes. Counts are added to ``kills-seed*.json`` in ``folder``.

    Trainings of a classifier and of a denoiser take turns.
    """
    path = folder / f"kills-seed{seed}-{worker}.json"
    folder.mkdir(parents=True, exist_ok=True)
    count = json.loads(path.read_text()) if path.exists() else {"kills": 0, "runs": 0, "different": 0}
    chance, done = random.Random(f"{seed}/{worker}/{count['runs']}"), 0
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        denoising = ["train.steps=12", "train.checkpoint_steps=3"]  # beside log_steps=2: sums are kept, too
        trainings = [
            _Training.made(train_here, ["train.checkpoint_steps=2"], make_images(place / "images"), place / "a"),
            _Training.made(train_denoiser_here, denoising, make_grey_images(place / "grey"), place / "b"),
        ]
        while done < kills:
            out, training = place / "run", trainings[count["runs"] % len(trainings)]
            survived = training.run(out, min(_A_RUN, kills - done), chance)
            different = not _same(out, training.alone)
            if different:
                what = training.target.__name__
                print(f"FAILED: a run of {what} that was killed {survived} times has other weights or metrics")
                shutil.copytree(out, folder / f"different-{worker}-{count['runs']}", dirs_exist_ok=True)
            shutil.rmtree(out)
            done += survived
            for key, more in (("kills", survived), ("runs", 1), ("different", int(different))):
                count[key] += more
            count |= {"machine": platform.machine(), "torch": torch.__version__}
            path.write_text(json.dumps(count))
    return int(count["different"] > 0)


def _same(run: Path, other: Path) -> bool:
    same = all(
        (run / name).read_bytes() == (other / name).read_bytes() for name in ("model.safetensors", "config.json")
    )
    return same and lines(run) == lines(other)
