"""One optimiser step, however its pictures are spread over processes and accumulated parts."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from opteq.equilibrium import Equilibrium
from opteq.training.adversary import Adversary
from opteq.training.devices import Accelerator
from opteq.training.metrics import Tally
from opteq.training.optim.losses import Loss
from opteq.training.recipe.sections import TrainSection
from opteq.training.validation import reports


class Stepper:
    """Takes optimiser steps of a model.

    The gradient of a step is that of the mean loss over all its pictures: every part contributes its sum divided by
    the whole number. So two processes, or two accumulated parts, of unequal size give what one gives. (Batch
    normalisation is over the pictures of all processes, but of one accumulated part at a time.)

    Args:
        model: as accelerate wrapped it.
        optimizer: as accelerate wrapped it.
        loss: sum over pictures.
        accelerator: the engine.
        options: the recipe's ``[train]``.
        adversary: attacks the pictures before they are learned from, those of one accumulated part at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        accelerator: Accelerator,
        options: TrainSection,
        adversary: Adversary | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.accelerator = accelerator
        self.options = options
        self.adversary = adversary
        # An attack is each process's own affair: it goes past the wrapper, whose part is to wait for the others.
        self._bare = accelerator.unwrap_model(model)
        self._peaks = [group["lr"] for group in optimizer.param_groups]

    def take(
        self,
        images: Tensor,
        labels: Tensor,
        whole: int,
        factor: float,
        tally: Tally,
        layers: list[tuple[str, Equilibrium]],
        start: Tensor | None = None,
    ) -> None:
        """One step.

        Args:
            images: this process's share of the step's pictures.
            labels: theirs.
            whole: the number of pictures of the step over all processes.
            factor: of the learning rate.
            tally: where the step is counted.
            layers: the equilibrium layers, whose reports are counted too.
            start: where the adversary begins, if there is one and it begins at random.
        """
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        self.optimizer.zero_grad(set_to_none=True)
        # Gradients are averaged over processes, so each multiplies by their number to get the sum.
        scale = self.accelerator.num_processes / whole
        # Every process has the same number of parts and a picture in each, since they wait for each other in them.
        count = min(self.options.accumulate, max(whole // self.accelerator.num_processes, 1))
        starts = [None] * count if start is None else start.tensor_split(count)
        parts = zip(images.tensor_split(count), labels.tensor_split(count), starts, strict=True)
        for index, (pictures, classes, begin) in enumerate(parts, start=1):
            if self.adversary is not None:
                pictures = self.adversary(self._bare, pictures, classes, begin)
            with nullcontext() if index == count else self.accelerator.no_sync(self.model):
                logits = self.model(pictures)
                total = self.loss(logits, classes)
                tally.add(total, logits, classes, reports(layers))
                self.accelerator.backward(total * scale)
        if self.options.clip is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.optimizer.step()
