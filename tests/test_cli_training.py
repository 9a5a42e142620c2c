"""The commands that train and evaluate: what they leave, and what they say when something is wrong."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from opteq import models, report
from opteq.cli import app
from opteq.training import recipes
from opteq.training.checkpoints import Checkpoints
from training_cases import in_process, lines, pictures, settings, train_here

KEYS = {
    "epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "images_per_second", "solver_steps",
    "worst_residual", "converged", "lr", "seconds",
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has tests of its own, and takes longer than everything here."""

    def write(run: Path) -> Path:
        (run / "report.html").write_text("<!doctype html>")
        return run / "report.html"

    monkeypatch.setattr(report, "write", write)


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def train(root: Path, out: Path, *more: str, options: tuple[str, ...] = (), recipe: str = "digits") -> Result:
    sets = [part for one in settings(root, *more) for part in ("--set", one)]
    return call("train", recipe, "--out", out, *options, *sets)


def refused(result: Result, *words: str, status: int = 2) -> None:
    """One line on standard error, the right exit status, no traceback."""
    assert result.exit_code == status, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    said = [line for line in result.stderr.splitlines() if line]
    assert len(said) == 1, said
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in said[0], said[0]


@pytest.fixture(scope="module")
def finished(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write", lambda run: run / "report.html")
        result = train(root, out, "train.epochs=6")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\nepoch") + result.stdout.startswith("epoch") == 6
    return out


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


def test_the_lists() -> None:
    listed = call("recipes")
    assert listed.exit_code == 0
    assert all(name in listed.stdout for name in recipes())
    listed = call("models")
    assert listed.exit_code == 0
    assert all(name in listed.stdout for name in models.list())


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
    assert "runs/digits had come to its end" in result.stdout


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


# ---- what is wrong is said in a line


def test_unknown_recipe_and_key(root: Path, tmp_path: Path) -> None:
    refused(call("train", "digit"), "unknown recipe 'digit'; did you mean 'digits'?")
    refused(call("train", tmp_path / "none.toml"), "cannot be read: No such file")
    refused(call("train", "--set", "train.epoch=3"), "did you mean 'train.epochs'?")
    refused(train(root, tmp_path / "run", "model.name=opteq-digit"), "did you mean 'opteq-digits'")
    refused(train(root, tmp_path / "run", "model.options.chanels=3"), "did you mean 'channels'")
    refused(train(root, tmp_path / "run", "model.options.bound=-1"), "bound", "-1")
    refused(train(root, tmp_path / "run", "data.name=cifar"), "unknown data set 'cifar'")
    assert not (tmp_path / "run/recipe.toml").exists()


def test_an_unwritable_folder(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(train(root, tmp_path / "file/run"), "making the run folder", "Not a directory", "--out")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu(root: Path, tmp_path: Path) -> None:
    refused(train(root, tmp_path / "run", "train.device=cuda"), "torch sees no GPU here", "train.device=cpu")


def test_a_corrupt_picture(root: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(root, tmp_path / "pictures", ignore=shutil.ignore_patterns("cache"))
    (copy / "train/above/3.png").write_bytes(b"\x89PNG\r\n\x1a\nnot really")
    refused(train(copy, tmp_path / "run"), str(copy / "train/above/3.png"))


def test_a_folder_with_a_run_is_not_overwritten(root: Path, finished: Path) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    refused(train(root, finished), "already holds a run", "--resume", "another --out")
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_resume_with_another_recipe(root: Path, finished: Path) -> None:
    more = ("train.epochs=7", "optimizer.lr=0.2")
    result = train(root, finished, *more, options=("--resume",))
    refused(result, "begun with another recipe", "optimizer.lr (0.1 there, 0.2 now)", "train.epochs (6 there, 7 now)")
    refused(call("train", "--resume", "--out", finished, "--set", "train.seed=5"), "train.seed (0 there, 5 now)")


def test_resume_with_the_recipe_of_the_folder(finished: Path, tmp_path: Path) -> None:
    before = (finished / "model.safetensors").read_bytes()
    result = call("train", "--resume", "--out", finished)
    assert result.exit_code == 0, result.output
    assert "had come to its end, after step 18" in result.stdout
    assert (finished / "model.safetensors").read_bytes() == before
    refused(call("train", "--resume", "--out", tmp_path / "none"), "holds no run to go on with; name a recipe")


class Poison:
    """A pickle that leaves a file behind when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_poisoned_weights(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "model.safetensors").write_bytes(pickle.dumps(Poison(tmp_path / "poisoned")))
    refused(call("evaluate", run), "model.safetensors", "not a whole safetensors file")
    (run / "model.safetensors").unlink()
    torch.save({"weight": torch.ones(1)}, run / "pytorch_model.bin")
    refused(call("evaluate", run), "holds no finished run")
    assert not (tmp_path / "poisoned").exists()


def test_a_poisoned_checkpoint(root: Path, finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    newest = Checkpoints(run / "checkpoints").files()[0]
    newest.write_bytes(pickle.dumps(Poison(tmp_path / "poisoned")))
    (run / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match="is damaged .* passed over"):
        result = call("train", "--resume", "--out", run)
    assert result.exit_code == 0, result.output
    assert (run / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()
    assert lines(run) == lines(finished)
    assert not (tmp_path / "poisoned").exists()


def test_other_pictures(finished: Path, root: Path, tmp_path: Path) -> None:
    """Fewer pictures would shift every batch of a resumed run; other classes would be taken for each other."""
    copy = shutil.copytree(root, tmp_path / "pictures", ignore=shutil.ignore_patterns("cache"))
    (copy / "train/above/3.png").unlink()
    run = shutil.copytree(finished, tmp_path / "run")
    sets = ("--set", f"data.root={copy}", "--set", f"data.cache={tmp_path}")
    refused(call("train", "--resume", "--out", run, *sets), "begun with 40 training pictures, but there are 39 now")
    for split in ("train", "test"):
        (copy / split / "below").rename(copy / split / "a-new-name")
    refused(call("evaluate", run, "--root", copy), "the pictures have the classes a-new-name, above", "--root")


def test_evaluating_what_is_no_run(tmp_path: Path, finished: Path) -> None:
    refused(call("evaluate", tmp_path), "holds no run: there is no recipe.toml")
    refused(call("evaluate", finished, "--tol", "-1"), "tol should be a positive number")


def fill_the_disk(root: str, out: str) -> None:
    """Train until the second checkpoint, from when on the system writes no file beyond 3000 bytes."""
    save, saved = Checkpoints.save, []

    def limited(self: Checkpoints, checkpoint: object) -> Path:
        if saved:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
        saved.append(checkpoint)
        return save(self, checkpoint)  # type: ignore[arg-type]

    Checkpoints.save = limited  # type: ignore[method-assign]
    torch.set_num_threads(1)
    result = train(Path(root), Path(out))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    refused(result, "saving a checkpoint failed: File too large", "the checkpoints before it are whole", "--resume")
    sys.exit(result.exit_code)


def test_a_full_disk(root: Path, tmp_path: Path) -> None:
    assert in_process(fill_the_disk, str(root), str(tmp_path / "run")) == 2
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000003.safetensors"]
    for out in ("run", "undisturbed"):
        assert in_process(train_here, str(root), str(tmp_path / out), []) == 0
    weights = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("run", "undisturbed")]
    assert weights[0] == weights[1]
    assert lines(tmp_path / "run") == lines(tmp_path / "undisturbed")


# ---- a run that goes wrong stops itself


def test_a_loss_that_is_not_finite(root: Path, tmp_path: Path) -> None:
    more = (
        "optimizer.lr=1e30",
        "schedule.name=step",
        "schedule.milestones=[1]",
        "schedule.factor=1.0",
        "guard.every=1",
    )
    result = train(root, tmp_path / "run", *more, "optimizer.momentum=0.9")
    refused(result, "the loss is nan", "Try a lower optimizer.lr", status=3)


def test_equilibria_that_are_lost(root: Path, tmp_path: Path) -> None:
    assert train(root, tmp_path / "run", "train.epochs=1").exit_code == 0
    more = ("model.options.max_steps=1", "model.options.tol=1e-6", "guard.residual=1e-5")
    result = train(root, tmp_path / "lost", *more)
    refused(
        result, "epoch 1: ", "of the equilibria have a relative residual above 1e-05", "more solver steps", status=3
    )
    assert not (tmp_path / "lost/model.safetensors").exists()
    result = train(root, tmp_path / "strict", "model.options.max_steps=1", "guard.lost=1", "guard.converged=0.9")
    refused(result, "of the equilibria reached the solver's tolerance", "asks for 90%", status=3)


def test_the_last_good_checkpoint_stays(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is lost in the second epoch: what is kept is from the end of the first, and is good."""
    from opteq.training import trainer

    judge = trainer.judge

    def later(options: object, counts: object, where: str) -> None:
        if where == "epoch 2":
            monkeypatch.setattr(counts.__class__, "mean_loss", property(lambda self: float("nan")))
            object.__setattr__(counts, "loss", float("nan"))
        judge(options, counts, where)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer, "judge", later)
    refused(train(root, tmp_path / "run"), "epoch 2: the loss is nan", status=3)
    found = Checkpoints(tmp_path / "run/checkpoints").latest()
    assert found is not None
    assert (found.step, found.values["epoch"], len(lines(tmp_path / "run"))) == (3, 1, 1)
