"""Table 8 of the OptEq paper by one command, and the size of features that a run reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from opteq import models
from opteq.cli import app
from opteq.training import devices
from opteq.training.feature_size import FeatureSize
from opteq.training.unrolling import unrolling_table
from training_cases import make_images, settings


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
