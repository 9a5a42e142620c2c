"""Unrolling against the implicit gradient: Table 8 of the OptEq paper, by one command."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from opteq.common.errors import UserError
from opteq.common.files import plain_errors, write_atomically
from opteq.training.evaluate import evaluate
from opteq.training.open_run import open_run
from opteq.training.optim.losses import cross_entropy
from opteq.training.recipe.files import load_recipe
from opteq.training.train import train

_TIMED = 3


def unrolling_table(
    recipe: str,
    overrides: Sequence[str],
    out: str | Path,
    steps: Sequence[int] = (5, 10, 20, 40),
    thresholds: Sequence[float] = (1e-3, 1e-2),
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Train a recipe once per row, and measure every row; a table that was interrupted continues.

    A row of K steps takes exactly K plain steps and differentiates through all of them. A row of a threshold solves to
    that relative residual by Anderson's method, and so the system of the implicit gradient.

    Args:
        recipe: name or file, of a model with one equilibrium layer.
        overrides: ``KEY=VALUE``, for all rows.
        out: a folder; every row has a run in it, and the table is written to its ``unrolling.json``.
        steps: the K.
        thresholds: of the implicit gradient.
        console: for progress output.

    Returns:
        Per row ``method``, ``test_accuracy``, ``mean_residual`` (relative, over all test images), and
        ``inference_seconds`` and ``backward_seconds`` for one batch of test images, medians of three.
    """
    for option, values in (("steps", steps), ("threshold", thresholds)):
        for value in values:  # refused before hours are spent
            if not 0 < value < math.inf:
                raise UserError(f"--{option} should be a positive finite number; got {value}")
    load_recipe(recipe, overrides)  # refused by itself before options are added
    rows = []
    chosen = [(f"unrolled-{k}", _unrolled(k)) for k in steps] + [(f"implicit-{t:g}", _implicit(t)) for t in thresholds]
    for name, options in chosen:
        folder = Path(out) / name
        loaded = load_recipe(recipe, [*overrides, *(f"model.options.{key}={value}" for key, value in options.items())])
        train(loaded, folder, resume=folder.exists(), console=console)
        metrics = evaluate(folder, device=loaded.train.device)
        measured = {key: metrics[key] for key in ("test_accuracy", "mean_residual", "solver_steps")}
        rows.append({"method": name, **measured, **_times(folder, loaded.train.device)})
    with plain_errors("writing the table", "then run this again: the rows are kept"):
        write_atomically(Path(out) / "unrolling.json", (json.dumps(rows, indent=2) + "\n").encode())
    return rows


def _unrolled(steps: int) -> dict[str, Any]:
    return {"solver": "picard", "tol": 0.0, "max_steps": steps, "gradient": "unrolled", "gradient_steps": steps}


def _implicit(threshold: float) -> dict[str, Any]:
    own = {"solver": "anderson", "tol": threshold, "max_steps": 100}
    return {**own, "gradient": "implicit", "gradient_tol": threshold, "gradient_steps": 100}


def _times(folder: Path, device: str) -> dict[str, float]:
    opened = open_run(folder, None, None, device, None, None)
    where = opened.accelerator.device
    batches = opened.batches(opened.dataset.test)
    images, labels = next(iter(batches.epoch(0)))
    model = opened.accelerator.unwrap_model(opened.model)

    def inference() -> None:
        with torch.no_grad():
            model.eval()(images)

    forward = _seconds(inference, where)
    model.train()
    seconds = []
    for _ in range(_TIMED + 1):
        loss = cross_entropy(model(images), labels)
        seconds.append(_once(loss.backward, where))
        model.zero_grad()
    return {"inference_seconds": forward, "backward_seconds": statistics.median(seconds[1:])}


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    return statistics.median([_once(work, device) for _ in range(_TIMED + 1)][1:])  # the first one warms up


def _once(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
