"""Tiny runs for the tests of training: images that can be learned in a second, and processes that can be killed."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from opteq.training import Recipe, load_recipe

# The forkserver imports torch once and never computes, so that its children start quickly and can be killed at will.
# torch's optimisers import torch._dynamo, which takes several seconds.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["opteq.training", "opteq.report", "torch.utils.tensorboard", "torch._dynamo"])

# Dropout needs the random state, batch normalisation the buffers, momentum the optimiser's: a resumed run that
# forgot one of them would end elsewhere.
TINY = [
    "name=tiny",
    "data.name=folder",
    "model.options.channels=4",
    "model.options.hidden=[6]",
    "model.options.pool=1",
    "model.options.dropout=0.2",
    "model.options.injection_norm=batch",
    "augment.flip=true",
    "augment.crop_padding=1",
    "train.epochs=3",
    "train.batch_size=16",
    "train.test_batch_size=7",
    "train.device=cpu",
]

TINY_DENOISER = [
    "model.width=4",
    "model.knots=4",
    "train.batch_size=2",
    "train.patch=20",
    "train.log_steps=2",
    "train.checkpoint_steps=2",
    "train.device=cpu",
    "train.threads=1",
    "test.sets=['set12']",
    "test.sigmas=[25]",
]


def make_images(root: Path, train: int = 20, test: int = 5) -> Path:
    """An image folder with two classes of 8x8 images, bright above or bright below."""
    random = np.random.default_rng(0)
    for split, count in (("train", train), ("test", test)):
        for name, rows in (("above", slice(0, 4)), ("below", slice(4, 8))):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = random.integers(0, 120, (8, 8, 3), dtype=np.uint8)
                pixels[rows] += 100
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return root


def settings(root: Path, *more: str) -> list[str]:
    """The overrides that make of the recipe `digits` a tiny one on :func:`make_images`."""
    return [*TINY, f"data.root={root}", f"data.cache={root / 'cache'}", *more]


def tiny(root: Path, *more: str) -> Recipe:
    """A recipe that trains for a moment."""
    return load_recipe("digits", settings(root, *more))


def lines(run: Path) -> list[dict[str, Any]]:
    """What a run recorded, without what depends on the clock and the machine."""
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    left_out = ("seconds", "images_per_second", "peak_memory_mb")
    return [{k: v for k, v in line.items() if k not in left_out} for line in read]


def _run(target: Callable[..., None], *arguments: Any) -> None:
    """As in a program of its own: children of the forkserver would start theirs by it, and these outlive a kill."""
    multiprocessing.set_start_method(None, force=True)
    gc.freeze()  # torch and all that was imported stay: each collection would go through them and copy their pages
    target(*arguments)


def in_process(target: Callable[..., None], *arguments: Any, timeout: float = 50) -> int | None:
    """Run ``target`` in a process of its own; its exit code is minus the signal that ended it, if one did."""
    process = _PROCESSES.Process(target=_run, args=(target, *arguments))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        raise AssertionError(f"{target.__name__} did not end within {timeout} s")
    return process.exitcode


def start(target: Callable[..., None], *arguments: Any) -> Any:
    """Start ``target`` in a process of its own and do not wait for it."""
    process = _PROCESSES.Process(target=_run, args=(target, *arguments))
    process.start()
    return process


def train_here(root: str, out: str, more: list[str], resume: bool = True) -> None:
    """A whole run; quiet, with one thread so that sums are added in one order."""
    import torch

    from opteq.training import Interrupted, TrainingStopped, train

    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere
        try:
            train(tiny(Path(root), *more), out, resume=resume)
        except Interrupted as error:
            os._exit(128 + error.signal)
        except TrainingStopped:
            os._exit(3)


def make_grey_images(root: Path) -> Path:
    """Three small images to train a denoiser with, and three to test it."""
    random = np.random.default_rng(0)
    for folder in ("train", "set12"):
        (root / folder).mkdir(parents=True)
        for number in range(3):
            coarse = random.integers(0, 255, (4, 4), dtype=np.uint8)
            Image.fromarray(coarse).resize((24, 24)).save(root / folder / f"{number}.png")
    return root


def train_denoiser_here(root: str, out: str, more: list[str]) -> None:
    """A whole run of a small denoiser on :func:`make_grey_images`; quiet, with one thread."""
    import torch
    from rich.console import Console

    from opteq import training

    torch.set_num_threads(1)
    recipe = training.load_any_recipe("denoiser-weak", [*TINY_DENOISER, f"data.root={root}", *more])
    with open(os.devnull, "w") as nowhere:
        training.train_denoiser(recipe, out, resume=True, console=Console(file=nowhere))


def train_and_die(root: str, out: str, more: list[str], event: int, number: int = signal.SIGKILL) -> None:
    """A run that is sent a signal at its ``event``-th moment: around a step, a write, a sync to disk, a rename."""
    from opteq.common import files as _files
    from opteq.training.step import StepRunner

    if signal.getsignal(number) is signal.SIG_IGN:  # the tests run under nohup
        signal.signal(number, signal.SIG_DFL)
    moments = 0

    def moment() -> None:
        nonlocal moments
        moments += 1
        if moments == event:
            os.kill(os.getpid(), number)

    def surrounded(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            moment()
            result = function(*arguments, **options)
            moment()
            return result

        return wrapped

    class HalfWritten:
        """A file whose content reaches the disk in two halves, with a moment in between."""

        def __init__(self, path: Path, mode: str) -> None:
            self.file = open(path, mode)  # noqa: SIM115

        def __enter__(self) -> HalfWritten:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def write(self, content: bytes) -> None:
            self.file.write(content[: len(content) // 2])
            self.file.flush()
            moment()
            self.file.write(content[len(content) // 2 :])

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    _files.open = HalfWritten  # type: ignore[attr-defined]
    os.fsync = surrounded(os.fsync)
    os.replace = surrounded(os.replace)
    StepRunner.step = surrounded(StepRunner.step)  # type: ignore[method-assign]
    train_here(root, out, more)


def train_as_rank(rank: int, world: int, port: int, root: str, out: str, more: list[str]) -> None:
    """One of several processes of a run, as `accelerate launch` or torchrun would have started it."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": "true",
    }
    train_here(root, out, more)


def read_stream(root: str, skip: int, out: str, wait_after: int = 0) -> None:
    """Write down the samples of an epoch, a line a batch; after ``wait_after`` of them, wait to be killed."""
    from opteq import data

    dataset = data.load("folder", root, stream=True, workers=2)
    batches = data.Batches(dataset.train, (0,) * 3, (1,) * 3, 2, shuffle=True, seed=5)
    with open(out, "a") as file:
        for number, (images, _) in enumerate(batches.epoch(4, skip=skip), start=1):
            print(json.dumps([round(float(pixel) * 255) for pixel in images[:, 0, 0, 0]]), file=file, flush=True)
            if number == wait_after:
                time.sleep(300)


def decode_beside_another(root: str, folder: str) -> None:
    """Load images that nobody has decoded, once another process has seen that, too; say how often this one did."""
    from opteq import data
    from opteq.data import cache

    decoded = 0
    look, write = cache.open_entry, cache.write_entry

    def look_and_wait_for_the_other(*arguments: Any) -> Any:
        found = look(*arguments)
        Path(folder, f"looked-{os.getpid()}").touch()
        while len(list(Path(folder).glob("looked-*"))) < 2:
            time.sleep(0.01)
        return found

    def write_slowly(*arguments: Any) -> None:
        nonlocal decoded
        decoded += 1
        time.sleep(0.3)
        write(*arguments)

    cache.open_entry, cache.write_entry = look_and_wait_for_the_other, write_slowly
    dataset = data.load("folder", root, cache=folder)
    Path(folder, f"result-{os.getpid()}").write_text(json.dumps([decoded, dataset.train.images.sum().item()]))


def normalise_as_rank(rank: int, folder: str) -> None:
    """Train one step of batch normalisations on a third or on two thirds of six samples; keep all that came out."""
    import torch
    import torch.distributed as dist

    from opteq.training.optim.sync_batch_norm import convert_sync_batch_norm

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    norms, batches = batch_norms()
    convert_sync_batch_norm(norms, torch.device("cpu"))
    shares = [x[:2] if rank == 0 else x[2:] for x in batches]
    torch.save(normalised(norms, shares), f"{folder}/rank-{rank}")
    dist.barrier()
    os._exit(0)


def batch_norms() -> tuple[Any, list[Any]]:
    """Batch normalisations of one to three dimensions, and a batch for each."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    norms = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.BatchNorm3d(3, affine=False)])
    return norms, [1 + torch.randn(6, 3, *sides) for sides in ((), (5,), (4, 5), (2, 3, 4))]


def normalised(norms: Any, batches: list[Any]) -> list[Any]:
    """Of each: its output, the gradient of its input, and its running averages."""
    found = []
    for norm, x in zip(norms, batches, strict=True):
        y = norm(x.requires_grad_())
        y.pow(3).sum().backward()
        found.append([y.detach(), x.grad, norm.running_mean, norm.running_var])
    return found
