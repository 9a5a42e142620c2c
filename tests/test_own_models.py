"""Models of a user's own, registered by name: trained by a recipe, saved, and read again by every command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import opteq
from opteq import models
from opteq import operators as op
from opteq.common.errors import UserError
from opteq.inference.export import export
from opteq.inference.fixed_steps import Exportable
from opteq.inference.formats import ENDINGS
from opteq.models import registry
from opteq.training import Recipe, evaluate, load_recipe, train
from opteq.training.devices import make_accelerator
from opteq.training.metrics import RunningMetrics
from opteq.training.optim.losses import Loss
from opteq.training.recipe.sections import LossSection, TrainSection
from opteq.training.run.checkpoints import Checkpoint, Checkpoints
from opteq.training.step import StepRunner
from opteq.training.validation import without_warnings
from training_cases import lines

RECIPE = ["model.name=own", "train.epochs=1", "train.batch_size=256", "train.device=cpu"]


class Stem(nn.Module):
    """What users keep beside parameters: tensors that are no buffers or not persistent, arrays, counters."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1)
        self.conv.weight.data /= self.conv.weight.norm().item()
        self.conv.bias.data = torch.from_numpy(np.linspace(0, 1, width, dtype=np.float32))
        self.register_buffer("grid", torch.linspace(-1, 1, 8).repeat(8, 1), persistent=False)
        self.scale = torch.tensor(2.0)
        self.table = np.arange(3)
        self.calls = 0
        self.latest: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.latest = self.conv(x) + self.scale * self.grid
        return self.latest


@pytest.fixture
def own() -> Iterator[None]:
    @models.register_model("own")
    def build(in_channels: int, num_classes: int, logits: int = 0, unused: bool = False) -> tuple[nn.Module, ...]:
        assert in_channels == 1, "for grey images"

        class Head(nn.Sequential):  # another class at every call
            pass

        problem = opteq.OptEq(op.Conv2d(4, 6, 3, bound=0.9), nn.Conv2d(4, 6, 3, padding=1))
        head = Head(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, logits or num_classes))
        if unused:
            head[2].unused = nn.Parameter(torch.zeros(3))
        return Stem(in_channels, 4), opteq.Equilibrium(problem), head

    yield
    models.unregister_model("own")


def recipe(*more: str) -> Recipe:
    return load_recipe("digits", [*RECIPE, *more])


@pytest.mark.usefixtures("own")
def test_a_saved_model_computes_what_it_did(tmp_path: Path) -> None:
    """A file of weights holds neither tensors that are no buffers nor buffers that are not persistent."""
    model = models.create("own", in_channels=1).eval()
    x = torch.rand(3, 1, 8, 8)
    model.stem.table, model.config["extra"]["note"] = np.arange(3), 1
    model.save_pretrained(tmp_path)
    state = torch.get_rng_state()
    again = models.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(again(x), model(x))


@pytest.mark.usefixtures("own")
def test_a_trained_one_is_read_again(tmp_path: Path) -> None:
    run = train(recipe(), tmp_path / "run")
    assert evaluate(run)["test_accuracy"] == lines(run)[-1]["test_accuracy"]


class Hidden(opteq.HiddenProblem):
    penalty = "relu"

    def __init__(self) -> None:
        super().__init__()
        self.W = op.Conv2d(4, 4, 3, bound=0.9)

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return -(0.5 * self.W.adjoint(y).square() + x * y).flatten(1).sum(1)


def test_a_resumed_run_of_a_written_problem_has_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, though a new process has traced nothing yet, and the engine traces what was called before."""
    monkeypatch.setattr(opteq.engine.settings, "calls_before_tracing", 2)

    @models.register_model("written")
    def build(in_channels: int, num_classes: int) -> tuple[nn.Module, ...]:
        stem = nn.Sequential(nn.Conv2d(in_channels, 4, 3, padding=1), nn.Dropout(0.2))
        return stem, opteq.Equilibrium(Hidden()), nn.Sequential(nn.Flatten(), nn.Linear(256, num_classes))

    options = recipe("model.name=written", "train.checkpoint_steps=1", "train.threads=1")
    save = Checkpoints.save

    def train_until(stop: int, run: Path) -> None:
        def save_and_stop(self: Checkpoints, checkpoint: Checkpoint) -> Path:
            path = save(self, checkpoint)
            if checkpoint.step == stop:
                raise KeyboardInterrupt
            return path

        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "save", save_and_stop)
            with pytest.raises(KeyboardInterrupt):
                train(options, run)

    try:
        opteq.engine.forget()
        whole = train(options, tmp_path / "whole")
        for stop in (1, 3):
            opteq.engine.forget()
            train_until(stop, tmp_path / f"run-{stop}")
            opteq.engine.forget()
            run = train(options, tmp_path / f"run-{stop}", resume=True)
            assert lines(run) == lines(whole)
            assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    finally:
        models.unregister_model("written")
    assert opteq.engine.settings.calls_before_tracing == 2


@pytest.mark.usefixtures("own")
def test_what_cannot_be_compared_counts_as_replaced(tmp_path: Path) -> None:
    """It is saved all the same, and read into a model with the same parts."""
    model = models.create("own", in_channels=1).eval()
    model.stem.table = np.arange(4)
    with pytest.raises(UserError, match=re.escape("stem.table of the model was replaced")):
        models.from_pretrained(model.save_pretrained(tmp_path))
    model.stem.table = np.arange(3)
    model.stem.latest = {"itself": None}  # type: ignore[assignment]
    model.stem.latest["itself"] = model.stem.latest  # type: ignore[index]
    other = models.create("own", in_channels=1)
    assert models.from_pretrained(model.save_pretrained(tmp_path), model=other) is other


@pytest.mark.usefixtures("own")
def test_a_model_for_grey_images_is_described() -> None:
    state = torch.get_rng_state()
    assert models.describe("own").parameters == sum(w.numel() for w in models.create("own", in_channels=1).parameters())
    registry._parameters.cache_clear()
    torch.set_rng_state(state)
    models.describe("own")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("logits", [7, 12])
def test_logits_of_other_classes(logits: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(f"returns the shape (256, {logits}) for 256 images of 10 classes")):
        train(recipe(f"model.options.logits={logits}"), tmp_path / "run")


@pytest.mark.parametrize("name", ["idle", "plain", "name"])
def test_names_that_options_have_themselves(name: str) -> None:
    given: dict[str, object] = {}
    exec(f"def build(in_channels, num_classes, {name}=1): ...", given)
    with pytest.raises(UserError, match=f"build can't have an option called {name}"):
        models.register_model("taken")(given["build"])  # type: ignore[arg-type]
    assert "taken" not in models.list()


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_without_a_gradient_stop_several_processes(frozen: bool) -> None:
    """DDP would raise in the second step, with numbers in place of names."""
    model = models.create("own", in_channels=1, unused=True)
    model.head[2].unused.requires_grad_(not frozen)
    accelerator = make_accelerator("cpu", "no")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with without_warnings(model) as layers, Loss(LossSection(), 0.0, model) as loss:
        runner = StepRunner(model, sgd, loss, accelerator, TrainSection(epochs=1, batch_size=4))
        runner._checked = False  # as with several processes
        given = torch.rand(4, 1, 8, 8), torch.arange(4), 4, 1.0, RunningMetrics(accelerator.device), layers
        if frozen:
            runner.step(*given)
        else:
            with pytest.raises(UserError, match=re.escape("does not depend on head.2.unused: with several processes")):
                runner.step(*given)


class Written(opteq.Objective):
    penalty = "relu"

    def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        return {"data": 0.5 * (y - x).square().flatten(1).sum(1)}


@pytest.mark.parametrize("format", ["torchscript", "exported"])
def test_derivatives_are_not_exported(format: str, tmp_path: Path) -> None:
    config = {"name": "mine", "num_classes": 3, "in_channels": 1, "options": {}, "extra": {"image_shape": [1, 8, 8]}}
    own = models.Classifier(nn.Identity(), opteq.Equilibrium(Written()), nn.Flatten(), config)
    own.config["extra"] |= {"mean": [0.5], "std": [0.5], "classes": ["a", "b", "c"]}
    own.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(UserError, match="mine can't be exported: a step of Written is a derivative of its terms"):
        export(own, tmp_path / "model", format)
    assert not list(tmp_path.iterdir())
    assert Exportable(own, 3)(torch.rand(2, 1, 8, 8)).shape == (2, 3)  # in PyTorch it works


@pytest.mark.parametrize("format", ["torchscript", "exported"])
def test_a_step_written_out_is_exported(format: str, tmp_path: Path) -> None:
    config = {"name": "mine", "num_classes": 3, "in_channels": 1, "options": {}}
    extra = {"image_shape": [1, 8, 8], "mean": [0.5], "std": [0.5], "classes": ["a", "b", "c"]}
    layer = opteq.Equilibrium(opteq.FixedPoint(Step()))
    own = models.Classifier(
        nn.Identity(), layer, nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), {**config, "extra": extra}
    )
    exported = export(own.eval(), tmp_path / f"model{ENDINGS[format]}", format)
    assert exported.path.exists()
    assert exported.agreement == 1


class Step(nn.Module):
    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return torch.relu(0.5 * y + x)
