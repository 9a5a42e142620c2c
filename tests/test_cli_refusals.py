"""What is wrong is said in one line, with the right exit status; a run that goes wrong stops itself."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from PIL import Image

from cli_cases import call, finished, no_page, refused, root, train
from opteq import cli, models
from opteq.common.errors import UserError
from opteq.common.files import lock_folder
from opteq.report.run import read_run
from opteq.training import open_run
from opteq.training.run.checkpoints import Checkpoints
from training_cases import in_process, lines, train_here

__all__ = ["finished", "no_page", "root"]  # fixtures


def test_unknown_recipe_and_key(root: Path, tmp_path: Path) -> None:
    refused(call("train", "digit"), "unknown recipe 'digit'; did you mean 'digits'? `opteq recipes` lists them all")
    refused(call("train", tmp_path / "none.toml"), "cannot be read: No such file")
    refused(call("train", "--set", "train.epoch=3"), "did you mean 'train.epochs'?")
    refused(train(root, tmp_path / "run", "model.name=opteq-digit"), "did you mean 'opteq-digits'")
    refused(train(root, tmp_path / "run", "model.options.chanels=3"), "did you mean 'channels'")
    refused(train(root, tmp_path / "run", "model.options.bound=-1"), "bound", "-1")
    refused(
        train(root, tmp_path / "run", "model.options.num_classes=7"), "num_classes", "its value comes from the data"
    )
    refused(train(root, tmp_path / "run", "data.name=cifar"), "unknown data set 'cifar'")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("recipe", "override", "words"),
    [
        ("denoiser-weak", "test.sigmas=25", "test.sigmas = 25 is not right: it should be a list in brackets"),
        ("digits", "augment.flip=yes", 'augment.flip = "yes" is not right: it should be true or false'),
        ("digits", "model.options=3", "model.options = 3 is not right: it should be a table of options"),
        ("digits", "name=a b", "it should consist of letters, digits, '.', '_' and '-'"),
        ("digits", "data.root=", "--set takes KEY=VALUE, such as train.epochs=20; got 'data.root='"),
    ],
)
def test_recipes_are_refused_in_words_of_toml(recipe: str, override: str, words: str, tmp_path: Path) -> None:
    refused(call("train", recipe, "--out", tmp_path / "run", "--set", override), words)


def test_recipes_of_another_task_or_version(finished: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\ntask = "denoise"\n[train]\nsteps = 3\n')
    refused(call("train", file), f"recipe {file}: task = 'denoise' is not right: it should be 'denoising', or left out")
    refused(call("unrolling", "denoiser-weak", "--out", tmp_path / "rows"), "denoiser-weak trains a denoiser")
    run = shutil.copytree(finished, tmp_path / "run")
    with open(run / "recipe.toml", "a") as recipe:
        recipe.write("\n[future]\nx = 1\n")
    for command in (("evaluate", run), ("train", "--resume", "--out", run)):
        refused(call(*command), "perhaps of another version of opteq: unknown key 'future'")


def test_a_refused_run_leaves_no_folder(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "new/runs/one"
    refused(train(root, out, "data.root=/nowhere"), "/nowhere")
    refused(train(root, out, "model.options.chanels=3"), "did you mean 'channels'")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "own").mkdir()
    refused(train(root, tmp_path / "own", "data.name=cifar"), "unknown data set 'cifar'")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/notes").touch()
    refused(train(root, tmp_path / "kept/run", "model.options.bound=-1"), "bound")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "notes", "own"]


def test_an_unwritable_folder(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(train(root, tmp_path / "file/run"), "making the run folder", "Not a directory", "--out")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_folder_that_may_not_be_entered(
    root: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses to say what is in it, as it would somebody who is not root."""
    closed = shutil.copytree(finished, tmp_path / "closed")
    stat = os.stat

    def refusing(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{closed}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", refusing)
    words = f"looking into {closed}", "Permission denied", "mend its permissions"
    for result in (train(root, closed), call("train", "--resume", "--out", closed), call("evaluate", closed)):
        refused(result, *words)
    for ask in (models.from_pretrained, read_run):
        with pytest.raises(UserError, match=f"looking into {closed} failed: Permission denied"):
            ask(closed)


def test_an_evaluation_that_cannot_be_kept_is_not_begun(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(target: Path, content: bytes) -> NoReturn:
        raise PermissionError(13, "Permission denied", str(target))

    def begun(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the test began, only to be lost")

    monkeypatch.setattr(open_run, "draft", refusing)
    monkeypatch.setattr(open_run, "validate", begun)
    refused(call("evaluate", finished), "writing the evaluation", "Permission denied", "a copy of the run elsewhere")


def test_images_of_a_size_that_the_model_cannot_take(root: Path, tmp_path: Path) -> None:
    """Windows of 6x6 can be divided by 3, but whole images of 8x8 can not: known before an epoch is spent on them."""
    out = tmp_path / "run"
    branch = ("model.name=popteq-193k", "model.options.scales=[3]")
    refused(train(root, out, *branch), "popteq-193k cannot take images of 8x8", "divide by 3", "data.image_size")
    window = ("augment.crop_padding=0", "augment.crop_height=6", "augment.crop_width=6")
    refused(train(root, out, *branch, *window), "cannot take images of 8x8", "data.image_size")
    too_small = (*window[:2], "augment.crop_width=4", "data.image_size=6")
    refused(train(root, out, *branch, *too_small), "cannot take images of 6x4", "augment.crop_height and crop_width")
    assert not out.exists()
    result = train(root, out, *branch, *window, "data.image_size=9", "train.epochs=1")
    assert result.exit_code == 0, result.output
    changed = (out / "recipe.toml").read_text().replace("image_size = 9", "image_size = 8")
    (out / "recipe.toml").write_text(changed)
    refused(call("evaluate", out), "cannot take images of 8x8", "data.image_size")


def test_no_gpu(root: Path, tmp_path: Path) -> None:
    refused(train(root, tmp_path / "run", "train.device=cuda"), "torch finds none", "train.device=cpu")


def test_a_corrupt_image(root: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(root, tmp_path / "images", ignore=shutil.ignore_patterns("cache"))
    (copy / "train/above/3.png").write_bytes(b"\x89PNG\r\n\x1a\nnot really")
    refused(train(copy, tmp_path / "run"), str(copy / "train/above/3.png"))


def test_a_folder_with_a_run_is_not_overwritten(root: Path, finished: Path) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    refused(train(root, finished), "already holds a run", "--resume", "another --out")
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_resume_with_another_recipe(root: Path, finished: Path) -> None:
    more = ("train.epochs=7", "optimizer.lr=0.2")
    result = train(root, finished, *more, options=("--resume",))
    refused(result, "started with another recipe", "optimizer.lr (0.1 there, 0.2 now)", "train.epochs (6 there, 7 now)")
    refused(call("train", "--resume", "--out", finished, "--set", "train.seed=5"), "train.seed (0 there, 5 now)")
    other = call("train", "opteq-162k-cifar10", "--resume", "--out", finished)
    refused(other, "with this one: name ('tiny' there, 'opteq-162k-cifar10' now), ", "more differ")


def test_resume_with_the_recipe_of_the_folder(finished: Path, tmp_path: Path) -> None:
    before = (finished / "model.safetensors").read_bytes()
    result = call("train", "--resume", "--out", finished)
    assert result.exit_code == 0, result.output
    assert "had finished, after step 18" in result.stdout
    assert (finished / "model.safetensors").read_bytes() == before
    refused(call("train", "--resume", "--out", tmp_path / "none"), "holds no run to resume; name a recipe")


def test_resume_is_offered_where_there_is_a_checkpoint(root: Path, finished: Path, tmp_path: Path) -> None:
    run, image = shutil.copytree(finished, tmp_path / "run"), root / "test/above/0.png"
    asking = (("evaluate", run), ("predict", run, image), ("figures", run), ("restore", image, "o.png", "--model", run))
    (run / "model.safetensors").unlink()
    for command in asking:
        refused(call(*command), f"holds no finished run: continue with `opteq train --resume --out {run}`")
    with lock_folder(run, ""):
        for command in (*asking, ("train", "digits", "--out", run)):
            refused(call(*command), f"another process is training in {run}: wait for it")
    shutil.rmtree(run / "checkpoints")
    again = f"`opteq train {run / 'recipe.toml'} --out DIR`"
    for command in asking:
        refused(call(*command), f"no checkpoint to continue from; start again with {again}")
    result = train(root, run)
    refused(result, "no checkpoint to continue from", "give another --out, or remove its metrics.jsonl to start over")
    assert "--resume" not in result.stderr
    (run / "model.safetensors").touch()
    refused(train(root, run), "no checkpoint to continue from", "remove its model.safetensors to start over")
    (run / "model.safetensors").unlink()
    result = call("train", "--resume", "--out", run)
    assert result.exit_code == 0, result.output
    assert "has no checkpoint: training begins again" in " ".join(result.stdout.split())


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
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = call("train", "--resume", "--out", run)
    assert result.exit_code == 0, result.output
    (said,) = result.stderr.splitlines()
    assert said.startswith(f"opteq: warning: the checkpoint {newest} is damaged")
    assert (run / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()
    assert lines(run) == lines(finished)
    assert not (tmp_path / "poisoned").exists()


def test_other_images(finished: Path, root: Path, tmp_path: Path) -> None:
    """Fewer images would shift every batch of a resumed run; other classes would be taken for each other."""
    copy = shutil.copytree(root, tmp_path / "images", ignore=shutil.ignore_patterns("cache"))
    (copy / "train/above/3.png").unlink()
    run = shutil.copytree(finished, tmp_path / "run")
    sets = ("--set", f"data.root={copy}", "--set", f"data.cache={tmp_path}")
    refused(call("train", "--resume", "--out", run, *sets), "started with 40 training images, but there are 39 now")
    shutil.copy(root / "train/above/3.png", copy / "train/above/3.png")
    for split in ("train", "test"):
        (copy / split / "below").rename(copy / split / "a-new-name")
    refused(call("train", "--resume", "--out", run, *sets), "classes above, below, but the images have a-new-name")
    refused(call("evaluate", run, "--root", copy), "the images have the classes a-new-name, above", "--root")


def test_evaluating_what_is_no_run(tmp_path: Path, finished: Path) -> None:
    refused(call("evaluate", tmp_path), "holds no run: there is no recipe.toml")
    refused(call("evaluate", tmp_path / "none"), f"{tmp_path / 'none'}: no such folder; give that of a run")
    refused(call("evaluate", finished, "--tol", "-1"), "tol should be a positive finite number; got -1.0")
    refused(call("evaluate", finished, "--tol", "inf"), "tol should be a positive finite number; got inf")
    refused(call("evaluate", finished, "--precision", "fp16", "--device", "cpu"), "needs a GPU", "--precision no")
    refused(call("evaluate", finished, "--device", "gpu"), "unknown device 'gpu'", "auto, cpu, cuda")
    refused(call("evaluate", finished, "--precision", "fp32"), "unknown precision 'fp32'; did you mean 'fp16'?")


def test_evaluation_normalises_as_training_did(finished: Path, root: Path, tmp_path: Path) -> None:
    """Training images under another root have other colours; the network still knows only its own."""
    copy = shutil.copytree(root, tmp_path / "images", ignore=shutil.ignore_patterns("cache"))
    for path in (copy / "train").rglob("*.png"):
        Image.new("RGB", (8, 8), "white").save(path)
    run = shutil.copytree(finished, tmp_path / "run")
    assert call("evaluate", run).exit_code == 0
    before = json.loads((run / "evaluation.json").read_text())
    assert call("evaluate", run, "--root", copy).exit_code == 0
    assert json.loads((run / "evaluation.json").read_text()) == before


def test_of_several_processes_one_speaks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher ends all processes when one has left: the others leave the first one time to say what is wrong."""
    waits: list[float] = []
    monkeypatch.setattr(cli.time, "sleep", waits.append)
    monkeypatch.setenv("RANK", "1")
    refused(call("train", "digit"), "opteq: process 1: unknown recipe 'digit'")
    assert waits == [cli.PATIENCE]
    monkeypatch.setenv("RANK", "0")
    refused(call("train", "digit"), "opteq: unknown recipe 'digit'")
    assert len(waits) == 1


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
    refused(result, "failed: File too large", "step-00000006.safetensors", "with --resume: the checkpoints are intact")
    sys.exit(result.exit_code)


def test_a_full_disk(root: Path, tmp_path: Path) -> None:
    assert in_process(fill_the_disk, str(root), str(tmp_path / "run")) == 2
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000003.safetensors"]
    assert in_process(train_here, str(root), str(tmp_path / "run"), []) == 0
    assert train(root, tmp_path / "undisturbed").exit_code == 0
    weights = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("run", "undisturbed")]
    assert weights[0] == weights[1]
    assert lines(tmp_path / "run") == lines(tmp_path / "undisturbed")


def refuse_the_event_file(root: str, out: str) -> None:
    """Train where the system writes no event file for TensorBoard, nor anything else that is not empty."""
    from torch.utils.tensorboard import SummaryWriter

    make = SummaryWriter.__init__

    def limited(*arguments: Any, **options: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        make(*arguments, **options)

    SummaryWriter.__init__ = limited
    threading.excepthook = lambda _: None  # TensorBoard writes in a thread, which prints the error as well
    result = train(Path(root), Path(out))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    refused(result, "failed: File too large", "run/tensorboard", "make room, then start again")
    sys.exit(result.exit_code)


def test_a_disk_too_full_for_tensorboard(root: Path, tmp_path: Path) -> None:
    assert in_process(refuse_the_event_file, str(root), str(tmp_path / "run")) == 2


# ---- a run that goes wrong stops itself


def test_a_loss_that_is_not_finite(root: Path, tmp_path: Path) -> None:
    more = (
        "optimizer.lr=1e30",
        "schedule.name=step",
        "schedule.milestones=[1]",
        "schedule.factor=1.0",
        "guard.every=1",
        "guard.skipped=3",
    )
    result = train(root, tmp_path / "run", *more, "optimizer.momentum=0.9")
    refused(
        result,
        "epoch 2, step 5: 4 steps in a row were skipped because their loss or gradient was not finite",
        "Try a lower optimizer.lr",
        status=3,
    )


def test_equilibria_that_are_lost(root: Path, tmp_path: Path) -> None:
    assert train(root, tmp_path / "run", "train.epochs=1").exit_code == 0
    more = ("model.options.max_steps=1", "model.options.tol=1e-6", "guard.residual=1e-5")
    result = train(root, tmp_path / "lost", *more)
    refused(
        result, "epoch 1: ", "of the equilibria have a relative residual above 1e-05", "more solver steps", status=3
    )
    assert not (tmp_path / "lost/model.safetensors").exists()
    result = train(root, tmp_path / "strict", "model.options.max_steps=1", "guard.lost=1", "guard.converged=0.9")
    refused(result, "of the equilibria reached the solver's tolerance", "requires 90%", status=3)


def test_the_last_good_checkpoint_stays(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second epoch fails: what is kept is from the end of the first, and is good."""
    from opteq.training import trainer

    check = trainer.check_progress

    def later(options: object, counts: object, where: str, ended: bool) -> None:
        if where == "epoch 2":
            object.__setattr__(counts, "samples", 0)
        check(options, counts, where, ended)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer, "check_progress", later)
    refused(train(root, tmp_path / "run"), "epoch 2: 0 steps in a row", status=3)
    found = Checkpoints(tmp_path / "run/checkpoints").latest()
    assert found is not None
    assert (found.step, found.values["epoch"], len(lines(tmp_path / "run"))) == (3, 1, 1)


def test_bench_says_where_it_went() -> None:
    refused(call("bench", "--device", "cpu"), "in a clone of opteq run `make bench`")
