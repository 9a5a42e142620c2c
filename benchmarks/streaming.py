"""Streaming of images beside torch's DataLoader with Pillow: images per second, and memory over the time of a run.

    python benchmarks/streaming.py DIR [--images 10000] [--side 256] [--batch 128] [--workers 2] [--rounds 3]
        [--turn 20] [--turns 0, for all]

makes a set of JPEGs in DIR where there is none: class folders, and the same images in tar shards. A thousand of them
differ, the others are copies (a file for each: they are read and decoded as if they differed). Every way of reading
them goes through them once a round and ends at uint8 batches in the memory of the process that would train. The ways
take turns of some batches, so that other programs slow all of them alike: the ratio to the DataLoader is that of two
turns beside each other. Memory is that of this process and all workers without what they share (PSS), every two
seconds.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from opteq import data

CLASSES, SHARD, DIFFERENT = 20, 1000, 1000
PLAIN = "DataLoader with Pillow"


@cache
def random_image(number: int, side: int) -> bytes:
    """A JPEG of quality 90 of smooth noise at several scales, about as large as a photograph of its size."""
    random = np.random.default_rng(number)
    total = np.full((side, side, 3), 128.0)
    for cells in (4, 16, 64):
        coarse = Image.fromarray(random.integers(0, 256, size=(cells, cells, 3), dtype=np.uint8))
        total += (np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), dtype=float) - 128) * 0.5
    file = io.BytesIO()
    Image.fromarray(total.clip(0, 255).astype(np.uint8)).save(file, "jpeg", quality=90)
    return file.getvalue()


def make(place: Path, images: int, side: int) -> None:
    """Class folders and shards with the same images; a few of them are the test split."""
    if (place / "made").exists():
        return
    for split, count in (("train", images), ("test", CLASSES)):
        for kind in range(CLASSES):
            (place / "folders" / split / f"{kind:02}").mkdir(parents=True, exist_ok=True)
        (place / "shards" / split).mkdir(parents=True, exist_ok=True)
        for start in range(0, count, SHARD):
            with tarfile.open(place / "shards" / split / f"{start // SHARD:04}.tar", "w") as tar:
                for number in range(start, min(start + SHARD, count)):
                    name, content = f"{number % CLASSES:02}/{number:07}.jpg", random_image(number % DIFFERENT, side)
                    (place / "folders" / split / name).write_bytes(content)
                    entry = tarfile.TarInfo(name)
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    (place / "made").touch()


class PillowFolder(Dataset[tuple[Tensor, int]]):
    """A folder as one reads it by hand: a list of paths, and Pillow for each image."""

    def __init__(self, root: Path) -> None:
        classes = sorted(root.iterdir())
        self.images = [(str(path), label) for label, folder in enumerate(classes) for path in sorted(folder.iterdir())]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        path, label = self.images[row]
        with Image.open(path) as file:
            return torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1).contiguous(), label


class Memory:
    """Proportional set size of this process and its children in MiB, sampled while the block runs."""

    def __enter__(self) -> Memory:
        self.sizes: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(2.0):
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            self.sizes.append(sum(_pss(process) for process in ("self", *children)) / 1024)


def _pss(process: str) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    except (OSError, StopIteration):
        return 0


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", type=Path)
    for name, usual in (
        ("images", 10_000),
        ("side", 256),
        ("batch", 128),
        ("workers", 2),
        ("rounds", 3),
        ("turn", 20),
        ("turns", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=usual)
    asked = parser.parse_args()
    make(asked.place, asked.images, asked.side)

    def opteq(kind: str) -> Callable[[int], Iterator[Tensor]]:
        dataset = data.load("folder", asked.place / kind, stream=True, workers=asked.workers)
        images = dataset.train.images
        assert isinstance(images, data.StreamedImages)

        def epoch(number: int) -> Iterator[Tensor]:
            order = torch.from_numpy(np.random.default_rng(number).permutation(len(images)))
            yield from images.batches(iter(torch.split(order, asked.batch)), torch.device("cpu"))

        return epoch

    plain = DataLoader(
        PillowFolder(asked.place / "folders" / "train"), asked.batch, shuffle=True, num_workers=asked.workers
    )
    ways: dict[str, Callable[[int], Iterator[Tensor]]] = {
        "opteq, class folders": opteq("folders"),
        "opteq, tar shards": opteq("shards"),
        PLAIN: lambda _: (images for images, _ in plain),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with Memory() as memory:
        for number in range(asked.rounds):
            for name, found in turns(ways, number, asked.turn, asked.turns or asked.images).items():
                rates[name] += found
    print(f"{asked.images} JPEGs of {asked.side} x {asked.side}, batches of {asked.batch}, {asked.workers} workers, ")
    print(f"{asked.rounds} rounds in turns of {asked.turn} batches\n")
    print("| way | images/s, median of turns (quartiles) | beside the DataLoader, median of turns (quartiles) |")
    print("|---|---|---|")
    for name, each in rates.items():
        beside = [own / other for own, other in zip(each, rates[PLAIN], strict=True)]
        print(f"| {name} | {_spread(each, 0)} | {_spread(beside, 2)} |")
    held = memory.sizes
    if held:
        print(f"\nMiB after a tenth, at the end, at most: {held[len(held) // 10]:.0f}, {held[-1]:.0f}, {max(held):.0f}")


def turns(
    ways: dict[str, Callable[[int], Iterator[Tensor]]], number: int, length: int, most: int
) -> dict[str, list[float]]:
    """Images per second of every whole turn of ``length`` batches, through all images or ``most`` turns."""
    open_ways = {name: epoch(number) for name, epoch in ways.items()}
    for batches in open_ways.values():
        next(batches)  # workers have started
    rates: dict[str, list[float]] = {name: [] for name in ways}
    seen = dict.fromkeys(ways, 0)
    for _ in range(most):
        for name, batches in open_ways.items():
            began = time.perf_counter()
            counts = [len(batch) for batch in islice(batches, length)]
            if len(counts) == length:
                rates[name].append(sum(counts) / (time.perf_counter() - began))
            seen[name] += sum(counts)
        if len(counts) < length:
            break
    assert len(set(seen.values())) == 1, seen
    return rates


def _spread(values: list[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


if __name__ == "__main__":
    main()
