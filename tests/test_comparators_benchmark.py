"""The benchmark of comparators: rows of finished and unfinished runs, what is refused, trainings that continue."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import comparators
from opteq import models
from opteq.training import load_recipe
from opteq.training.recipe.files import to_toml

LINE = {
    "test_accuracy": 0.5, "seconds": 3.0, "peak_memory_mb": 100.0, "test_solver_steps": 4.25,
    "test_worst_residual": 1e-3,
}  # fmt: skip


def make_run(folder: Path, name: str, epochs: int, **files: dict[str, Any]) -> Path:
    model = models.create("opteq-digits", num_classes=10, in_channels=1)
    run = model.save_pretrained(folder / name)
    (run / "recipe.toml").write_text(to_toml(load_recipe("digits", ["train.epochs=3"])))
    lines = [{**LINE, "epoch": n + 1, "test_accuracy": 0.5 + n / 10, "seconds": 3.0 + n} for n in range(epochs)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for file, found in files.items():
        (run / f"{file}.json").write_text(json.dumps(found))
    return run


def corrupted(accuracy: float) -> dict[str, Any]:
    found = {"clean": 0.9, "images": 9, "mean": accuracy, "seed": 0, "accuracy": {"fog": [accuracy] * 5}}
    return {"corruptions": found}


def test_rows_of_finished_and_of_unfinished_runs(tmp_path: Path) -> None:
    whole = make_run(tmp_path, "whole", 3, robustness=corrupted(0.6), pgd={"accuracy": 0.25}, alone={"ms": 12.34})
    part = make_run(tmp_path, "part", 2)
    reference = make_run(tmp_path, "reference", 3, robustness=corrupted(0.8))
    _, _, first, second = comparators.table([whole, part], reference).splitlines()
    size = f"{models.describe('opteq-digits').parameters - 288:,}"  # one channel of the stem in place of three
    cells = [cell.strip() for cell in first.strip("|").split("|")]
    assert cells[:5] == ["whole", size, "3", "70.00 %", ""]
    assert cells[5:] == ["4.0", "12.3", "100", "4.2", "1.0e-03", "60.00 %", "2.000", "25.00 %"]
    cells = [cell.strip() for cell in second.strip("|").split("|")]
    assert cells[:4] == ["part", size, "2 of 3", "60.00 %"]
    assert cells[10:] == ["", "", ""]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table", "nothing"], "nothing has no finished epoch"),
        (["train", "no-such", "--out", "runs"], "there is no recipe 'no-such': `opteq recipes` lists them"),
        (["train", "digits", "--out", "runs", "--epochs", "0"], "--epochs should be at least 1; got 0"),
        (["train", "cifar10-jpeg-resnet18", "--out", "runs"], "data set 'folder' needs root"),
    ],
)
def test_what_is_refused(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["comparators", *words])
    with pytest.raises(SystemExit) as stopped:
        comparators.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_learning_rates_grow_by_the_root_of_the_batch() -> None:
    options = argparse.Namespace(epochs=2, data=None, batch=512, set=["train.seed=1"])
    for name, rate in (("cifar10-jpeg-resnet18", 0.2), ("cifar10-jpeg-mondeq-172k", 2e-3)):
        recipe = comparators._recipe(name, options)
        assert (recipe.train.batch_size, recipe.train.epochs, recipe.train.seed) == (512, 2, 1)
        assert recipe.optimizer.lr == pytest.approx(rate)


@pytest.mark.slow  # five processes; that trainings stop and continue is tested where they are
def test_what_is_stopped_continues_later(tmp_path: Path) -> None:
    command = [sys.executable, comparators.__file__, "train", "digits", "--epochs", "400", "--out", str(tmp_path)]
    metrics = tmp_path / "digits" / "metrics.jsonl"
    done = 0
    for _ in range(2):
        before = done
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            while len(metrics.read_text().splitlines() if metrics.exists() else ()) <= done:
                assert process.poll() is None
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            said, _ = process.communicate(timeout=120)
        assert "digits: ended with status 143: stopped by signal 15" in said
        assert process.returncode == 128 + signal.SIGTERM
        done = len(metrics.read_text().splitlines())
        assert f"digits: epoch {before + 1}," in said
    late = subprocess.run([*command, "--minutes", "0"], capture_output=True, text=True, check=True).stdout
    assert "not started: digits" in late
    assert f"| {done} of 400 |" in late


@pytest.mark.slow
def test_what_has_finished_is_measured(tmp_path: Path) -> None:
    words = ["train", "digits", "--epochs", "1", "--images", "5", "--out", str(tmp_path)]
    said = subprocess.run([sys.executable, comparators.__file__, *words], capture_output=True, text=True, check=True)
    assert "ended with status 0: done" in said.stdout
    assert json.loads((tmp_path / "digits" / "pgd.json").read_text())["asked"] == 5
    assert json.loads((tmp_path / "digits" / "robustness.json").read_text())["corruptions"]["images"] == 5
