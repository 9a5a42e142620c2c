"""One optimiser step, over several processes and with gradient accumulation."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from opteq.common.errors import UserError
from opteq.training.adversary import Adversary
from opteq.training.devices import Accelerator
from opteq.training.metrics import RunningMetrics
from opteq.training.optim.jacobian import RadiusLimit
from opteq.training.optim.losses import Loss
from opteq.training.optim.skipping import Buffers, as_gradient, gradient_norm, step_unless
from opteq.training.recipe.sections import TrainSection
from opteq.training.validation import Layers, solve_reports


class StepRunner:
    """Runs optimiser steps of a model.

    The gradient of a step is that of the mean loss over all its images: each micro-batch contributes its sum divided by
    the total number. So the result does not depend on how the images are divided among processes and micro-batches.
    (Batch normalisation uses the images of all processes, but of one micro-batch.)

    A step whose loss or gradient is not finite is skipped, in all processes: weights, optimiser, statistics of batch
    normalisation and metrics stay what they were, and the step is counted. So is a step too many of whose samples have
    no equilibrium, where ``radius`` says so.

    Args:
        model: prepared by accelerate.
        optimizer: prepared by accelerate.
        loss: sum over images.
        accelerator: of the run.
        options: the recipe's ``[train]``.
        adversary: attacks the images of each micro-batch before the training step.
        radius: limits feedback after each step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        accelerator: Accelerator,
        options: TrainSection,
        adversary: Adversary | None = None,
        radius: RadiusLimit | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.accelerator = accelerator
        self.options = options
        self.adversary = adversary
        self.radius = radius
        # An attack is local to a process: it uses the model without the wrapper, which synchronises gradients.
        self._bare = accelerator.unwrap_model(model)
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self._checked = accelerator.num_processes == 1

    def step(
        self,
        images: Tensor,
        labels: Tensor,
        whole: int,
        factor: float,
        metrics: RunningMetrics,
        layers: Layers,
        start: Tensor | None = None,
    ) -> None:
        """One step.

        Args:
            images: this process's share of the images.
            labels: their labels.
            whole: number of images of the step over all processes.
            factor: of the learning rate.
            metrics: updated with the step.
            layers: those that are solved, whose reports are counted.
            start: noise of the adversary's random start, if it has one.
        """
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        self.optimizer.zero_grad(set_to_none=True)
        buffers, sums = Buffers(self._bare), metrics.sums.clone()
        # Gradients are averaged over processes; the factor makes it a sum.
        scale = self.accelerator.num_processes / whole
        # The same number of micro-batches in every process, each with at least one image.
        count = min(self.options.accumulate, max(whole // self.accelerator.num_processes, 1))
        starts = [None] * count if start is None else start.tensor_split(count)
        parts = zip(images.tensor_split(count), labels.tensor_split(count), starts, strict=True)
        for index, (part, classes, noise) in enumerate(parts, start=1):
            if self.adversary is not None:
                part = self.adversary(self._bare, part, classes, noise)
            with nullcontext() if index == count else self.accelerator.no_sync(self.model):
                logits = self.model(part)
                total = self.loss(logits, classes)
                metrics.update(total, logits, classes, solve_reports(layers))
                self.accelerator.backward(as_gradient(total) * scale)
        if not self._checked:
            self._check_gradients()
        if self.options.clip is not None:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.options.clip)
        else:
            self.accelerator.unscale_gradients()
            norm = gradient_norm(self.model.parameters())
        # Features of 1e30 have a finite gradient, and an infinite variance that running averages would keep for ever.
        failed = ~torch.isfinite(norm) | buffers.have_non_finite()
        if self.radius is not None:
            failed = failed | self.radius.apply(self.accelerator)
        if self.accelerator.scaler is None:
            step_unless(failed, self.optimizer)
        else:
            self.optimizer.step()  # skipped by the scaler, which lowers its scale then
        buffers.restore_if(failed)
        metrics.skip_if(failed, sums)

    def _check_gradients(self) -> None:
        """Raise where a parameter has none: several processes would wait for it in vain."""
        named = self._bare.named_parameters()
        idle = [name for name, weight in named if weight.requires_grad and weight.grad is None]
        if idle:
            raise UserError(
                f"the loss does not depend on {', '.join(idle[:3])}{', ...' if len(idle) > 3 else ''}: with several "
                "processes, all parameters of a model have to be used; remove them, or set requires_grad = False"
            )
        self._checked = True
