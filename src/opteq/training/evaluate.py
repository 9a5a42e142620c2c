"""A trained model on the pictures that it was not trained with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from torch import nn

from opteq import data, models
from opteq._errors import UserError
from opteq._files import plain_errors, write_atomically
from opteq.data import Batches
from opteq.models import equilibria
from opteq.training.devices import engine
from opteq.training.measure import measure
from opteq.training.run_folder import RunFolder
from opteq.training.tally import Tally

PATIENCE = 500
"""Solver steps allowed where a tolerance is asked for and no number of steps: enough not to be what ends a solve."""


def evaluate(
    run: str | Path,
    tol: float | None = None,
    max_steps: int | None = None,
    device: str = "auto",
    precision: str | None = None,
    root: str | None = None,
) -> dict[str, Any]:
    """Test the model of a finished run on all test pictures, and write ``evaluation.json`` beside it.

    Args:
        run: the run's folder.
        tol: solve every equilibrium to this relative residual instead of the model's own. What a network says should
            not depend on where its solver stopped: accuracies that agree are the evidence.
        max_steps: solver steps at most; with ``tol``, 500 by default.
        device: ``auto``, ``cpu`` or ``cuda``.
        precision: the recipe's by default; with ``tol``, full precision: a solve cannot be finer than its numbers, and
            bfloat16 ends near 1e-2, TensorFloat-32 near 1e-3.
        root: where the pictures are now, if not where the recipe says.

    Returns:
        ``test_accuracy`` and ``test_top5`` (0..1), ``test_loss``, ``samples``, ``solver_steps`` (mean), and over all
        test samples ``worst_residual``, ``mean_residual`` and ``converged`` (share), with the settings.
    """
    folder = RunFolder(Path(run))
    recipe = folder.recipe()
    if not (folder.path / "model.safetensors").exists():
        raise UserError(f"{folder.path} holds no finished run: go on with `opteq train --resume --out {folder.path}`")
    if tol is not None and not tol > 0:
        raise UserError(f"tol should be a positive number; got {tol}")
    exact = tol is not None
    precision = precision or ("no" if exact else recipe.train.precision)
    accelerator = engine(device, precision, recipe.train.tf32 and not exact, recipe.train.threads)
    model = models.from_pretrained(folder.path)
    set_solvers(model, tol, max_steps)
    root = recipe.data.root if root is None else root
    pictures = data.load(recipe.data.name, root=root, cache=recipe.data.cache, image_size=recipe.data.image_size)
    extra = model.config["extra"]
    trained_on = extra.get("classes", list(pictures.classes))
    if list(pictures.classes) != trained_on:
        raise UserError(
            f"the pictures have the classes {', '.join(pictures.classes)}, but the model was trained on "
            f"{', '.join(trained_on)}; give the right ones with --root"
        )
    wrapped = accelerator.prepare_model(model, evaluation_mode=True)
    # Colours are normalised as they were in training: pictures under another root have another mean.
    batches = Batches(
        pictures.test,
        extra.get("mean", pictures.mean),
        extra.get("std", pictures.std),
        recipe.train.test_batch_size,
        device=accelerator.device,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
    )
    tally = Tally(accelerator.device, recipe.guard.residual, with_top5=True)
    measure(wrapped, batches, tally)
    counts = tally.read(accelerator)
    result = {
        "test_accuracy": counts.accuracy,
        "test_top5": counts.top5 / max(counts.samples, 1),
        "test_loss": counts.mean_loss,
        "samples": int(counts.samples),
        "solver_steps": counts.mean_steps,
        "worst_residual": counts.worst,
        "mean_residual": counts.residual / max(counts.solves, 1),
        "converged": counts.converged_share,
        "tol": tol,
        "max_steps": max_steps,
        "precision": precision,
        "device": str(accelerator.device),
    }
    if accelerator.is_main_process:
        with plain_errors(f"writing the evaluation of {folder.path}", "make room, or choose another folder"):
            write_atomically(folder.path / "evaluation.json", (json.dumps(result, indent=2) + "\n").encode())
    return result


def set_solvers(model: nn.Module, tol: float | None, max_steps: int | None) -> None:
    """Give every equilibrium layer another tolerance or number of steps; None keeps what it has."""
    for _, layer in equilibria(model):
        changes: dict[str, Any] = {}
        if tol is not None:
            changes["tol"] = tol
            changes["max_steps"] = max(layer.solver.max_steps, PATIENCE)
        if max_steps is not None:
            changes["max_steps"] = max_steps
        if changes:
            layer.solver = dataclasses.replace(layer.solver, **changes)
