"""A finished run, opened for evaluation: model, recipe, data and device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from opteq import data, models
from opteq.common.errors import UserError
from opteq.common.files import draft, write_atomically
from opteq.data import Batches, Dataset, Split
from opteq.data.progress import progress
from opteq.gradients import Unrolled
from opteq.models import equilibria
from opteq.solvers import SAM
from opteq.training.adversary import Attack
from opteq.training.devices import Accelerator, make_accelerator
from opteq.training.input_size import check_input_size
from opteq.training.metrics import Metrics, RunningMetrics
from opteq.training.recipe.sections import Recipe
from opteq.training.run.folder import RunFolder, writing_evaluation
from opteq.training.validation import Change, validate

MAX_STEPS = 500
"""Default of ``max_steps`` where a tolerance is given: large enough that the tolerance ends the solve."""


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A trained model with the test images of its run.

    Attributes:
        path: the run's folder.
        model: on its device, in evaluation mode.
        recipe: of the run.
        dataset: its data, of which the test split is there.
        accelerator: device, precision and processes.
        settings: ``tol``, ``max_steps``, ``precision`` and ``device``, for the record.
        extra: what training saved beside the weights.
    """

    path: Path
    model: models.Classifier
    recipe: Recipe
    dataset: Dataset
    accelerator: Accelerator
    settings: dict[str, Any]
    extra: dict[str, Any]

    def batches(self, split: Split) -> Batches:
        """Batches of a split, normalised by mean and std of training: images under another root may have others."""
        batches = Batches(
            split,
            self.extra.get("mean", self.dataset.mean),
            self.extra.get("std", self.dataset.std),
            self.recipe.train.test_batch_size,
            device=self.accelerator.device,
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
            empty_shares=True,
            num_classes=len(self.dataset.classes),
        )
        check_input_size(self.model, batches)
        return batches

    def counts(self, split: Split, attack: Attack | None = None, change: Change | None = None) -> Metrics:
        """Metrics of one split over all processes, its images changed or attacked, or as they are."""
        accelerator, dense, batches = self.accelerator, self.dataset.test.dense, self.batches(split)
        classes = batches.num_classes if dense else None
        metrics = RunningMetrics(accelerator.device, self.recipe.guard.residual, with_top5=not dense, classes=classes)
        with progress("evaluating", len(batches), accelerator.is_main_process) as advance:
            validate(self.model, batches, metrics, attack=attack, change=change, advance=advance)
        return metrics.compute(accelerator)

    def check_writable(self, name: str) -> None:
        """Raise before hours are spent where the file can't be written, in a folder that is read-only for instance."""
        if self.accelerator.is_main_process:
            with writing_evaluation(self.path), draft(self.path / name, b"can this be written?"):
                pass

    def write(self, name: str, content: str) -> None:
        """Write a text file into the run's folder; the first process does."""
        if self.accelerator.is_main_process:
            with writing_evaluation(self.path):
                write_atomically(self.path / name, content.encode())


def open_run(
    run: str | Path,
    tol: float | None = None,
    max_steps: int | None = None,
    device: str = "auto",
    precision: str | None = None,
    root: str | None = None,
    batch_size: int | None = None,
) -> LoadedRun:
    """The run in a folder; the arguments are those of :func:`~opteq.training.evaluate`."""
    folder = RunFolder(Path(run))
    recipe = folder.recipe()
    if not isinstance(recipe, Recipe):
        raise UserError(f"{folder.path} holds a denoiser: use opteq.training.denoising.evaluate")
    folder.check_evaluation(tol)
    if batch_size is not None:
        if batch_size < 1:
            raise UserError(f"--batch-size should be at least 1; got {batch_size}")
        train = recipe.train.model_copy(update={"test_batch_size": batch_size})
        recipe = recipe.model_copy(update={"train": train})
    exact = tol is not None
    precision = precision or ("no" if exact else recipe.train.precision)
    accelerator = make_accelerator(device, precision, recipe.train.tf32 and not exact, recipe.train.threads)
    model = models.from_pretrained(folder.path)
    if (tol is not None or max_steps is not None) and not equilibria(model):
        raise UserError(f"--tol and --max-steps have no effect: {model.config['name']} has no equilibria")
    set_solvers(model, tol, max_steps)
    dataset = data.load(**recipe.data.arguments(root), test_only=True)
    extra = model.config["extra"]
    _check_classes(dataset.classes, extra.get("classes", dataset.classes))
    settings = {"tol": tol, "max_steps": max_steps, "precision": precision, "device": str(accelerator.device)}
    prepared: models.Classifier = accelerator.prepare_model(model, evaluation_mode=True)
    return LoadedRun(folder.path, prepared, recipe, dataset, accelerator, settings, extra)


def _check_classes(classes: Sequence[str], trained_on: Sequence[str]) -> None:
    if list(classes) != list(trained_on):
        raise UserError(
            f"the images have the classes {', '.join(classes)}, but the model was trained on "
            f"{', '.join(trained_on)}; give the right ones with --root"
        )


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
