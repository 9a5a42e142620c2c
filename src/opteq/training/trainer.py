"""The training loop: epochs of steps, a test after each epoch, checkpoints."""

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
from opteq.data import Batches
from opteq.models import Classifier
from opteq.training.devices import Accelerator, peak_memory_mb
from opteq.training.guard import Interrupted, TrainingStopped, check_progress
from opteq.training.metrics import Metrics, RunningMetrics
from opteq.training.optim.bounds import GrowingBounds
from opteq.training.optim.schedules import schedule
from opteq.training.optim.unrolled import UnrolledEpochs
from opteq.training.recipe.sections import Recipe
from opteq.training.run import state
from opteq.training.run.checkpoints import Checkpoint, Checkpoints
from opteq.training.run.progress import ProgressDisplay
from opteq.training.run.records import Line, Records
from opteq.training.run.signals import StopRequest
from opteq.training.step import StepRunner
from opteq.training.validation import Layers, validate


class Trainer:
    """A run in progress. Its position is ``epoch`` and ``batch``, the next ones from 0, and the number of steps,
    ``step``.

    Args:
        recipe: of the run.
        model: the classifier, which is tested and saved.
        step_runner: runs its optimiser steps.
        train: training batches.
        test: test batches.
        checkpoints: where to save.
        accelerator: of the run.
        unseen: batches of a second test split, where the data set has one.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Classifier,
        step_runner: StepRunner,
        train: Batches,
        test: Batches,
        checkpoints: Checkpoints,
        accelerator: Accelerator,
        unseen: Batches | None = None,
    ) -> None:
        self.recipe = recipe
        self.model = model
        self.step_runner = step_runner
        self.train = train
        self.test = test
        self.unseen = unseen
        self.checkpoints = checkpoints
        self.accelerator = accelerator
        self.factor = schedule(recipe.schedule, len(train), recipe.train.epochs)
        self.bounds = GrowingBounds(model, recipe.train)
        self.unrolled = UnrolledEpochs(model, recipe.train)
        self.epoch = self.batch = self.step = 0
        self.history: list[Line] = []
        self.metrics = self._new_metrics()
        self.seconds = 0.0

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint."""
        values = checkpoint.values
        samples = values.get("samples", values.get("pictures"))  # as earlier versions called them
        if samples != self.train.samples:
            raise UserError(
                f"the run was started with {samples} training images, but there are {self.train.samples} "
                "now, so it cannot be resumed; give the same images, or another --out"
            )
        classes = self._classes()
        if values.get("classes", classes) != classes:  # checkpoints of earlier versions do not say
            raise UserError(
                f"the run was started with the classes {', '.join(values['classes'])}, but the images have "
                f"{', '.join(classes)} now; give the same images, or another --out"
            )
        state.unpack(checkpoint.tensors, values, self.model, self.step_runner.optimizer, self.accelerator)
        self.step, self.epoch, self.batch = checkpoint.step, values["epoch"], values["batch"]
        self.history = values["history"]
        self.seconds = values["seconds"]
        # The metrics are those of all processes; the first one continues them.
        if self.accelerator.is_main_process:
            counts = values["counts"]
            if "judged" in counts:  # as earlier versions called it
                counts["label_count"] = counts.pop("judged")
            self.metrics.restore(Metrics(**counts))

    def run(
        self,
        layers: Layers,
        records: Records | None,
        display: ProgressDisplay,
        stop: StopRequest,
    ) -> None:
        """Train until the last epoch of the recipe."""
        while self.epoch < self.recipe.train.epochs:
            display.epoch(self.epoch)
            self.bounds.set(self.epoch)
            with self.unrolled.training(self.epoch):
                self._steps(layers, display, stop)
            counts = self.metrics.compute(self.accelerator)
            self._check(counts, f"epoch {self.epoch + 1}", ended=True)
            line = self._test(counts, stop)
            self.history.append(line)
            self.epoch, self.batch = self.epoch + 1, 0
            before, self.metrics, self.seconds = self.metrics, self._new_metrics(), 0.0
            self.metrics.continue_skips(before)
            self.save()
            display.line(line)
            if records is not None:
                records.add(line)

    def save(self) -> Path | None:
        """Save a checkpoint; all processes take part, the first one writes."""
        tensors, values = state.pack(self.model, self.step_runner.optimizer, self.accelerator)
        values |= {
            "epoch": self.epoch,
            "batch": self.batch,
            "samples": self.train.samples,
            "classes": self._classes(),
            "history": self.history,
            "seconds": self.seconds,
            "counts": dataclasses.asdict(self.metrics.compute(self.accelerator)),
        }
        if not self.accelerator.is_main_process:
            return None
        return self.checkpoints.save(Checkpoint(self.step, tensors, values))

    def _steps(self, layers: Layers, display: ProgressDisplay, stop: StopRequest) -> None:
        recipe, began, before = self.recipe, time.monotonic(), self.seconds
        adversary = self.step_runner.adversary
        self.model.train()
        for images, labels in self.train.epoch(self.epoch, skip=self.batch):
            whole = self.train.global_size(self.batch)
            start = None if adversary is None else adversary.start(self.epoch, self.batch)
            self.step_runner.step(images, labels, whole, self.factor(self.step), self.metrics, layers, start)
            self.step, self.batch = self.step + 1, self.batch + 1
            self.seconds = before + time.monotonic() - began
            display.batch(self.batch, self.metrics.compute)
            due = recipe.train.checkpoint_steps and self.step % recipe.train.checkpoint_steps == 0
            signal = stop.agreed_signal(self.step)
            if due or signal or self.step % recipe.guard.every == 0:
                self._check(self.metrics.compute(self.accelerator), f"epoch {self.epoch + 1}, step {self.step}")
            if signal:
                self._leave(signal)
            if due and self.batch < len(self.train):
                self.save()
        # This waits for the device, so that the time is complete.
        self.metrics.compute()
        self.seconds = before + time.monotonic() - began

    def _check(self, counts: Metrics, where: str, ended: bool = False) -> None:
        """Stop a run that has failed; the message says whether there is a checkpoint."""
        try:
            check_progress(self.recipe.guard, counts, where, ended)
        except TrainingStopped as error:
            left = "Checkpoints are from before this"
            none = "No checkpoint was saved: a new run can start in the same folder"
            raise TrainingStopped(f"{error}. {left if self.checkpoints.files() else none}") from None

    def _test(self, counts: Metrics, stop: StopRequest) -> Line:
        """Test, and return the metrics of the epoch."""
        if self.accelerator.num_processes > 1:
            _broadcast_buffers(self.model)
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
            "skipped_steps": int(counts.skipped),
            "lr": self.recipe.optimizer.lr * self.factor(max(self.step - 1, 0)),
            "seconds": self.seconds,
            "peak_memory_mb": peak_memory_mb(self.accelerator.device),
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
        return {key: value if value is not None and math.isfinite(value) else None for key, value in line.items()}

    def _measured(self, batches: Batches, stop: StopRequest, attack: PGD | None = None) -> Metrics:
        """Metrics on test batches; a signal ends the pass and the run where there is a single process."""
        metrics, alone = self._new_metrics(batches), self.accelerator.num_processes == 1
        if not validate(self.model, batches, metrics, lambda: alone and stop.received > 0, attack):
            self._leave(stop.received)
        return metrics.compute(self.accelerator)

    def _leave(self, signal: int) -> None:
        path = self.save()
        raise Interrupted(
            f"stopped by signal {signal} after step {self.step}; saved {path}: continue with --resume", signal
        )

    def _classes(self) -> list[str]:
        """Names of the classes, where they are known."""
        return list(self.model.config["extra"].get("classes", ()))

    def _new_metrics(self, tested: Batches | None = None) -> RunningMetrics:
        """Metrics for training or for test batches; for segmentation with a confusion matrix."""
        classes = tested.num_classes if tested is not None and tested.dense else None
        return RunningMetrics(self.accelerator.device, self.recipe.guard.residual, classes=classes)


def _broadcast_buffers(model: nn.Module) -> None:
    """Broadcast the buffers of the first process, so that all processes test the same network."""
    for buffer in model.buffers():
        torch.distributed.broadcast(buffer, src=0)
