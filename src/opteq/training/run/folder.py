"""The folder of a run: its files, and whether a run may start or continue there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from opteq.common.errors import UserError
from opteq.common.files import check_readable, draft, lock_folder, plain_errors, remove_drafts, write_atomically
from opteq.common.nested import flattened
from opteq.training.recipe.files import AnyRecipe, load_any_recipe, to_toml
from opteq.training.run.checkpoints import Checkpoints

# Keys that may change when a run is resumed, on another machine for instance.
MAY_DIFFER = frozenset({
    "data.root", "data.cache", "train.device", "train.checkpoint_steps", "train.test_batch_size",
    "reproduces",  # it is empty where something else differs
})  # fmt: skip
SHOWN = 4  # differences that are listed


def writing_evaluation(folder: Path) -> AbstractContextManager[None]:
    """Errors of the file system say what was written, and what to do."""
    return plain_errors(f"writing the evaluation of {folder}", "or evaluate a copy of the run elsewhere")


class RunFolder:
    """``recipe.toml``, ``environment.json``, ``metrics.jsonl``, ``checkpoints/``, ``tensorboard/``, and at the end
    ``model.safetensors``, ``config.json`` and ``report.html``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def recipe_file(self) -> Path:
        """The recipe that the run was started with."""
        return self.path / "recipe.toml"

    def holds_a_run(self) -> bool:
        """Whether the folder holds results that a new run would overwrite.

        A run that ended before its first checkpoint leaves a recipe and an empty ``metrics.jsonl``, which may be
        overwritten.
        """
        check_readable(self.path)
        metrics = self.path / "metrics.jsonl"
        return (
            bool(Checkpoints(self.checkpoints).files())
            or (self.path / "model.safetensors").exists()
            or (metrics.is_file() and metrics.stat().st_size > 0)
        )

    def recipe(self) -> AnyRecipe:
        """The recipe of the run that is here."""
        check_readable(self.path)
        if not self.path.is_dir():
            raise UserError(f"{self.path}: no such folder; give that of a run, such as runs/digits")
        if not self.recipe_file.is_file():
            raise UserError(f"{self.path} holds no run: there is no recipe.toml in it. `opteq train --out` makes one")
        return load_any_recipe(self.recipe_file)

    def check_finished(self) -> None:
        """Raise unless the run has ended with its weights; the message says how it goes on."""
        if (self.path / "model.safetensors").exists():
            return
        self._refuse_while_training()
        if Checkpoints(self.checkpoints).files():
            way = f"continue with `opteq train --resume --out {self.path}`"
        else:
            way = f"it has no checkpoint to continue from; start again with `opteq train {self.recipe_file} --out DIR`"
        raise UserError(f"{self.path} holds no finished run: {way}")

    def check_evaluation(self, tol: float | None) -> None:
        """Raise unless the run has ended, and ``tol`` is a tolerance or None."""
        self.check_finished()
        if tol is not None and not 0 < tol < math.inf:
            raise UserError(f"tol should be a positive finite number; got {tol}")

    def _refuse_while_training(self) -> None:
        with self._locked(shared=True):
            pass

    def _locked(self, shared: bool = False) -> AbstractContextManager[None]:
        busy = f"another process is training in {self.path}: wait for it, or give another folder"
        return lock_folder(self.path, busy, shared)

    def check(self, recipe: AnyRecipe, resume: bool) -> None:
        """Raise unless a run with this recipe may start, or continue, here."""
        if not resume and self.holds_a_run():
            self._refuse_while_training()
            if Checkpoints(self.checkpoints).files():
                raise UserError(f"{self.path} already holds a run: give --resume to continue it, or another --out")
            left = "model.safetensors" if (self.path / "model.safetensors").exists() else "metrics.jsonl"
            raise UserError(
                f"{self.path} already holds a run, but no checkpoint to continue from: give another --out, or remove "
                f"its {left} to start over"
            )
        if resume and not Checkpoints(self.checkpoints).files() and (self.path / "model.safetensors").exists():
            raise UserError(
                f"{self.path} holds a finished run, but no checkpoint to resume from: give another --out, or "
                "remove its model.safetensors to start over"
            )
        if resume and self.holds_a_run() and self.recipe_file.is_file():
            _refuse_differences(self.recipe(), recipe, self.path)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Create and lock the folder, and check that it can be written to.

        If the block fails before anything was written, no empty folder is left behind.
        """
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            with plain_errors(f"making the run folder {self.path}", "or give another --out"):
                self.path.mkdir(parents=True, exist_ok=True)
                with draft(self.path / "probe", b"can this be written?"):
                    pass
            with self._locked():
                remove_drafts(self.path)
                yield
        except BaseException:
            for path in missing:
                with suppress(OSError):  # it is not empty
                    path.rmdir()
            raise

    def describe(self, recipe: AnyRecipe, environment: dict[str, Any]) -> None:
        """Write the recipe and the environment."""
        write_atomically(self.recipe_file, to_toml(recipe).encode())
        write_atomically(self.path / "environment.json", (json.dumps(environment, indent=2) + "\n").encode())


def _refuse_differences(before: AnyRecipe, now: AnyRecipe, path: Path) -> None:
    old, new = flattened(before.model_dump(mode="json")), flattened(now.model_dump(mode="json"))
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key) and key not in MAY_DIFFER)
    if keys:
        keys.sort(key=lambda key: key != "name")  # the name first
        shown = ", ".join(f"{key} ({old.get(key)!r} there, {new.get(key)!r} now)" for key in keys[:SHOWN])
        more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
        raise UserError(
            f"{path} was started with another recipe, so it cannot be resumed with this one: {shown}{more} differ. "
            "Leave the recipe out to continue with its own, or give another --out"
        )
