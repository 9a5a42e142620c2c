"""Train a model by a recipe into a run folder."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from opteq import data, engine, models
from opteq.common.errors import UserError
from opteq.common.files import plain_errors
from opteq.data import Batches, Dataset, Split
from opteq.models import Classifier, pretrained
from opteq.models.registry import default_options, is_dense
from opteq.training.adversary import Adversary
from opteq.training.devices import Accelerator, make_accelerator
from opteq.training.input_size import check_input_size
from opteq.training.optim.jacobian import RadiusLimit
from opteq.training.optim.losses import Loss
from opteq.training.optim.optimizers import optimizer
from opteq.training.optim.sync_batch_norm import convert_sync_batch_norm
from opteq.training.recipe.sections import Recipe
from opteq.training.run import environment, rng
from opteq.training.run.checkpoints import Checkpoints
from opteq.training.run.folder import RunFolder
from opteq.training.run.progress import ProgressDisplay
from opteq.training.run.records import Records
from opteq.training.run.signals import StopRequest
from opteq.training.step import StepRunner
from opteq.training.trainer import Trainer
from opteq.training.validation import without_warnings


def train(recipe: Recipe, out: str | Path, resume: bool = False, console: Console | None = None) -> Path:
    """Train by the recipe and write everything to the folder ``out``.

    Args:
        recipe: from :func:`~opteq.training.load_recipe`.
        out: the run's folder; it must not hold a run, unless ``resume``.
        resume: continue from the newest intact checkpoint, or start where there is none. If there are checkpoints but
            none is intact, the run is refused and they are left unchanged. On a CPU the final weights are bitwise equal
            to those of an uninterrupted run.
        console: for progress output.

    Returns:
        The folder, with ``model.safetensors`` and ``config.json`` for :func:`opteq.models.from_pretrained`.

    Raises:
        UserError: wrong options or data, or a full disk.
        TrainingStopped: the loss or the residuals diverged; the message says what to try.
        Interrupted: SIGTERM or Ctrl-C, after a checkpoint was saved.
    """
    folder = RunFolder(Path(out))
    accelerator = make_accelerator(recipe.train.device, recipe.train.precision, recipe.train.tf32, recipe.train.threads)
    folder.check(recipe, resume)
    accelerator.wait_for_everyone()
    # A resumed run traces its objective from its first call on, and so does every run.
    with engine.trace_at_once(), folder.prepared() if accelerator.is_main_process else nullcontext():
        _run(recipe, folder, resume, accelerator, console)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return folder.path


def _run(recipe: Recipe, folder: RunFolder, resume: bool, accelerator: Accelerator, console: Console | None) -> None:
    dataset = data.load(**recipe.data.arguments())
    rng.seed(recipe.train.seed)
    model = _model(recipe, dataset, accelerator)
    # From here on processes draw different random numbers.
    rng.seed(recipe.train.seed + accelerator.process_index)
    options = recipe.train
    made = Loss(recipe.loss, options.label_smoothing, model, options.jacobian, options.jacobian_limit)
    radius = None if options.radius is None else RadiusLimit(model, options.radius, recipe.guard.residual)
    with without_warnings(model) as layers, made as loss, nullcontext() if radius is None else closing(radius):
        wrapped, optimiser = accelerator.prepare(model, optimizer(recipe.optimizer, model))
        train_batches, test, unseen = _batches(recipe, dataset, accelerator)
        for batches in (train_batches, test):
            check_input_size(model, batches)
        attack = recipe.adversary.training()
        adversary = None if attack is None else Adversary(attack, train_batches)
        step_runner = StepRunner(wrapped, optimiser, loss, accelerator, recipe.train, adversary, radius)
        trainer = Trainer(
            recipe, model, step_runner, train_batches, test, Checkpoints(folder.checkpoints), accelerator, unseen=unseen
        )
        display = ProgressDisplay(recipe.train.epochs, len(trainer.train), accelerator.is_main_process, console)
        checkpoint = trainer.checkpoints.latest() if resume else None
        if resume and checkpoint is None and folder.recipe_file.exists():
            display.say(f"{folder.path} has no checkpoint: training begins again")
        if checkpoint is not None:
            trainer.resume(checkpoint)
            ended = trainer.epoch >= recipe.train.epochs
            place = "had finished" if ended else f"continues in epoch {trainer.epoch + 1}"
            display.say(f"{folder.path} {place}, after step {trainer.step}")
        with plain_errors(f"training in {folder.path}", trainer.checkpoints.remedy), StopRequest(accelerator) as stop:
            records = None
            if accelerator.is_main_process:
                folder.describe(recipe, environment.describe(accelerator))
                records = Records(folder.path, trainer.history)
            try:
                with display:
                    trainer.run(layers, records, display, stop)
            finally:
                if records is not None:
                    records.close()
            if accelerator.is_main_process:
                # Made by its name and options, whatever its own code has kept in attributes since.
                pretrained.save(model, model.config, folder.path)


def _model(recipe: Recipe, dataset: Dataset, accelerator: Accelerator) -> Classifier:
    _check_task(recipe, dataset)
    channels = dataset.train.images.shape[1]
    # TOML has no null: "none" stands for it where an option is not a string.
    usual = default_options(recipe.model.name)
    for name in ("name", "num_classes", "in_channels"):
        if name in recipe.model.options:
            where = "model.name" if name == "name" else "the data"
            raise UserError(f"model.options.{name} is not an option: its value comes from {where}; remove it")
    options: dict[str, Any] = {
        name: None if value == "none" and not isinstance(usual.get(name), str) else value
        for name, value in recipe.model.options.items()
    }
    model: Classifier = models.create(
        recipe.model.name, num_classes=len(dataset.classes), in_channels=channels, **options
    )
    model.config["extra"] = {
        **model.config.get("extra", {}),
        "recipe": recipe.name,
        "data": dataset.name,
        "classes": list(dataset.classes),
        "mean": list(dataset.mean),
        "std": list(dataset.std),
        "image_shape": list(dataset.train.images.shape[1:]),
    }
    if accelerator.num_processes > 1:
        convert_sync_batch_norm(model, accelerator.device)
    if accelerator.device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.to(accelerator.device)


def _check_task(recipe: Recipe, dataset: Dataset) -> None:
    """Raise unless model and data are both for classification or both for segmentation."""
    dense = dataset.train.dense
    if is_dense(recipe.model.name) != dense:
        task, other = ("segmentation", "classification") if dense else ("classification", "segmentation")
        fitting = next(name for name in models.list() if is_dense(name) == dense)
        raise UserError(
            f"the data set {recipe.data.name!r} is for {task}, but the model {recipe.model.name!r} is for {other}; "
            f"choose another model.name, such as {fitting}, or another data.name"
        )
    if dense and recipe.adversary.epsilon:
        raise UserError("adversary.epsilon: attacks need a classifier of images, and this data set is for segmentation")


def _batches(recipe: Recipe, dataset: Dataset, accelerator: Accelerator) -> tuple[Batches, Batches, Batches | None]:
    """Batches of the training split, of the test split and, where there is one, of the unseen split."""
    where: dict[str, Any] = {
        "device": accelerator.device,
        "rank": accelerator.process_index,
        "world": accelerator.num_processes,
        "channels_last": accelerator.device.type == "cuda",
        "num_classes": len(dataset.classes),
    }
    train = Batches(
        dataset.train,
        dataset.mean,
        dataset.std,
        recipe.train.batch_size,
        augmentation=recipe.augmentation(),
        shuffle=True,
        seed=recipe.train.seed,
        drop_last=recipe.train.drop_last,
        **where,
    )

    def tested(split: Split) -> Batches:
        return Batches(split, dataset.mean, dataset.std, recipe.train.test_batch_size, empty_shares=True, **where)

    return train, tested(dataset.test), None if dataset.unseen is None else tested(dataset.unseen)
