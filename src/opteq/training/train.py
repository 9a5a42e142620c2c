"""From a recipe to a trained model in a folder."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from opteq import data, models
from opteq.common.errors import UserError
from opteq.common.files import plain_errors
from opteq.data import Batches, Dataset, Split
from opteq.models import Classifier
from opteq.training.adversary import Adversary
from opteq.training.devices import Accelerator, engine
from opteq.training.input_size import check_size
from opteq.training.optim.losses import Loss
from opteq.training.optim.optimizers import optimizer
from opteq.training.optim.sync_batch_norm import share_normalisation
from opteq.training.recipe.sections import Recipe
from opteq.training.run import environment, rng
from opteq.training.run.checkpoints import Checkpoints
from opteq.training.run.folder import RunFolder
from opteq.training.run.progress import ProgressDisplay
from opteq.training.run.records import Records
from opteq.training.run.signals import StopRequest
from opteq.training.step import Stepper
from opteq.training.trainer import Trainer
from opteq.training.validation import quiet


def train(recipe: Recipe, out: str | Path, resume: bool = False, console: Console | None = None) -> Path:
    """Train as the recipe says and leave everything in the folder ``out``.

    Args:
        recipe: from :func:`~opteq.training.load_recipe`.
        out: the run's folder; it must not hold a run, unless ``resume``.
        resume: go on from the newest whole checkpoint there, or begin where there is no checkpoint. Where there are
            some, but none is whole, the run is refused and they are left as they are. On a CPU the weights end up byte
            for byte as those of a run that was never interrupted.
        console: where progress is shown.

    Returns:
        The folder, with ``model.safetensors`` and ``config.json`` for :func:`opteq.models.from_pretrained`.

    Raises:
        UserError: something that the caller can mend, before training or when the disk is full.
        TrainingStopped: the loss or the equilibria were lost; the message says what to try.
        Interrupted: SIGTERM or Ctrl-C, after a checkpoint.
    """
    folder = RunFolder(Path(out))
    accelerator = engine(recipe.train.device, recipe.train.precision, recipe.train.tf32, recipe.train.threads)
    folder.check(recipe, resume)
    accelerator.wait_for_everyone()
    with folder.prepared() if accelerator.is_main_process else nullcontext():
        _run(recipe, folder, resume, accelerator, console)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return folder.path


def _run(recipe: Recipe, folder: RunFolder, resume: bool, accelerator: Accelerator, console: Console | None) -> None:
    pictures = data.load(
        recipe.data.name, root=recipe.data.root, cache=recipe.data.cache, image_size=recipe.data.image_size
    )
    rng.seed(recipe.train.seed)
    model = _model(recipe, pictures, accelerator)
    # From here on processes may draw different numbers: each has its own pictures.
    rng.seed(recipe.train.seed + accelerator.process_index)
    with quiet(model) as layers, Loss(recipe.loss, recipe.train.label_smoothing, model) as loss:
        wrapped, optimiser = accelerator.prepare(model, optimizer(recipe.optimizer, model))
        learn, test, unseen = _batches(recipe, pictures, accelerator)
        for batches in (learn, test):
            check_size(model, batches)
        attack = recipe.adversary.training()
        adversary = None if attack is None else Adversary(attack, learn)
        stepper = Stepper(wrapped, optimiser, loss, accelerator, recipe.train, adversary)
        trainer = Trainer(
            recipe, model, stepper, learn, test, Checkpoints(folder.checkpoints), accelerator, unseen=unseen
        )
        display = ProgressDisplay(recipe.train.epochs, len(trainer.train), accelerator.is_main_process, console)
        found = trainer.checkpoints.latest() if resume else None
        if found is not None:
            trainer.resume(found)
            ended = trainer.epoch >= recipe.train.epochs
            place = "had come to its end" if ended else f"goes on in epoch {trainer.epoch + 1}"
            display.say(f"{folder.path} {place}, after step {trainer.step}")
        full = "make room, then go on with --resume: the checkpoints are whole"
        with plain_errors(f"writing to {folder.path}", full), StopRequest(accelerator) as stop:
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
                model.save_pretrained(folder.path)


def _model(recipe: Recipe, pictures: Dataset, accelerator: Accelerator) -> Classifier:
    _check_task(recipe, pictures)
    channels = pictures.train.images.shape[1]
    # TOML has no empty value: "none" stands for one wherever an option is not a text anyway.
    usual = models.describe(recipe.model.name).options
    for name in ("name", "num_classes", "in_channels"):
        if name in recipe.model.options:
            where = "is model.name" if name == "name" else "is known from the data"
            raise UserError(f"model.options.{name} is no option: what it says {where}; leave it out")
    options = {
        name: None if value == "none" and not isinstance(usual.get(name), str) else value
        for name, value in recipe.model.options.items()
    }
    model = models.create(recipe.model.name, num_classes=len(pictures.classes), in_channels=channels, **options)
    model.config["extra"] = {
        **model.config.get("extra", {}),
        "recipe": recipe.name,
        "data": pictures.name,
        "classes": list(pictures.classes),
        "mean": list(pictures.mean),
        "std": list(pictures.std),
        "image_shape": list(pictures.train.images.shape[1:]),
    }
    if accelerator.num_processes > 1:
        share_normalisation(model, accelerator.device)
    if accelerator.device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.to(accelerator.device)


def _check_task(recipe: Recipe, pictures: Dataset) -> None:
    """Raise unless model and data agree about what has a class: a picture, or each of its pixels."""
    dense = pictures.train.dense
    if models.describe(recipe.model.name).dense != dense:
        says, has = ("every picture", "every pixel") if dense else ("every pixel", "every picture")
        fitting = next(name for name in models.list() if models.describe(name).dense == dense)
        raise UserError(
            f"the model {recipe.model.name!r} names a class for {says}, but the data set {recipe.data.name!r} has one "
            f"for {has}; take another model.name, such as {fitting}, or another data.name"
        )
    if dense and recipe.adversary.epsilon:
        raise UserError("adversary.epsilon: attacks are on classes of pictures, and this data set has those of pixels")


def _batches(recipe: Recipe, pictures: Dataset, accelerator: Accelerator) -> tuple[Batches, Batches, Batches | None]:
    """To learn from, to be tested with, and of kinds that training does not see, where the data set has such."""
    where: dict[str, Any] = {
        "device": accelerator.device,
        "rank": accelerator.process_index,
        "world": accelerator.num_processes,
        "channels_last": accelerator.device.type == "cuda",
        "num_classes": len(pictures.classes),
    }
    learn = Batches(
        pictures.train,
        pictures.mean,
        pictures.std,
        recipe.train.batch_size,
        augmentation=recipe.augmentation(),
        shuffle=True,
        seed=recipe.train.seed,
        drop_last=recipe.train.drop_last,
        **where,
    )

    def tested(split: Split) -> Batches:
        return Batches(split, pictures.mean, pictures.std, recipe.train.test_batch_size, empty_shares=True, **where)

    return learn, tested(pictures.test), None if pictures.unseen is None else tested(pictures.unseen)
