"""Train recipes side by side, and print their runs as a table: accuracy, time, memory, steps, corruptions, attacks.

    python benchmarks/comparators.py train --data DIR --out runs --epochs 30 --minutes 60     # again: continues
    python benchmarks/comparators.py time runs/*                                              # one alone at a time
    python benchmarks/comparators.py table runs/* --reference runs/cifar10-jpeg-resnet18

`train` starts a process for each recipe, at most `--jobs` at once, and measures what has finished under corruptions and
PGD. After `--minutes` every process gets SIGTERM: trainings save a checkpoint, and the same command continues them. A
log is OUT/<recipe>.log. `time` measures a training step of finished runs while nothing else runs; an epoch beside other
trainings takes longer. A cell of the table is empty where nothing was measured; an unfinished run has its last epoch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn import functional as F

from opteq import data, models
from opteq.analysis import PGD
from opteq.common.errors import UserError
from opteq.common.files import write_atomically
from opteq.data import Split
from opteq.training import Recipe, evaluate_robustness, load_recipe, recipes, train
from opteq.training.open_run import open_run
from opteq.training.robustness import random_rows, read_record, relative_errors
from opteq.training.run.checkpoints import Checkpoints
from opteq.training.validation import without_warnings

EVIDENCE = tuple(
    f"cifar10-jpeg-{name}"
    for name in (
        "resnet18", "opteq-199k", "mopteq-193k", "mopteq-0.48m", "geq-5m", "mdeq-200k", "mdeq-0.48m", "mdeq-2.5m",
        "mondeq-172k", "mondeq-854k", "neural-ode-172k", "augmented-neural-ode-172k", "extractor-199k",
        "extractor-0.48m", "extractor-5m",
    )
)  # fmt: skip
"""The rows of results/comparators.md."""
GRACE = 20.0
"""Seconds from SIGTERM to SIGKILL: a step, a checkpoint and the end of a process."""
STATISTICS = ("running_mean", "running_var", "batches_tracked")
"""Ends of the names of tensors that are not trained."""
EPSILON, STEPS = 8 / 255, 20
"""Of PGD."""
COLUMNS = (
    "run", "parameters", "epochs", "test accuracy", "unseen classes", "s per epoch", "ms per step, alone", "MiB",
    "steps", "worst residual", "corruptions, mean", "error / reference", f"PGD, 8/255, {STEPS} steps",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    side = commands.add_parser("train", help="train recipes side by side")
    side.add_argument("recipes", nargs="*", default=EVIDENCE, metavar="RECIPE", help="those of the evidence by default")
    side.add_argument("--data", metavar="DIR", help="folder with train/<class> and test/<class>")
    side.add_argument("--out", type=Path, required=True, help="folder of the runs and their logs")
    side.add_argument("--epochs", type=int, help="the recipes' own by default")
    side.add_argument("--batch", type=int, help="images of a step; learning rates grow by its root")
    side.add_argument("--minutes", type=float, help="stop everything after this; no limit by default")
    side.add_argument("--jobs", type=int, help="processes at once; all by default")
    side.add_argument("--images", type=int, default=1000, help="test images for corruptions and PGD; 0 measures none")
    side.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of all recipes")
    side.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # what the processes run
    alone = commands.add_parser("time", help="time a training step of finished runs, one alone at a time")
    alone.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    alone.add_argument("--steps", type=int, default=30)
    shown = commands.add_parser("table", help="print runs as a table")
    shown.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    shown.add_argument("--reference", type=Path, help="run that corruption errors are relative to")
    options = parser.parse_args()
    try:
        if options.command == "table":
            print(table(options.runs, options.reference))
        elif options.command == "time":
            for run in options.runs:
                time_steps(run, options.steps)
        elif options.one:
            train_one(options)
        else:
            _check(options)
            train_all(options)
    except UserError as error:
        parser.exit(2, f"comparators: {error}\n")


def _check(options: argparse.Namespace) -> None:
    for name, least in (("epochs", 1), ("batch", 1), ("jobs", 1), ("images", 0), ("minutes", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name} should be at least {least}; got {value}")
    known = recipes()
    for name in options.recipes:
        if name not in known:
            raise UserError(f"there is no recipe {name!r}: `opteq recipes` lists them")
    for dataset in {_recipe(name, options).data for name in options.recipes}:
        data.load(**dataset.arguments())  # decoded once, before processes wait for each other


def _overrides(name: str, options: argparse.Namespace) -> list[str]:
    """Keys of a recipe that change. Learning rates grow by the root of the batch, for SGD and AdamW alike."""
    epochs = [] if options.epochs is None else [f"train.epochs={options.epochs}"]
    root = [] if options.data is None else [f"data.root={options.data}"]
    batch = []
    if options.batch is not None:
        usual = load_recipe(name)
        rate = usual.optimizer.lr * math.sqrt(options.batch / usual.train.batch_size)
        batch = [f"train.batch_size={options.batch}", f"optimizer.lr={rate:.4g}"]
    return [*epochs, *root, *batch, *options.set]


def _recipe(name: str, options: argparse.Namespace) -> Recipe:
    return load_recipe(name, _overrides(name, options))


# ---- training ----


class Job:
    """One recipe's process: training, then measurements."""

    def __init__(self, name: str, options: argparse.Namespace, threads: int) -> None:
        self.name, self.folder, self.log = name, options.out / name, options.out / f"{name}.log"
        command = [sys.executable, __file__, "train", name, "--one", "--out", str(options.out)]
        command += ["--images", str(options.images)]
        command += [word for key in _overrides(name, options) for word in ("--set", key)]
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        with self.log.open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        self.epochs = len(_epochs(self.folder))

    def report(self) -> bool:
        """Print epochs that are new; whether the process still runs."""
        ended = self.process.poll() is not None  # before the file is read: nothing comes after that
        lines = _epochs(self.folder)
        for line in lines[self.epochs :]:
            _say(f"{self.name}: epoch {line['epoch']}, {percent(line['test_accuracy'])}, {line['seconds']:.1f} s")
        self.epochs = max(self.epochs, len(lines))
        if ended:
            last = self.log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
            _say(f"{self.name}: ended with status {self.process.returncode}: {last.strip()}")
        return not ended


def train_all(options: argparse.Namespace) -> None:
    """Run every recipe's process until all have ended or time is up."""
    options.out.mkdir(parents=True, exist_ok=True)
    waiting, running = list(options.recipes), list[Job]()
    at_once = options.jobs or len(waiting)
    threads = max(1, (os.cpu_count() or 1) // min(at_once, len(waiting)))
    ends = float("inf") if options.minutes is None else time.monotonic() + 60 * options.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through `finally`
    try:
        while (waiting or running) and time.monotonic() < ends:
            while waiting and len(running) < at_once:
                running.append(Job(waiting.pop(0), options, threads))
            time.sleep(0.5)
            running = [job for job in running if job.report()]
    finally:
        for job in running:
            job.process.terminate()
        latest = time.monotonic() + GRACE
        for job in running:
            try:
                job.process.wait(max(0.0, latest - time.monotonic()))
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.process.wait()
            job.report()
    if waiting:
        _say(f"not started: {', '.join(waiting)}")
    names = [options.out / name for name in options.recipes if _epochs(options.out / name)]
    reference = options.out / "cifar10-jpeg-resnet18"
    print(table(names, reference if reference in names else None), flush=True)


def train_one(options: argparse.Namespace) -> None:
    """Train a recipe, or continue; then measure what was not measured yet."""
    (name,) = options.recipes
    run = options.out / name
    recipe = _recipe(name, options)
    if not (run / "model.safetensors").exists() or len(_epochs(run)) != recipe.train.epochs:
        try:
            train(recipe, run, resume=True)
        except RuntimeError as error:  # training failed, or a signal stopped it
            if (status := getattr(error, "exit_status", None)) is None:
                raise
            print(error, flush=True)
            sys.exit(status)
    if options.images:
        measure(run, options.images)
    print(f"done: {run}", flush=True)


def measure(run: Path, images: int) -> None:
    """PGD and corruptions on the same test images, each unless an earlier call measured it on as many."""
    if _read(run, "pgd").get("asked") != images:
        opened = open_run(run)
        split = opened.dataset.test
        if (rows := random_rows(len(split), images)) is not None:
            split = Split(split.images[rows], split.labels[rows])
        found = opened.counts(split, PGD(EPSILON, STEPS)).accuracy
        _write(run, "pgd", {"accuracy": found, "epsilon": EPSILON, "steps": STEPS, "asked": images})
        print(f"PGD: {percent(found)}", flush=True)
    if read_record(run).get("corruptions", {}).get("images") != images:
        evaluate_robustness(run, images=images, say=lambda line: print(line, flush=True))


def time_steps(run: Path, steps: int) -> None:
    """The median time of a training step at the trained weights: forward, backward and update of one batch."""
    if not (run / "model.safetensors").exists():
        _say(f"{run.name}: not finished, so it is not timed")
        return
    opened = open_run(run)
    device, precision, size = opened.accelerator.device, opened.recipe.train.precision, opened.recipe.train.batch_size
    batches = opened.batches(opened.dataset.test)
    batches.batch_size = size
    images, labels = next(iter(batches.epoch(0)))
    model = models.from_pretrained(run).to(device).train()
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = images.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)  # the weights stay where they are
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    taken = []
    with without_warnings(model):
        for _ in range(10 + steps):
            began = time.perf_counter()
            with torch.autocast(device.type, kind, enabled=kind is not None):
                loss = F.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(1e3 * (time.perf_counter() - began))
    found = statistics.median(taken[10:])
    _write(run, "alone", {"ms": found, "batch": len(labels), "steps": steps, "device": str(device)})
    _say(f"{run.name}: {found:.1f} ms for a training step of {len(labels)} images")


# ---- the table ----


def table(runs: Sequence[Path], reference: Path | None = None) -> str:
    """Runs as a Markdown table."""
    other = None if reference is None else read_record(reference).get("corruptions")
    lines = [f"| {' | '.join(COLUMNS)} |", f"|---|{'---:|' * (len(COLUMNS) - 1)}"]
    return "\n".join(lines + [f"| {' | '.join(row(run, other))} |" for run in runs])


def row(run: Path, reference: dict[str, Any] | None) -> list[str]:
    """One run, in the order of the columns."""
    epochs, corrupted = _epochs(run), read_record(run).get("corruptions", {})
    if not epochs:
        raise UserError(f"{run} has no finished epoch: `metrics.jsonl` is missing or empty")
    last, recipe = epochs[-1], load_recipe(run / "recipe.toml")
    solved = bool(last["test_solver_steps"])
    alone, attacked = _read(run, "alone").get("ms"), _read(run, "pgd").get("accuracy")
    of = "" if len(epochs) == recipe.train.epochs else f" of {recipe.train.epochs}"
    return [
        run.resolve().name,
        "" if (size := parameters(run)) is None else f"{size:,}",
        f"{len(epochs)}{of}",
        percent(last["test_accuracy"]),
        percent(last.get("unseen_accuracy")),
        f"{statistics.median(epoch['seconds'] for epoch in epochs):.1f}",
        "" if alone is None else f"{alone:.1f}",
        "" if last["peak_memory_mb"] is None else f"{max(epoch['peak_memory_mb'] for epoch in epochs):,.0f}",
        f"{last['test_solver_steps']:.1f}" if solved else "-",
        "-" if not solved else "infinite" if (worst := last["test_worst_residual"]) is None else f"{worst:.1e}",
        percent(corrupted.get("mean")),
        "" if not corrupted or reference is None else _relative(corrupted, reference),
        percent(attacked),
    ]


def parameters(run: Path) -> int | None:
    """How many numbers are trained, by the weights or the newest checkpoint: statistics of normalisations are not."""
    file = run / "model.safetensors"
    prefix = ""
    if not file.exists():
        if not (found := Checkpoints(run / "checkpoints").files()):
            return None
        file, prefix = found[0], "model."
    with safe_open(file, "pt") as tensors:
        names = [name for name in tensors.keys() if name.startswith(prefix)]  # noqa: SIM118
        trained = [name for name in names if not name.endswith(STATISTICS)]
        return sum(int(math.prod(tensors.get_slice(name).get_shape())) for name in trained)


def _relative(own: dict[str, Any], reference: dict[str, Any]) -> str:
    mean = relative_errors(own, reference)["mean"]
    return "" if mean is None else f"{mean:.3f}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


def _epochs(run: Path) -> list[dict[str, Any]]:
    try:
        text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _read(run: Path, name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((run / f"{name}.json").read_text(encoding="utf-8"))
    except OSError:
        return {}
    return found


def _write(run: Path, name: str, found: dict[str, Any]) -> None:
    write_atomically(run / f"{name}.json", (json.dumps(found) + "\n").encode())


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    main()
