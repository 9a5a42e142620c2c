"""The training of a denoiser: noisy patches in, the error of the minimiser out."""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from opteq.common.errors import UserError
from opteq.common.files import plain_errors
from opteq.data.grey import Crops, read_grey
from opteq.gradients import Implicit
from opteq.models.denoiser import Denoiser
from opteq.solvers import FISTA
from opteq.solvers.linear import CG
from opteq.training.denoising.evaluate import image_folder
from opteq.training.devices import Accelerator, make_accelerator
from opteq.training.guard import Interrupted, TrainingStopped
from opteq.training.optim.skipping import as_gradient, step_unless
from opteq.training.recipe.denoising import DenoisingRecipe
from opteq.training.run import environment, rng, state
from opteq.training.run.checkpoints import Checkpoint, Checkpoints
from opteq.training.run.folder import RunFolder
from opteq.training.run.progress import training_console
from opteq.training.run.records import Line, Records
from opteq.training.run.signals import StopRequest

_AVERAGED = 0.998
"""Share of the average of weights that a step keeps."""
_COUNTED = ("loss", "solver_steps", "gradient_steps", "failed", "skipped")


def train(recipe: DenoisingRecipe, out: str | Path, resume: bool = False, console: Console | None = None) -> Path:
    """Train by the recipe into the folder ``out``; see :func:`opteq.training.train`."""
    folder = RunFolder(Path(out))
    accelerator = make_accelerator(recipe.train.device, "no", recipe.train.tf32, recipe.train.threads)
    if accelerator.num_processes > 1:
        raise UserError(f"denoisers are trained by one process; got {accelerator.num_processes}")
    folder.check(recipe, resume)
    console = console or training_console()
    with folder.prepared():
        rng.seed(recipe.train.seed)
        trainer = DenoisingTrainer(recipe, accelerator)
        checkpoints = Checkpoints(folder.checkpoints)
        checkpoint = checkpoints.latest() if resume else None
        if resume and checkpoint is None and folder.recipe_file.exists():
            console.print(f"{folder.path} has no checkpoint: training begins again", highlight=False)
        if checkpoint is not None:
            trainer.resume(checkpoint)
            console.print(f"{folder.path} continues after step {trainer.step}", highlight=False)
        with plain_errors(f"training in {folder.path}", checkpoints.remedy), StopRequest(accelerator) as stop:
            folder.describe(recipe, environment.describe(accelerator))
            records = Records(folder.path, trainer.history)
            try:
                _loop(trainer, checkpoints, records, stop, console)
            finally:
                records.close()
            trainer.averaged_model().save(folder.path)
    return folder.path


def _loop(
    trainer: DenoisingTrainer, checkpoints: Checkpoints, records: Records, stop: StopRequest, console: Console
) -> None:
    options = trainer.recipe.train
    while trainer.step < options.steps:
        trainer.advance()
        last = trainer.step == options.steps
        if last or trainer.step % options.log_steps == 0:
            line = trainer.line()
            records.add(line)
            console.print(_text(line, options.steps), highlight=False, soft_wrap=True)
        signal = stop.agreed_signal(trainer.step)
        if last or signal or trainer.step % options.checkpoint_steps == 0:
            saved = checkpoints.save(trainer.checkpoint())
        if signal:
            raise Interrupted(
                f"stopped by signal {signal} after step {trainer.step}; saved {saved}: continue with --resume", signal
            )


def _text(line: Line, steps: int) -> str:
    return (
        f"step {line['step']}/{steps}  loss {line['train_loss']:.5f}  {line['solver_steps']:.1f} steps  "
        f"{line['gradient_steps']:.1f} backward  converged {line['converged']:.1%}  {line['seconds']:.0f} s"
    )


class DenoisingTrainer:
    """Model, optimiser, average of weights and data of one training.

    Attributes:
        step: optimiser steps taken.
        history: a line for every ``log_steps``.
    """

    def __init__(self, recipe: DenoisingRecipe, accelerator: Accelerator) -> None:
        self.recipe, self.accelerator = recipe, accelerator
        self.device = device = accelerator.device
        self.model = build_denoiser(recipe, device)
        prior = self.model.prior
        self.average = {name: tensor.detach().clone() for name, tensor in prior.state_dict().items()}
        # Potentials and noise levels are few numbers that have to travel further than filters.
        self.rates = {"filters": 1.0, "curves": 2.0, "guide": 0.25}
        groups = {
            "filters": list(prior.filters.parameters()),
            "curves": [*prior.potential.parameters(), *prior.levels.parameters()],
            "guide": [] if prior.guide is None else list(prior.guide.parameters()),
        }
        self.optimizer = torch.optim.Adam(
            [{"params": group, "name": name} for name, group in groups.items()],
            lr=recipe.train.lr,
            betas=(0.9, 0.99),
            fused=device.type == "cuda" or None,
        )
        self.crops = Crops(_training_images(recipe).to(device).float() / 255, recipe.train.patch)
        self._capture_guide()
        self.generator = torch.Generator(device).manual_seed(recipe.train.seed)
        self.step = 0
        self.history: list[Line] = []
        self._before, self._began = 0.0, time.monotonic()  # seconds of earlier calls, and the start of this one
        self._sums, self._counted = torch.zeros(len(_COUNTED), device=device), 0

    def advance(self) -> None:
        """One step of the optimiser."""
        options, noise = self.recipe.train, self.recipe.noise
        self._set_rates()
        clean = self.crops.draw(options.batch_size, self.generator)
        drawn = torch.rand(options.batch_size, device=self.device, generator=self.generator)
        sigma = (noise.least + (noise.most - noise.least) * drawn) / 255
        noisy = clean + sigma[:, None, None, None] * torch.randn(
            clean.shape, device=self.device, generator=self.generator
        )
        inside = slice(options.border, options.patch - options.border)
        errors = (self.model(noisy, sigma) - clean)[..., inside, inside].square().mean(dim=(1, 2, 3))
        # The error that is left grows about as sigma does: all levels count the same.
        loss = (errors / sigma).mean()
        self.optimizer.zero_grad(set_to_none=True)
        as_gradient(loss).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.prior.parameters(), 1.0)
        skipped = ~torch.isfinite(norm)
        step_unless(skipped, self.optimizer)
        self.step += 1
        self._average()
        self._count(torch.where(skipped, 0.0, loss.detach()), skipped)

    def line(self) -> Line:
        """Means since the last line."""
        counted = max(1, self._counted)
        means = dict(zip(_COUNTED, (self._sums / counted).tolist(), strict=True))
        self._sums.zero_()
        self._counted = 0
        if means["skipped"] > 0.5:
            raise TrainingStopped(
                f"step {self.step}: {means['skipped']:.0%} of the steps since the last line were skipped because their "
                "loss or gradient was not finite; try a lower train.lr"
            )
        line = {
            "epoch": len(self.history) + 1, "step": self.step, "train_loss": means["loss"] / (1 - means["skipped"]),
            "solver_steps": means["solver_steps"], "gradient_steps": means["gradient_steps"],
            "converged": 1 - means["failed"], "skipped_steps": round(means["skipped"] * counted),
            "seconds": self._before + time.monotonic() - self._began,
        }  # fmt: skip
        self.history.append(line)
        return line

    def averaged_model(self) -> Denoiser:
        """The model with averaged weights."""
        model = Denoiser(self.model.config)
        model.prior.load_state_dict(self.average)
        return model

    def checkpoint(self) -> Checkpoint:
        """All that the rest of the training depends on."""
        tensors, values = state.pack(self.model.prior, self.optimizer, self.accelerator)
        tensors |= {f"average.{name}": tensor for name, tensor in self.average.items()}
        tensors |= {"generator": self.generator.get_state(), "sums": self._sums}
        values |= {"history": self.history, "seconds": self._before + time.monotonic() - self._began}
        return Checkpoint(self.step, tensors, {**values, "counted": self._counted})

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from there."""
        tensors, values = checkpoint.tensors, checkpoint.values
        state.unpack(tensors, values, self.model.prior, self.optimizer, self.accelerator)
        for name, tensor in self.average.items():
            tensor.copy_(tensors[f"average.{name}"])
        if tensors["generator"].shape == self.generator.get_state().shape:
            self.generator.set_state(tensors["generator"])
        else:  # of another kind of device: other patches are drawn from here on
            self.generator.manual_seed(self.recipe.train.seed + checkpoint.step)
        self._sums.copy_(tensors["sums"])
        self._counted, self.history, self._before = values["counted"], values["history"], values["seconds"]
        self.step = checkpoint.step

    def _capture_guide(self) -> None:
        """On a GPU, forward and backward of the guide as one captured graph each: all its batches have one shape."""
        guide, options = self.model.prior.guide, self.recipe.train
        if guide is None or self.device.type != "cuda":
            return
        # Captured on a stream of its own, where gradients of its parameters wait for those of the current one.
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        image = torch.rand(options.batch_size, 1, options.patch, options.patch, device=self.device)
        torch.cuda.make_graphed_callables(guide, (image, image.new_full((options.batch_size,), 0.1)))

    def _set_rates(self) -> None:
        """A short rise, then a cosine down to a hundredth."""
        options = self.recipe.train
        fall = 0.01 + 0.99 * (1 + math.cos(math.pi * self.step / options.steps)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = options.lr * self.rates[group["name"]] * min(1.0, (self.step + 1) / 50) * fall

    @torch.no_grad()
    def _average(self) -> None:
        kept = min(_AVERAGED, self.step / (self.step + 10))
        new = self.model.prior.state_dict()
        torch._foreach_lerp_(list(self.average.values()), [new[name] for name in self.average], 1 - kept)

    @torch.no_grad()
    def _count(self, loss: Tensor, skipped: Tensor) -> None:
        assert self.model.layer.last is not None
        report, slot = self.model.layer.last
        parts: list[Any] = [loss, report.steps.float().mean()]
        parts.append(0.0 if slot.report is None else slot.report.steps.float().mean())
        parts += [report.failures().float().mean(), skipped]
        self._sums += torch.stack([torch.as_tensor(part, device=self.device).float() for part in parts])
        self._counted += 1


def _training_images(recipe: DenoisingRecipe) -> Tensor:
    folder = image_folder(recipe) / "train"
    images = read_grey(folder)
    first, *others = dict.fromkeys(f"{image.shape[2]}x{image.shape[1]}" for image in images)
    if others:
        raise UserError(f"{folder} holds images of {first} and of {others[0]} pixels; all should have one size")
    if min(images[0].shape[1:]) < recipe.train.patch:
        raise UserError(f"train.patch = {recipe.train.patch} should be at most the size of the images, {first}")
    return torch.cat(images)


def build_denoiser(recipe: DenoisingRecipe, device: torch.device) -> Denoiser:
    """The model with the solvers of its training."""
    options = recipe.train
    # The host looks at the residuals every eight steps, which keeps a GPU busy.
    every = 1 if device.type == "cpu" else 8
    solver = FISTA(tol=options.tol, max_steps=options.max_steps, check_every=every)
    linear = CG(tol=options.gradient_tol, max_steps=options.gradient_steps, check_every=every)
    model = Denoiser(recipe.model.config(recipe.noise), solver, Implicit(linear=linear), on_failure="ignore").to(device)
    if options.bfloat16 and model.prior.guide is not None:
        model.prior.guide.compute_dtype = torch.bfloat16
        model.prior.guide.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model
