"""Table 8 of the OptEq paper by one command, and the size of features that a run reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import opteq
from opteq import models
from opteq.cli import app
from opteq.common.errors import UserError
from opteq.training import devices
from opteq.training.feature_size import FeatureSize
from opteq.training.optim.jacobian import JacobianPenalty
from opteq.training.optim.unrolled import UnrolledEpochs
from opteq.training.recipe.sections import TrainSection
from opteq.training.unrolling import unrolling_table
from training_cases import in_process, lines, make_images, settings, train_and_die, train_here


@pytest.mark.slow
def test_rows_of_steps_and_of_thresholds(tmp_path: Path) -> None:
    overrides = settings(make_images(tmp_path / "images", 8, 3), "train.epochs=1", "model.options.bound=0.9")
    given = ("digits", overrides, tmp_path / "table", (1, 12), (1e-3,), Console(quiet=True))
    rows = unrolling_table(*given)
    assert [row["method"] for row in rows] == ["unrolled-1", "unrolled-12", "implicit-0.001"]
    assert [row["solver_steps"] for row in rows[:2]] == [1, 12]  # exactly that many
    assert rows[1]["mean_residual"] < 1e-3 * rows[0]["mean_residual"]
    assert rows[2]["mean_residual"] <= 1e-3
    assert all(row["inference_seconds"] > 0 and row["backward_seconds"] > 0 for row in rows)
    assert json.loads((tmp_path / "table/unrolling.json").read_text()) == rows
    result = CliRunner().invoke(
        app, ["unrolling", "digits", "--out", str(tmp_path / "table"), "--steps", "1", "--threshold", "1e-3"]
        + [part for override in overrides for part in ("--set", override)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "unrolled-1" in result.output  # of the runs that are there


@pytest.mark.parametrize(
    ("steps", "thresholds", "message"),
    [
        ((5, 0), (1e-3,), "--steps should be a positive finite number; got 0"),
        ((5,), (1e-3, 0.0), "--threshold should be a positive finite number; got 0.0"),
        ((5,), (1e-3, float("nan")), "--threshold should be a positive finite number; got nan"),
    ],
)
def test_a_wrong_row_is_refused_before_any_is_trained(
    steps: tuple[int, ...], thresholds: tuple[float, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        unrolling_table("digits", ["train.epochs=1"], tmp_path / "table", steps, thresholds, Console(quiet=True))
    assert not (tmp_path / "table").exists()


def test_the_mean_size_of_features() -> None:
    torch.manual_seed(0)
    model = models.create("popteq-193k", channels=3, hidden=[4, 4], scales=[1, 2]).eval()
    accelerator = devices.make_accelerator("cpu", "no")
    sizes = FeatureSize(model, accelerator.device)
    batches = torch.randn(2, 3, 3, 8, 8)
    with torch.no_grad(), sizes.counting():
        seen = [model.equilibrium(model.stem(batch)) for batch in batches]
    entries = torch.cat([z.flatten() for features in seen for z in features]).double()
    found = sizes.means(accelerator)
    assert found["feature_abs"] == pytest.approx(float(entries.abs().mean()), rel=1e-9)
    assert found["feature_square"] == pytest.approx(float(entries.square().mean()), rel=1e-9)
    assert FeatureSize(torch.nn.Linear(2, 2), accelerator.device).means(accelerator) == {}


def test_the_first_epochs_differentiate_through_plain_steps() -> None:
    torch.manual_seed(0)
    W, U = opteq.operators.Dense(4, 5, bound=0.9), torch.nn.Linear(3, 5)
    layer = opteq.Equilibrium(opteq.OptEq(W, U)).double()
    own = layer.solver, layer.gradient
    x = torch.randn(2, 3, dtype=torch.float64)
    unrolled = UnrolledEpochs(layer, TrainSection(epochs=3, batch_size=2, unrolled_epochs=2, unrolled_steps=3))
    penalty = JacobianPenalty(layer)
    with unrolled.training(1):
        loss = layer(x).square().sum()
    assert float(penalty.take().detach()) > 0  # at the state after the last step, as published
    penalty.close()
    hidden = layer.problem(x)
    state = hidden.start()
    for _ in range(3):
        state = hidden.step(state)
    expected = hidden.features(state).square().sum()
    torch.testing.assert_close(loss, expected)
    for got, right in zip(*(torch.autograd.grad(one, [*layer.parameters()]) for one in (loss, expected)), strict=True):
        torch.testing.assert_close(got, right)
    assert (layer.solver, layer.gradient) == own
    with unrolled.training(2):
        assert (layer.solver, layer.gradient) == own
    with pytest.raises(KeyError), unrolled.training(0):
        raise KeyError
    assert (layer.solver, layer.gradient) == own


def test_a_run_with_unrolled_epochs_is_tested_at_the_equilibrium_and_resumed(tmp_path: Path) -> None:
    root = make_images(tmp_path / "images")
    more = ["train.unrolled_epochs=2", "train.unrolled_steps=3", "train.checkpoint_steps=2"]
    assert in_process(train_here, str(root), str(tmp_path / "whole"), more) == 0
    metrics = lines(tmp_path / "whole")
    assert [line["solver_steps"] == 3 for line in metrics] == [True, True, False]
    assert all(line["test_converged"] == 1 and line["test_solver_steps"] != 3 for line in metrics)
    assert in_process(train_and_die, str(root), str(tmp_path / "killed"), more, 20) < 0
    assert in_process(train_here, str(root), str(tmp_path / "killed"), more) == 0
    assert lines(tmp_path / "killed") == metrics
    weights = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("whole", "killed")]
    assert weights[0] == weights[1]


def test_unrolled_epochs_that_can_not_be_are_refused() -> None:
    with pytest.raises(ValueError, match="unrolled_epochs = 4 should be at most epochs = 3"):
        TrainSection(epochs=3, batch_size=2, unrolled_epochs=4)
    options = TrainSection(epochs=3, batch_size=2, unrolled_epochs=1)
    with pytest.raises(UserError, match=r"train.unrolled_epochs needs a model with an equilibrium; this one has none"):
        UnrolledEpochs(models.create("resnet18-cifar"), options)
    fixed = models.create("opteq-digits", in_channels=1, solver="picard", tol=0.0, max_steps=3)
    with pytest.raises(UserError, match=r"train.unrolled_epochs has no effect on a fixed number of steps"):
        UnrolledEpochs(fixed, options)
    with pytest.raises(ValueError, match="radius and unrolled_epochs exclude each other"):
        TrainSection(epochs=3, batch_size=2, unrolled_epochs=1, radius=0.9)
