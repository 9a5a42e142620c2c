"""What users read: representations, suggestions, certificates, progress and evaluations."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import opteq
from cli_cases import call, no_page, refused, root, train  # noqa: F401
from opteq import operators as op
from opteq.report.html.numbers import with_symbols
from opteq.training import load_recipe
from opteq.training.metrics import Metrics
from opteq.training.run.checkpoints import Checkpoints
from opteq.training.run.progress import ProgressDisplay


def layer() -> opteq.Equilibrium:
    torch.manual_seed(0)
    return opteq.Equilibrium(opteq.OptEq(opteq.operators.Dense(4, 6, bound=0.9), nn.Linear(3, 6)))


def test_a_solution_is_printed_in_one_line() -> None:
    shown = repr(layer().solve(torch.randn(5, 3)))
    assert "tensor(" not in shown
    assert "\n" not in shown
    assert "features (5, 4); state (5, 6); Anderson: 5 CONVERGED; at most" in shown


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("solver", opteq.Anderson, r"solver should be .*did you mean Anderson\(\)\?"),
        ("gradient", opteq.Implicit, r"gradient should be .*did you mean Implicit\(\)\?"),
        ("solver", "anderson", "solver should be a solver"),
        ("problem", nn.Linear(2, 2), "problem should be a hidden problem"),
    ],
)
def test_parts_are_checked_when_they_are_assigned(name: str, value: object, words: str) -> None:
    made = layer()
    with pytest.raises(TypeError, match=words):
        setattr(made, name, value)
    made.solver = opteq.Picard()
    assert isinstance(made.solver, opteq.Picard)


@pytest.mark.parametrize(
    ("problem", "x", "words"),
    [
        (opteq.OptEq(op.Dense(4, 8), nn.Linear(3, 6)), torch.randn(2, 3), "8 entries"),
        (opteq.OptEq(op.Conv2d(4, 8, 3), nn.Conv2d(3, 6, 1)), torch.randn(2, 3, 5, 5), "8 channels"),
        (opteq.DeepOptEq([(op.Dense(4, 8), nn.Linear(3, 6))]), torch.randn(2, 3), "8 entries"),
        (opteq.MOptEq([opteq.Branch(op.Dense(4, 8), nn.Linear(3, 6))]), torch.randn(2, 3), "8 entries"),
    ],
)
def test_an_injection_of_the_wrong_width_is_named(problem: opteq.problems.Problem, x: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=rf"U x \+ b should have {words}, as many as the output of W; it has 6"):
        problem(x)


def test_a_changed_recipe_does_not_claim_the_result() -> None:
    assert load_recipe("digits").reproduces
    assert load_recipe("digits", ["name=mine", "train.device=cpu", "train.epochs=10"]).reproduces
    assert load_recipe("digits", ["train.epochs=2"]).reproduces == ""
    assert load_recipe("digits", ["model.options.hidden=[8]"]).reproduces == ""


def test_a_table_is_no_key(tmp_path: Path) -> None:
    words = ("'train' is a table of the recipe", "train.epochs")
    refused(call("train", "digits", "--out", tmp_path / "run", "--set", "train=3"), *words)


def test_certificates_are_in_symbols_throughout() -> None:
    said = with_symbols("phi is strongly convex where L |W|^2 < mu, so phi + gamma R has exactly one minimiser")
    assert said == "φ is strongly convex where L |W|² < μ, so φ + γ R has exactly one minimiser."
    W = opteq.operators.Dense(4, 6, bound=0.9)
    problem = opteq.OptEq(W, nn.Linear(3, 6), regularizer=opteq.regularizers.Ridge(), gamma=0.5)
    for reason in problem.certificate().reasons.values():
        assert not re.search(r"\b(mu|gamma|phi|psi|alpha|lambda|tau|sigma|hess|grad)\b", with_symbols(reason))


@pytest.mark.parametrize("width", [80, 140])
def test_the_progress_bar_fits(width: int) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=width)
    usual = dict.fromkeys(("correct", "label_count", "top5", "residual", "lost", "converged"), 50.0)
    counts = Metrics(loss=120.0, samples=100.0, solves=100.0, steps=1234.0, worst=3e-4, **usual)
    with ProgressDisplay(100, 782, console=console) as display:
        display.epoch(41)
        display.batch(500, lambda: counts)
        display._bar.refresh()  # type: ignore[union-attr]
    shown = written.getvalue()
    assert "…" not in shown
    assert "loss 1.200  acc 100.0%" in shown
    assert "12.3 steps" in shown
    assert ("worst 3e-04" in shown) == (width == 140)


def test_a_first_checkpoint_on_a_full_disk_claims_no_earlier_ones(
    root: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(self: Checkpoints, checkpoint: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "save", full)
    result = train(root, tmp_path / "run")
    refused(result, "failed: No space left on device", "make room, then start again: no checkpoint was saved before")


def test_an_evaluation_needs_test_images_alone(root: Path, tmp_path: Path) -> None:  # noqa: F811
    run = tmp_path / "run"
    assert train(root, run, "train.epochs=1").exit_code == 0
    shutil.copytree(root / "test", tmp_path / "other" / "test")
    with_all, alone = call("evaluate", run), call("evaluate", run, "--root", tmp_path / "other")
    assert alone.exit_code == 0, alone.output
    assert "top-5" not in alone.stdout  # there are two classes
    accuracy = re.compile(r"accuracy *│ *([\d.]+%)")
    assert accuracy.findall(alone.stdout) == accuracy.findall(with_all.stdout) != []


def test_flags_show_no_type() -> None:
    lines = [line for line in call("train", "--help").stdout.splitlines() if "--resume" in line]
    assert len(lines) == 1
    assert "bool" not in lines[0].lower()


@pytest.mark.parametrize("command", ["", "train", "evaluate", "play"])
def test_help_names_flags_without_a_type(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    result = call(*command.split(), "--help")
    assert result.exit_code == 0
    assert "--help" in result.output
    assert "bool" not in result.output.lower()


def test_a_function_that_fails_for_the_first_state_says_which_shape_that_has() -> None:
    layer = opteq.Equilibrium(opteq.FixedPoint(lambda z, x: torch.nn.functional.linear(z, torch.ones(5, 5)) + x))
    with pytest.raises(
        RuntimeError, match=r"shapes cannot be multiplied .*the state has shape \(2, 3\), as start\(x\)"
    ):
        layer(torch.zeros(2, 3))
