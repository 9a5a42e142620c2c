"""A trained model on the pictures that it was not trained with."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn

from opteq import data, models
from opteq.analysis import PGD
from opteq.common.errors import UserError
from opteq.common.files import draft, plain_errors, write_atomically
from opteq.data import Batches, Dataset, Split
from opteq.gradients import Unrolled
from opteq.models import equilibria
from opteq.solvers import SAM
from opteq.training.devices import Accelerator, engine
from opteq.training.input_size import check_size
from opteq.training.metrics import Counts, Tally
from opteq.training.recipe.sections import AdversarySection, Recipe, fraction
from opteq.training.run.folder import RunFolder
from opteq.training.validation import measure

PATIENCE = 500
"""Solver steps allowed where a tolerance is asked for and no number of steps: enough not to be what ends a solve."""


def evaluate(
    run: str | Path,
    tol: float | None = None,
    max_steps: int | None = None,
    device: str = "auto",
    precision: str | None = None,
    root: str | None = None,
    attack: float | str | None = None,
    attack_steps: int | None = None,
    attack_step_size: float | str | None = None,
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
        attack: test once more on pictures that are attacked by up to this, in units where pixels go from 0 to 1; a
            text such as ``"8/255"`` will do. By default as the recipe trained (its ``[adversary]``), 0 for not at all.
            The attack is :class:`opteq.analysis.PGD`, solved and differentiated like everything else here.
        attack_steps: its gradients; the recipe's ``adversary.test_steps`` by default.
        attack_step_size: how far each step goes; 2.5 attack / attack_steps by default.

    Returns:
        ``test_accuracy`` and ``test_top5`` (0..1), ``test_loss``, ``samples``, ``solver_steps`` (mean), and over all
        test samples ``worst_residual``, ``mean_residual`` and ``converged`` (share), with the settings. With an attack
        also ``test_robust_accuracy``, ``test_robust_loss`` and ``attack``, its settings; where the data set has unseen
        kinds, ``unseen_accuracy`` and ``unseen_loss``. Where every pixel has a class, ``test_accuracy`` is that of
        pixels, and instead of ``test_top5`` there are ``test_iou``, the mean over classes of intersection over union,
        and ``test_class_accuracy``, the mean over classes of accuracy.
    """
    folder = RunFolder(Path(run))
    recipe = folder.recipe()
    if not (folder.path / "model.safetensors").exists():
        raise UserError(f"{folder.path} holds no finished run: go on with `opteq train --resume --out {folder.path}`")
    if tol is not None and not tol > 0:
        raise UserError(f"tol should be a positive number; got {tol}")
    pgd = _attack(recipe.adversary, attack, attack_steps, attack_step_size)
    exact = tol is not None
    precision = precision or ("no" if exact else recipe.train.precision)
    accelerator = engine(device, precision, recipe.train.tf32 and not exact, recipe.train.threads)
    model = models.from_pretrained(folder.path)
    set_solvers(model, tol, max_steps)
    root = recipe.data.root if root is None else root
    pictures = data.load(recipe.data.name, root=root, cache=recipe.data.cache, image_size=recipe.data.image_size)
    if pictures.test.dense and pgd is not None:
        raise UserError("--attack: attacks are on the classes of pictures, and this data set has those of pixels")
    _check_classes(pictures.classes, model.config["extra"].get("classes", pictures.classes))
    settings = {"tol": tol, "max_steps": max_steps, "precision": precision, "device": str(accelerator.device)}
    target = folder.path / "evaluation.json"
    writing = partial(
        plain_errors, f"writing the evaluation of {folder.path}", "make room, or evaluate a copy of the run elsewhere"
    )
    if accelerator.is_main_process:
        # Before hours are spent: a run that others keep may be there to be read alone.
        with writing(), draft(target, b"can this be written?"):
            pass
    result = _Examination(model, recipe, pictures, accelerator).result(pgd, settings)
    if accelerator.is_main_process:
        with writing():
            write_atomically(target, (json.dumps(_as_json(result), indent=2) + "\n").encode())
    return result


def _as_json(result: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: where a figure is not finite the file has null, as ``metrics.jsonl`` has."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in result.items()
    }


class _Examination:
    """A model before pictures: what it gets right among them, and among attacked ones."""

    def __init__(self, model: models.Classifier, recipe: Recipe, pictures: Dataset, accelerator: Accelerator) -> None:
        self.extra = model.config["extra"]
        self.model = accelerator.prepare_model(model, evaluation_mode=True)
        self.recipe, self.pictures, self.accelerator = recipe, pictures, accelerator

    def result(self, attack: PGD | None, settings: dict[str, Any]) -> dict[str, Any]:
        """The figures of all that can be tested, with the ``settings`` behind those of the test pictures."""
        pictures = self.pictures
        result = {**_figures(self.counts(pictures.test), pictures.test.dense), **settings}
        if pictures.unseen is not None:
            unseen = self.counts(pictures.unseen)
            result |= {"unseen_accuracy": unseen.accuracy, "unseen_loss": unseen.mean_loss}
        if attack is not None:
            robust = self.counts(pictures.test, attack)
            norm = self.recipe.adversary.norm
            result |= {
                "test_robust_accuracy": robust.accuracy,
                "test_robust_loss": robust.mean_loss,
                "attack": {**dataclasses.asdict(attack), "step_size": attack.length, "norm": norm},
            }
        return result

    def counts(self, split: Split, attack: PGD | None = None) -> Counts:
        """What the model gets right in a part of the data set, attacked or not, over all processes."""
        accelerator, dense = self.accelerator, self.pictures.test.dense
        # Colours are normalised as they were in training: pictures under another root have another mean.
        batches = Batches(
            split,
            self.extra.get("mean", self.pictures.mean),
            self.extra.get("std", self.pictures.std),
            self.recipe.train.test_batch_size,
            device=accelerator.device,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
            empty_shares=True,
            num_classes=len(self.pictures.classes),
        )
        check_size(self.model, batches)
        classes = batches.num_classes if dense else None
        tally = Tally(accelerator.device, self.recipe.guard.residual, with_top5=not dense, classes=classes)
        measure(self.model, batches, tally, attack=attack)
        return tally.read(accelerator)


def _check_classes(found: Sequence[str], trained_on: Sequence[str]) -> None:
    if list(found) != list(trained_on):
        raise UserError(
            f"the pictures have the classes {', '.join(found)}, but the model was trained on "
            f"{', '.join(trained_on)}; give the right ones with --root"
        )


def _figures(counts: Counts, dense: bool) -> dict[str, Any]:
    """What was counted, by the names of ``evaluation.json``."""
    if dense:
        finer = {"test_iou": counts.mean_iou, "test_class_accuracy": counts.class_accuracy}
    else:
        finer = {"test_top5": counts.top5 / max(counts.samples, 1)}
    return {
        "test_accuracy": counts.accuracy,
        **finer,
        "test_loss": counts.mean_loss,
        "samples": int(counts.samples),
        "solver_steps": counts.mean_steps,
        "worst_residual": counts.worst,
        "mean_residual": counts.residual / max(counts.solves, 1),
        "converged": counts.converged_share,
    }


def _attack(
    options: AdversarySection, epsilon: float | str | None, steps: int | None, step_size: float | str | None
) -> PGD | None:
    """The recipe's attack on test pictures, with what the caller wants otherwise."""
    given = {"epsilon": fraction(epsilon), "test_steps": steps, "test_step_size": fraction(step_size)}
    if given["epsilon"] == 0:
        return None
    if epsilon is None and options.epsilon == 0:
        if steps is not None or step_size is not None:
            raise UserError("the run was not trained with an adversary: say how far to attack, such as --attack 8/255")
        return None
    if epsilon is not None or steps is not None:
        # A step size belongs to the ball and the number of steps that it was chosen for.
        options = options.model_copy(update={"test_step_size": None})
    wanted = {name: value for name, value in given.items() if value is not None}
    try:
        return AdversarySection.model_validate({**options.model_dump(), **wanted}).testing()
    except ValidationError as error:
        first = error.errors()[0]
        name = {"epsilon": "--attack", "test_steps": "--attack-steps", "test_step_size": "--attack-step-size"}
        reason = first["msg"].replace("Input should", "it should")
        raise UserError(f"{name[str(first['loc'][0])]} {first['input']} is not right: {reason}") from None


def set_solvers(model: nn.Module, tol: float | None, max_steps: int | None) -> None:
    """Give every equilibrium layer another tolerance or number of steps; None keeps what it has."""
    for _, layer in equilibria(model):
        changes: dict[str, Any] = {}
        if tol is not None:
            changes["tol"] = tol
            changes["max_steps"] = max(layer.solver.max_steps, PATIENCE)
        if max_steps is not None:
            changes["max_steps"] = max_steps
            if isinstance(layer.solver, SAM):  # of which the same share are the plain ones at the end
                changes["polish"] = layer.solver.polish * max_steps // layer.solver.max_steps
        if changes:
            layer.solver = dataclasses.replace(layer.solver, **changes)
            if isinstance(layer.gradient, Unrolled):  # which has the last word on the number of steps
                layer.gradient = dataclasses.replace(layer.gradient, steps=changes["max_steps"])
