"""The loop: epochs of steps, a test after each, checkpoints in between."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opteq.analysis import PGD
from opteq.common.errors import UserError
from opteq.common.files import plain_errors
from opteq.data import Batches
from opteq.equilibrium import Equilibrium
from opteq.models import Classifier
from opteq.training.devices import Accelerator
from opteq.training.guard import Interrupted, TrainingStopped, judge
from opteq.training.metrics import Counts, Tally
from opteq.training.optim.schedules import schedule
from opteq.training.recipe.sections import Recipe
from opteq.training.run import state
from opteq.training.run.checkpoints import Checkpoint, Checkpoints
from opteq.training.run.progress import ProgressDisplay
from opteq.training.run.records import Line, Records
from opteq.training.run.signals import StopRequest
from opteq.training.step import Stepper
from opteq.training.validation import measure


class Trainer:
    """A run in progress. Its position is ``epoch`` and ``batch`` (the next ones, from 0) and ``step``, all in one.

    Args:
        recipe: what to do.
        model: the classifier itself, which is tested and saved.
        stepper: takes steps of it.
        train: batches to learn from.
        test: batches to be tested with.
        checkpoints: where to save.
        accelerator: the engine.
        unseen: batches of a second test, where the data set has one.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Classifier,
        stepper: Stepper,
        train: Batches,
        test: Batches,
        checkpoints: Checkpoints,
        accelerator: Accelerator,
        unseen: Batches | None = None,
    ) -> None:
        self.recipe = recipe
        self.model = model
        self.stepper = stepper
        self.train = train
        self.test = test
        self.unseen = unseen
        self.checkpoints = checkpoints
        self.accelerator = accelerator
        self.factor = schedule(recipe.schedule, len(train), recipe.train.epochs)
        self.epoch = self.batch = self.step = 0
        self.history: list[Line] = []
        self.tally = self._new_tally()
        self.seconds = 0.0

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from where the checkpoint was made."""
        values = checkpoint.values
        if values["pictures"] != self.train.samples:
            raise UserError(
                f"the run was begun with {values['pictures']} training pictures, but there are {self.train.samples} "
                "now, so it cannot go on where it was; give the same ones, or another --out"
            )
        classes = self._classes()
        if values.get("classes", classes) != classes:  # checkpoints of earlier versions do not say
            raise UserError(
                f"the run was begun with the classes {', '.join(values['classes'])}, but the pictures have "
                f"{', '.join(classes)} now, which would be taken for each other; give the same ones, or another --out"
            )
        state.unpack(checkpoint.tensors, values, self.model, self.stepper.optimizer, self.accelerator)
        self.step, self.epoch, self.batch = checkpoint.step, values["epoch"], values["batch"]
        self.history = values["history"]
        self.seconds = values["seconds"]
        # What was counted belongs to all processes; the first one carries it on.
        if self.accelerator.is_main_process:
            self.tally.restore(Counts(**values["counts"]))

    def run(
        self,
        layers: list[tuple[str, Equilibrium]],
        records: Records | None,
        display: ProgressDisplay,
        stop: StopRequest,
    ) -> None:
        """Train to the end of the recipe."""
        while self.epoch < self.recipe.train.epochs:
            display.epoch(self.epoch)
            self._steps(layers, display, stop)
            counts = self.tally.read(self.accelerator)
            self._judge(counts, f"epoch {self.epoch + 1}")
            line = self._test(counts, stop)
            self.history.append(line)
            self.epoch, self.batch = self.epoch + 1, 0
            self.tally, self.seconds = self._new_tally(), 0.0
            self.save()
            display.line(line)
            if records is not None:
                records.add(line)

    def save(self) -> Path | None:
        """Write a checkpoint of this moment; all processes take part, the first one writes."""
        tensors, values = state.pack(self.model, self.stepper.optimizer, self.accelerator)
        values |= {
            "epoch": self.epoch,
            "batch": self.batch,
            "pictures": self.train.samples,
            "classes": self._classes(),
            "history": self.history,
            "seconds": self.seconds,
            "counts": dataclasses.asdict(self.tally.read(self.accelerator)),
        }
        if not self.accelerator.is_main_process:
            return None
        kept = "the checkpoints before it are whole: make room, then go on with --resume"
        with plain_errors("saving a checkpoint", kept):
            return self.checkpoints.save(Checkpoint(self.step, tensors, values))

    def _steps(self, layers: list[tuple[str, Equilibrium]], display: ProgressDisplay, stop: StopRequest) -> None:
        recipe, began, before = self.recipe, time.monotonic(), self.seconds
        adversary = self.stepper.adversary
        self.model.train()
        for images, labels in self.train.epoch(self.epoch, skip=self.batch):
            whole = self.train.global_size(self.batch)
            start = None if adversary is None else adversary.start(self.epoch, self.batch)
            self.stepper.take(images, labels, whole, self.factor(self.step), self.tally, layers, start)
            self.step, self.batch = self.step + 1, self.batch + 1
            self.seconds = before + time.monotonic() - began
            display.batch(self.batch, self.tally.read)
            due = recipe.train.checkpoint_steps and self.step % recipe.train.checkpoint_steps == 0
            signal = stop.agreed(self.step)
            if due or signal or self.step % recipe.guard.every == 0:
                self._judge(self.tally.read(self.accelerator), f"epoch {self.epoch + 1}, step {self.step}")
            if signal:
                self._leave(signal)
            if due and self.batch < len(self.train):
                self.save()
        # Reading waits for the device: only then has the time been measured.
        self.tally.read()
        self.seconds = before + time.monotonic() - began

    def _judge(self, counts: Counts, where: str) -> None:
        """End a run that has failed, and say what is left of it."""
        try:
            judge(self.recipe.guard, counts, where)
        except TrainingStopped as error:
            left = "Checkpoints are from before this"
            none = "No checkpoint had been made: the same folder can be begun anew"
            raise TrainingStopped(f"{error}. {left if self.checkpoints.files() else none}") from None

    def _test(self, counts: Counts, stop: StopRequest) -> Line:
        """Test, and make the epoch's line."""
        if self.accelerator.num_processes > 1:
            _share_buffers(self.model)
        tested = self._measured(self.test, stop)
        line: dict[str, Any] = {
            "epoch": self.epoch + 1,
            "train_loss": counts.mean_loss,
            "train_accuracy": counts.accuracy,
            "test_loss": tested.mean_loss,
            "test_accuracy": tested.accuracy,
            "images_per_second": counts.samples / max(self.seconds, 1e-9),
            "solver_steps": counts.mean_steps,
            "worst_residual": counts.worst,
            "converged": counts.converged_share,
            "test_solver_steps": tested.mean_steps,
            "test_worst_residual": tested.worst,
            "test_converged": tested.converged_share,
            "lr": self.recipe.optimizer.lr * self.factor(max(self.step - 1, 0)),
            "seconds": self.seconds,
        }
        if self.test.dense:
            line |= {"test_iou": tested.mean_iou, "test_class_accuracy": tested.class_accuracy}
        if self.unseen is not None:
            unseen = self._measured(self.unseen, stop)
            line |= {"unseen_loss": unseen.mean_loss, "unseen_accuracy": unseen.accuracy}
        attack, number = self.recipe.adversary.testing(), self.epoch + 1
        if attack and (number % self.recipe.adversary.test_every == 0 or number == self.recipe.train.epochs):
            robust = self._measured(self.test, stop, attack)
            line |= {"test_robust_loss": robust.mean_loss, "test_robust_accuracy": robust.accuracy}
        # JSON has no infinity.
        return {key: value if math.isfinite(value) else None for key, value in line.items()}

    def _measured(self, batches: Batches, stop: StopRequest, attack: PGD | None = None) -> Counts:
        """A pass over test pictures; a signal ends it, and the run, early where no other process is waited for."""
        tally, alone = self._new_tally(batches), self.accelerator.num_processes == 1
        if not measure(self.model, batches, tally, lambda: alone and stop.received > 0, attack):
            self._leave(stop.received)
        return tally.read(self.accelerator)

    def _leave(self, signal: int) -> None:
        path = self.save()
        raise Interrupted(
            f"stopped by signal {signal} after step {self.step}; saved {path}: go on with --resume", signal
        )

    def _classes(self) -> list[str]:
        """The names of the classes, where they are known."""
        return list(self.model.config["extra"].get("classes", ()))

    def _new_tally(self, tested: Batches | None = None) -> Tally:
        """For training, or for batches that are to be tested; of pixels also which class is taken for which."""
        classes = tested.num_classes if tested is not None and tested.dense else None
        return Tally(self.accelerator.device, self.recipe.guard.residual, classes=classes)


def _share_buffers(model: nn.Module) -> None:
    """Give all processes the first one's running averages, so that they test the same network."""
    for buffer in model.buffers():
        torch.distributed.broadcast(buffer, src=0)
