"""The commands that train, evaluate and list: what they leave and what they say."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli_cases import call, finished, no_page, refused, root, train
from opteq import models, report
from opteq.models import Classifier
from opteq.training import load_recipe, open_run, recipes
from training_cases import lines

__all__ = ["finished", "no_page", "root"]  # fixtures

KEYS = {
    "epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "images_per_second", "solver_steps",
    "worst_residual", "converged", "lr", "seconds",
}  # fmt: skip


def test_what_a_run_leaves(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} >= {
        "recipe.toml", "environment.json", "metrics.jsonl", "model.safetensors", "config.json", "checkpoints",
        "tensorboard",
    }  # fmt: skip
    history = lines(finished)
    assert [line["epoch"] for line in history] == [1, 2, 3, 4, 5, 6]
    assert set(json.loads((finished / "metrics.jsonl").read_text().splitlines()[0])) >= KEYS
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    assert history[-1]["test_accuracy"] == 1.0
    assert history[-1]["converged"] == 1.0
    assert 0 < history[-1]["worst_residual"] <= 1e-3
    assert list((finished / "tensorboard").glob("events.*"))
    assert json.loads((finished / "environment.json").read_text())["packages"]["torch"]


def test_the_model_is_loaded_from_python(finished: Path) -> None:
    model = models.from_pretrained(finished)
    assert model.config["extra"]["classes"] == ["above", "below"]
    assert len(model.config["extra"]["mean"]) == 3
    with torch.no_grad():
        assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 2)


def test_tensorboard_has_the_same_numbers(finished: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(finished / "tensorboard"))
    board.Reload()
    drawn = [event.value for event in board.Scalars("accuracy/test")]
    assert drawn == pytest.approx([line["test_accuracy"] for line in lines(finished)])
    assert [event.step for event in board.Scalars("run/solver_steps")] == [1, 2, 3, 4, 5, 6]


def test_evaluate(finished: Path) -> None:
    result = call("evaluate", finished)
    assert result.exit_code == 0, result.output
    found = json.loads((finished / "evaluation.json").read_text())
    last = lines(finished)[-1]
    assert (found["samples"], found["test_accuracy"]) == (10, last["test_accuracy"])
    assert found["test_loss"] == pytest.approx(last["test_loss"], abs=1e-6)
    assert found["worst_residual"] == pytest.approx(last["test_worst_residual"], rel=1e-3)
    assert "100.00%" in result.stdout


def test_evaluate_to_another_tolerance(finished: Path) -> None:
    result = call("evaluate", finished, "--tol", "1e-6")
    assert result.exit_code == 0, result.output
    found = json.loads((finished / "evaluation.json").read_text())
    assert found["worst_residual"] <= 1e-6
    assert (found["converged"], found["tol"], found["precision"]) == (1.0, 1e-6, "no")
    assert found["solver_steps"] > lines(finished)[-1]["test_solver_steps"]
    call("evaluate", finished, "--max-steps", "1")
    assert json.loads((finished / "evaluation.json").read_text())["converged"] < 1


def test_evaluate_in_smaller_batches(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory then holds a few images; the figures are those of whole batches."""
    call("evaluate", finished)
    whole = json.loads((finished / "evaluation.json").read_text())
    sizes: list[int] = []
    forward = Classifier.forward
    monkeypatch.setattr(Classifier, "forward", lambda model, x: sizes.append(len(x)) or forward(model, x))
    result = call("evaluate", finished, "--batch-size", "3")
    assert result.exit_code == 0, result.output
    assert sizes == [3, 3, 3, 1]
    found = json.loads((finished / "evaluation.json").read_text())
    assert (found["samples"], found["test_accuracy"]) == (10, whole["test_accuracy"])
    assert found["test_loss"] == pytest.approx(whole["test_loss"], abs=1e-6)
    assert call("evaluate", finished, "--batch-size", "0").exit_code == 2


def test_an_evaluation_shows_how_far_it_is(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[tuple[str, int, list[int]]] = []

    @contextmanager
    def bar(what: str, total: int, shown: bool = True) -> Iterator[Callable[[int], None]]:
        bars.append((what, total, []))
        yield bars[-1][2].append

    monkeypatch.setattr(open_run, "progress", bar)
    call("evaluate", finished, "--batch-size", "4")
    assert bars == [("evaluating", 3, [1, 1, 1])]


def test_fewer_steps_of_a_solver_that_ends_with_plain_ones(root: Path, tmp_path: Path) -> None:
    sam = ("model.options.solver=sam", "model.options.regularizer=l1", "model.options.max_steps=10", "train.epochs=1")
    assert train(root, tmp_path / "run", *sam).exit_code == 0
    result = call("evaluate", tmp_path / "run", "--max-steps", "3")
    assert result.exit_code == 0, (result.output, result.exception)
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["solver_steps"] == 3


def test_fewer_steps_of_a_layer_whose_gradient_counts_them(root: Path, tmp_path: Path) -> None:
    assert train(root, tmp_path / "run", "model.options.gradient=unrolled", "train.epochs=1").exit_code == 0
    assert call("evaluate", tmp_path / "run", "--max-steps", "1").exit_code == 0
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["solver_steps"] <= 1


def test_an_evaluation_that_is_not_finite_is_json_all_the_same(finished: Path, tmp_path: Path) -> None:
    """JSON has neither infinity nor NaN. The folder's name, which has brackets, is told whole."""
    run = shutil.copytree(finished, tmp_path / "run [lr=1]")
    weights = load_file(run / "model.safetensors")
    weights["head.linear.bias"].fill_(math.nan)
    save_file(weights, run / "model.safetensors")
    result = call("evaluate", run)
    assert result.exit_code == 0, result.output
    assert "run [lr=1] on 10 test images" in " ".join(result.stdout.split())  # a long path may be wrapped
    found = json.loads((run / "evaluation.json").read_text(), parse_constant=pytest.fail)
    assert found["test_loss"] is None
    assert found["worst_residual"] > 0


def test_the_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe gets a line for each recipe; a narrow terminal gets names and results, both of them whole."""
    monkeypatch.delenv("COLUMNS", raising=False)
    listed = call("recipes")
    assert listed.exit_code == 0
    for name in recipes():
        assert any(f" {name} " in line and load_recipe(name).reproduces in line for line in listed.stdout.splitlines())
    monkeypatch.setenv("COLUMNS", "80")
    narrow = call("recipes").stdout
    assert max(map(len, narrow.splitlines())) <= 80
    assert all(f" {name} " in narrow for name in recipes())
    assert "…" not in narrow
    listed = call("models")
    assert listed.exit_code == 0
    assert all(f" {name} " in listed.stdout for name in models.list())
    assert "…" not in listed.stdout


def test_the_default_is_digits_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("train", *(part for one in ("train.epochs=0",) for part in ("--set", one)))
    refused(result, "recipe digits", "train.epochs = 0")
    tiny = ["train.epochs=1", "model.options.channels=2", "model.options.hidden=[2]", "train.batch_size=512"]
    result = call("train", *(part for one in tiny for part in ("--set", one)))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "runs/digits/model.safetensors").exists()
    result = call("train", "--resume")
    assert result.exit_code == 0, result.output
    assert "runs/digits had finished" in result.stdout


@pytest.mark.slow
def test_the_digits_are_learned(tmp_path: Path) -> None:
    """Half of the recipe's epochs reach what the whole recipe promises."""
    result = call("train", "--out", tmp_path / "run", "--set", "train.epochs=5")
    assert result.exit_code == 0, result.output
    last = lines(tmp_path / "run")[-1]
    assert last["test_accuracy"] >= 0.975
    assert last["converged"] == 1.0


def test_a_failing_page_loses_nothing(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: Path) -> Path:
        raise RuntimeError("no ink")

    monkeypatch.setattr(report, "write", broken)
    result = train(root, tmp_path / "run", "train.epochs=1")
    assert result.exit_code == 0
    assert "the report could not be written (no ink)" in result.stderr
    assert (tmp_path / "run/model.safetensors").exists()


def test_bfloat16(root: Path, tmp_path: Path) -> None:
    result = train(root, tmp_path / "run", "train.precision=bf16", "train.epochs=2")
    assert result.exit_code == 0, result.output
    assert all(
        weight.dtype == torch.float32
        for weight in load_file(tmp_path / "run/model.safetensors").values()
        if weight.is_floating_point()
    )
    refused(train(root, tmp_path / "half", "train.precision=fp16"), 'precision "fp16" needs a GPU')
