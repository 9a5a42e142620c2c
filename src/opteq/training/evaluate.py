"""Evaluation of a trained model on its test images."""

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
from opteq.training.certified import CertifiedShare
from opteq.training.devices import Accelerator, make_accelerator
from opteq.training.input_size import check_input_size
from opteq.training.metrics import Metrics, RunningMetrics
from opteq.training.recipe.sections import AdversarySection, Recipe, fraction
from opteq.training.run.folder import RunFolder
from opteq.training.validation import validate

MAX_STEPS = 500
"""Default of ``max_steps`` where a tolerance is given: large enough that the tolerance ends the solve."""


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
    """Test the model of a finished run on all test images, and write ``evaluation.json`` beside it.

    Args:
        run: the run's folder.
        tol: solve every equilibrium to this relative residual instead of the model's own. If the accuracy stays the
            same, it does not depend on where the solver stopped.
        max_steps: maximal number of solver steps; with ``tol``, 500 by default.
        device: ``auto``, ``cpu`` or ``cuda``.
        precision: the recipe's by default; with ``tol``, float32 without TensorFloat-32, since rounding limits the
            residual to about 1e-2 in bfloat16 and 1e-3 in TensorFloat-32.
        root: folder of the images, if it differs from the recipe's.
        attack: also test under a :class:`opteq.analysis.PGD` attack of this radius, for pixels in 0..1; a number or a
            fraction such as ``"8/255"``. By default the recipe's ``[adversary]``; 0 for no attack.
        attack_steps: steps of the attack; the recipe's ``adversary.test_steps`` by default.
        attack_step_size: length of a step; 2.5 attack / attack_steps by default.

    Returns:
        ``test_accuracy`` and, with more than five classes, ``test_top5`` (0..1), ``test_loss``, ``samples``,
        ``solver_steps`` (mean), and over all test samples ``worst_residual``, ``mean_residual``, ``converged``
        (share) and ``certified`` (the share that
        converged to an equilibrium which is certified, by the weights or at the point, see
        :class:`~opteq.training.certified.CertifiedShare`; None where unknown), with the settings. With an attack
        also ``test_robust_accuracy``, ``test_robust_loss`` and ``attack``, its settings; for data sets with unseen
        sub-classes ``unseen_accuracy`` and ``unseen_loss``. For segmentation ``test_accuracy`` is the accuracy of
        pixels, and ``test_iou`` (mean intersection over union) and ``test_class_accuracy`` (mean over classes) replace
        ``test_top5``.
    """
    folder = RunFolder(Path(run))
    recipe = folder.recipe()
    if not isinstance(recipe, Recipe):
        raise UserError(f"{folder.path} holds a denoiser: use opteq.training.denoising.evaluate")
    if not (folder.path / "model.safetensors").exists():
        raise UserError(
            f"{folder.path} holds no finished run: continue with `opteq train --resume --out {folder.path}`"
        )
    if tol is not None and not tol > 0:
        raise UserError(f"tol should be a positive number; got {tol}")
    pgd = _attack(recipe.adversary, attack, attack_steps, attack_step_size)
    exact = tol is not None
    precision = precision or ("no" if exact else recipe.train.precision)
    accelerator = make_accelerator(device, precision, recipe.train.tf32 and not exact, recipe.train.threads)
    model = models.from_pretrained(folder.path)
    set_solvers(model, tol, max_steps)
    dataset = data.load(**recipe.data.arguments(root), test_only=True)
    if dataset.test.dense and pgd is not None:
        raise UserError("--attack: attacks need a classifier of images, and this data set is for segmentation")
    _check_classes(dataset.classes, model.config["extra"].get("classes", dataset.classes))
    settings = {"tol": tol, "max_steps": max_steps, "precision": precision, "device": str(accelerator.device)}
    target = folder.path / "evaluation.json"
    writing = partial(
        plain_errors, f"writing the evaluation of {folder.path}", "make room, or evaluate a copy of the run elsewhere"
    )
    if accelerator.is_main_process:
        # Before hours are spent: the folder may be read-only.
        with writing(), draft(target, b"can this be written?"):
            pass
    result = _Evaluation(model, recipe, dataset, accelerator).result(pgd, settings)
    if accelerator.is_main_process:
        with writing():
            write_atomically(target, (json.dumps(_as_json(result), indent=2) + "\n").encode())
    return result


def _as_json(result: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: values that are not finite become null, as in ``metrics.jsonl``."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in result.items()
    }


class _Evaluation:
    """Metrics of a model on the splits of a data set, attacked or not."""

    def __init__(self, model: models.Classifier, recipe: Recipe, dataset: Dataset, accelerator: Accelerator) -> None:
        self.extra = model.config["extra"]
        self.model = accelerator.prepare_model(model, evaluation_mode=True)
        self.recipe, self.dataset, self.accelerator = recipe, dataset, accelerator

    def result(self, attack: PGD | None, settings: dict[str, Any]) -> dict[str, Any]:
        """The metrics of the test split with the ``settings``, then of the unseen split and under attack."""
        dataset = self.dataset
        certified = CertifiedShare(self.accelerator.unwrap_model(self.model), self.accelerator.device)
        with certified.watching():
            counts = self.counts(dataset.test)
        share = {"certified": certified.share(self.accelerator)}
        figures = _figures(counts, dataset.test.dense)
        if len(dataset.classes) <= 5:  # all classes are among the first five
            figures.pop("test_top5", None)
        result = {**figures, **share, **settings}
        if dataset.unseen is not None:
            unseen = self.counts(dataset.unseen)
            result |= {"unseen_accuracy": unseen.accuracy, "unseen_loss": unseen.mean_loss}
        if attack is not None:
            robust = self.counts(dataset.test, attack)
            norm = self.recipe.adversary.norm
            result |= {
                "test_robust_accuracy": robust.accuracy,
                "test_robust_loss": robust.mean_loss,
                "attack": {**dataclasses.asdict(attack), "step_size": attack.length, "norm": norm},
            }
        return result

    def counts(self, split: Split, attack: PGD | None = None) -> Metrics:
        """Metrics of one split, attacked or not, over all processes."""
        accelerator, dense = self.accelerator, self.dataset.test.dense
        # Mean and std are those of training: images under another root may have others.
        batches = Batches(
            split,
            self.extra.get("mean", self.dataset.mean),
            self.extra.get("std", self.dataset.std),
            self.recipe.train.test_batch_size,
            device=accelerator.device,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
            empty_shares=True,
            num_classes=len(self.dataset.classes),
        )
        check_input_size(self.model, batches)
        classes = batches.num_classes if dense else None
        metrics = RunningMetrics(accelerator.device, self.recipe.guard.residual, with_top5=not dense, classes=classes)
        validate(self.model, batches, metrics, attack=attack)
        return metrics.compute(accelerator)


def _check_classes(found: Sequence[str], trained_on: Sequence[str]) -> None:
    if list(found) != list(trained_on):
        raise UserError(
            f"the images have the classes {', '.join(found)}, but the model was trained on "
            f"{', '.join(trained_on)}; give the right ones with --root"
        )


def _figures(counts: Metrics, dense: bool) -> dict[str, Any]:
    """The metrics under the names of ``evaluation.json``."""
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
    """The recipe's attack on test images, changed by the caller's options."""
    given = {"epsilon": fraction(epsilon), "test_steps": steps, "test_step_size": fraction(step_size)}
    if given["epsilon"] == 0:
        return None
    if epsilon is None and options.epsilon == 0:
        if steps is not None or step_size is not None:
            raise UserError(
                "the run was not trained with an adversary: give the radius of the attack, such as --attack 8/255"
            )
        return None
    if epsilon is not None or steps is not None:
        # A step size belongs to the radius and the number of steps that it was chosen for.
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
    """Set tolerance and maximal number of steps of every equilibrium layer; None leaves them unchanged.

    A model without feedback is a feed-forward network, which neither of them would leave what it is: it stays as it is.
    """
    config = getattr(model, "config", {})
    if config.get("options", {}).get("feedback", "equilibrium") != "equilibrium":
        return
    for _, layer in equilibria(model):
        changes: dict[str, Any] = {}
        if tol is not None:
            changes["tol"] = tol
            changes["max_steps"] = max(layer.solver.max_steps, MAX_STEPS)
        if max_steps is not None:
            changes["max_steps"] = max_steps
            if isinstance(layer.solver, SAM):  # keep the share of plain steps at the end
                changes["polish"] = layer.solver.polish * max_steps // layer.solver.max_steps
        if changes:
            layer.solver = dataclasses.replace(layer.solver, **changes)
            if isinstance(layer.gradient, Unrolled):  # which sets the number of steps itself
                layer.gradient = dataclasses.replace(layer.gradient, steps=changes["max_steps"])
