"""The command line under test: calling it, and what it says when it refuses."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest
from typer import testing
from typer.testing import CliRunner, Result

from opteq import report
from opteq.cli import app
from training_cases import make_images, settings

# Typer makes the command from the functions anew at each call, which takes longer than most calls.
testing._get_command = functools.cache(testing._get_command)  # type: ignore[attr-defined]


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


class Shared:
    """Images and a run on them, made once in a process, whichever files of tests ask for them."""

    root: Path | None = None
    run: Path | None = None


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if Shared.root is None:
        Shared.root = make_images(tmp_path_factory.mktemp("images"))
    return Shared.root


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has tests of its own, and takes longer than everything here."""

    def write(run: Path) -> Path:
        (run / "report.html").write_text("<!doctype html>")
        return run / "report.html"

    monkeypatch.setattr(report, "write", write)


@pytest.fixture(scope="module")
def finished(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy for each file of tests, which may leave more in it."""
    if Shared.run is None:
        out = tmp_path_factory.mktemp("runs") / "finished"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(report, "write", lambda run: run / "report.html")
            result = train(root, out, "train.epochs=6")
        assert result.exit_code == 0, result.output
        assert result.stdout.count("\nepoch") + result.stdout.startswith("epoch") == 6
        Shared.run = out
    return shutil.copytree(Shared.run, tmp_path_factory.mktemp("runs") / "finished")
