"""A file that can't be written: one line names it, says why and what to do, and nothing is lost."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from cli_cases import call, finished, no_page, refused, root, train
from opteq.common.errors import UserError
from opteq.common.files import FileError, plain_errors, write_atomically
from opteq.training.run import records
from training_cases import in_process, lines

__all__ = ["finished", "no_page", "root"]  # fixtures


def blocked(run: Path, *names: str) -> Path:
    """A folder in the place of each of a run's files."""
    for name in names:
        shutil.rmtree(run / name, ignore_errors=True)
        (run / name).unlink(missing_ok=True)
        (run / name / "inside").mkdir(parents=True)
    return run


@pytest.mark.parametrize(
    ("number", "mend"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EACCES, "mend its permissions"),
        (errno.EROFS, "make it writable"),
        (errno.EIO, "mend that"),
    ],
)
def test_the_file_is_named_and_not_its_draft(
    number: int, mend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refusing)
    with pytest.raises(UserError) as error, plain_errors("saving", "or give up"):
        write_atomically(tmp_path / "file", b"new")
    assert str(error.value) == f"saving failed: {os.strerror(number)} ({tmp_path / 'file'}); {mend}, or give up"
    assert not list(tmp_path.iterdir())


def test_the_outer_block_knows_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    target = tmp_path / "file"
    with (
        pytest.raises(FileError) as error,
        plain_errors("training", lambda: "then continue"),
        plain_errors(f"writing {target}", "or choose another place"),
    ):
        write_atomically(target, b"new")
    assert str(error.value) == f"writing {target} failed: Is a directory; move away what is in its place, then continue"


@pytest.mark.parametrize("name", ["recipe.toml", "environment.json", "metrics.jsonl"])
def test_a_run_that_cannot_begin_offers_no_resume(name: str, root: Path, tmp_path: Path) -> None:
    result = train(root, blocked(tmp_path / "run", name))
    refused(result, f"Is a directory ({tmp_path / 'run' / name})", "start again: no checkpoint was saved before")
    assert "--resume" not in result.stderr


def test_weights_that_cannot_be_written_are_written_later(root: Path, tmp_path: Path) -> None:
    run = blocked(tmp_path / "run", "config.json")
    refused(train(root, run, "train.epochs=1"), f"({run / 'config.json'})", "then continue with --resume: the check")
    shutil.rmtree(run / "config.json")
    assert call("train", "--resume", "--out", run).exit_code == 0
    assert (run / "model.safetensors").is_file()


def test_metrics_on_a_full_disk(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        full = partial(open, "/dev/full")
        patch.setattr(records, "open", lambda _, *args, **more: full(*args, **more), raising=False)
        result = train(root, tmp_path / "run")
    refused(result, f"No space left on device ({tmp_path / 'run/metrics.jsonl'}); make room, then continue")
    assert call("train", "--resume", "--out", tmp_path / "run").exit_code == 0
    assert [line["epoch"] for line in lines(tmp_path / "run")] == [1, 2, 3]


COMMANDS: dict[str, Callable[[Path, Path], tuple[str | Path, ...]]] = {
    "evaluation.json": lambda run, _: ("evaluate", run),
    "robustness.json": lambda run, _: ("evaluate", run, "--corruptions", "--only", "fog", "--images", "2"),
    "robustness.svg": lambda run, _: ("evaluate", run, "--corruptions", "--only", "fog", "--images", "2"),
    "figures/convergence.png": lambda run, _: ("figures", run, "--only", "convergence"),
    "figures/captions.md": lambda run, _: ("figures", run, "--only", "convergence"),
    "model.ts": lambda run, _: ("export", run, "--format", "torchscript"),
    "why.html": lambda run, root: ("predict", run, root / "test/above/0.png", "--explain", run / "why.html"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_name_the_file(name: str, root: Path, finished: Path, tmp_path: Path) -> None:
    run = blocked(shutil.copytree(finished, tmp_path / "run"), name)
    result = call(*COMMANDS[name](run, root))
    refused(result, str(run / name), "failed: Is a directory", "move away what is in its place")
    assert not list(run.rglob(".*"))


def test_a_table_of_unrolling(root: Path, tmp_path: Path) -> None:
    tiny = [part for one in ("train.epochs=1", f"data.root={root}") for part in ("--set", one)]
    tiny += ["--set", "data.name=folder", "--set", "model.options.pool=1", "--set", f"data.cache={root / 'cache'}"]
    out = blocked(tmp_path, "unrolling.json")
    result = call("unrolling", "digits", "--out", out, "--steps", "2", "--threshold", "0.1", *tiny)
    refused(result, f"Is a directory ({out / 'unrolling.json'})", "run this again: the rows are kept")


def test_a_restored_image_is_refused_before_it_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opteq.inference import restore

    def refusing(target: Path, content: bytes) -> None:
        raise PermissionError(13, "Permission denied", str(target))

    Image.new("L", (16, 16)).save(tmp_path / "in.png")
    monkeypatch.setattr(restore, "restore", lambda *_: pytest.fail("it was computed"))
    words = ("restore", tmp_path / "in.png"), ("--model", "denoiser-convex")
    refused(call(*words[0], tmp_path / "out.psd", *words[1]), "the ending should be that of an image format")
    monkeypatch.setattr(restore, "draft", refusing)
    refused(call(*words[0], tmp_path / "out.png", *words[1]), f"writing {tmp_path / 'out.png'} failed: Permission")


def export_onto_a_full_disk(run: str) -> None:
    """Export where the system writes no file beyond 300 bytes."""
    torch.set_num_threads(1)
    call("export", run, "--format", "torchscript", "--out", f"{run}/first.ts")  # loads all that is loaded late
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
    results: list[Any] = [call("export", run, "--format", name) for name in ("torchscript", "exported")]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for result, ending in zip(results, ("ts", "pt2"), strict=True):
        refused(result, f"writing {run}/model.{ending} failed: File too large; make room")
    sys.exit(7)


def test_an_export_onto_a_full_disk_ends_in_a_line(finished: Path, tmp_path: Path) -> None:
    """torch's own writer ends the process there."""
    run = shutil.copytree(finished, tmp_path / "run")
    assert in_process(export_onto_a_full_disk, str(run)) == 7
