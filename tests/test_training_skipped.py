"""A step whose loss or gradient is not finite: it changes nothing, and is counted."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opteq import models
from opteq.training import devices
from opteq.training.metrics import RunningMetrics
from opteq.training.optim.losses import Loss
from opteq.training.optim.optimizers import optimizer
from opteq.training.optim.skipping import as_gradient, start_momentum, step_unless
from opteq.training.recipe.sections import LossSection, OptimizerSection, TrainSection
from opteq.training.step import StepRunner
from opteq.training.validation import without_warnings


class Run:
    """A tiny network with batch normalisation, and the steps of its training."""

    def __init__(self, clip: float | None = None, accumulate: int = 1) -> None:
        torch.manual_seed(0)
        self.model = models.create(
            "opteq-digits", in_channels=1, channels=3, hidden=[4], pool=1, injection_norm="batch"
        )
        self.engine = devices.make_accelerator("cpu", "no")
        self.options = TrainSection(epochs=1, batch_size=6, clip=clip, accumulate=accumulate)
        self.metrics = RunningMetrics(self.engine.device)
        sgd = optimizer(OptimizerSection(lr=0.05, momentum=0.9, weight_decay=0.01), self.model)
        self.wrapped, self.sgd = self.engine.prepare(self.model, sgd)

    def step(self, images: Tensor) -> None:
        with without_warnings(self.model) as layers, Loss(LossSection(), 0.0, self.model) as loss:
            runner = StepRunner(self.wrapped, self.sgd, loss, self.engine, self.options)
            runner.step(images, torch.arange(6), 6, 1.0, self.metrics, layers)

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({"model": self.model.state_dict(), "sgd": self.sgd.state_dict()["state"]})


@pytest.mark.parametrize(("clip", "accumulate"), [(None, 1), (1.0, 1), (1.0, 2)])
def test_a_step_with_nan_is_as_if_it_had_not_been(clip: float | None, accumulate: int) -> None:
    torch.manual_seed(1)
    good, other = torch.randn(2, 6, 1, 8, 8)
    bad = other.clone()
    bad[4, 0, 3, 3] = math.nan
    left_out, skipped = Run(clip, accumulate), Run(clip, accumulate)
    for images in (good, other):
        left_out.step(images)
    for images in (good, bad, other):
        skipped.step(images)
    expected, found = left_out.state(), skipped.state()
    for name, value in expected["model"].items():
        if "num_batches_tracked" not in name:
            assert torch.equal(found["model"][name], value), name
    for number, value in expected["sgd"].items():
        assert torch.equal(found["sgd"][number]["momentum_buffer"], value["momentum_buffer"])
    counted, clean = skipped.metrics.compute(), left_out.metrics.compute()
    assert (counted.skipped, counted.skipped_in_a_row, clean.skipped) == (1, 1, 0)
    assert (counted.samples, counted.loss, counted.steps) == (12, clean.loss, clean.steps)


def test_a_variance_that_overflows_is_no_running_average() -> None:
    run = Run()
    before = run.state()
    images = torch.randn(6, 1, 8, 8)
    images[2] *= 1e30
    run.step(images)
    assert run.metrics.compute().skipped == 1
    for name, value in before["model"].items():
        if "num_batches_tracked" not in name:
            assert torch.equal(run.model.state_dict()[name], value), name


def test_runs_of_skipped_steps_are_counted_across_epochs() -> None:
    metrics = RunningMetrics(torch.device("cpu"))
    for failed in (True, False, True, True):
        metrics.skip_if(torch.tensor(failed), metrics.sums)
    assert (metrics.compute().skipped, metrics.compute().skipped_in_a_row) == (3, 2)
    later = RunningMetrics(torch.device("cpu"))
    later.continue_skips(metrics)
    later.skip_if(torch.tensor(True), later.sums)
    assert (later.compute().skipped, later.compute().skipped_in_a_row) == (1, 3)


def test_a_loss_that_is_not_finite_says_so_by_its_gradient() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    for loss, expected in ((weight * 3, 3.0), (weight / 0, math.nan), (weight * 0 + math.inf, math.nan)):
        (found,) = torch.autograd.grad(as_gradient(loss), weight)
        assert float(found) == expected or (math.isnan(expected) and not math.isfinite(float(found)))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_fused_optimisers_skip_on_the_device(name: str, fused: bool) -> None:
    """The very first step fails: fused SGD of torch would go on with momentum from unset memory."""

    def stepped(*fails: bool) -> Tensor:
        weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        if name == "sgd":
            made: torch.optim.Optimizer = start_momentum(torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=fused))
            assert all(float(state["momentum_buffer"].norm()) == 0 for state in made.state.values())
        else:
            made = torch.optim.AdamW([weight], lr=0.1, fused=fused)
        for failed in fails:
            weight.grad = torch.full((3,), math.nan) if failed else weight.detach().clone()
            step_unless(torch.tensor(failed), made)
        return weight.detach()

    torch.testing.assert_close(stepped(True, False, True, False), stepped(False, False), rtol=0, atol=0)
