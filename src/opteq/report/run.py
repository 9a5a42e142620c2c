"""Reading a run folder, finished or not, with missing files allowed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import ParseError

from opteq.common.errors import UserError
from opteq.common.files import check_readable

_SIGNS = ("recipe.toml", "metrics.jsonl", "config.json", "model.safetensors")


def short_names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, or their whole paths where two are called the same."""
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise UserError("a run is named twice; name each once")
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


@dataclass(frozen=True)
class Run:
    """The content of a run folder.

    Attributes:
        folder: where it lies.
        recipe: the recipe, parsed; empty where there is none.
        recipe_text: the recipe as it was written.
        environment: where and with what the run was made.
        config: what the saved model is.
        epochs: one dictionary of numbers an epoch, in order; NaN where a line holds no number.
        notes: what is missing or damaged, in words for the reader of the page.
        certified: share of test images with certified equilibria, if `opteq evaluate` found it.
        robustness: what `opteq evaluate --corruptions --curves` found; empty where it was not run.
    """

    folder: Path
    recipe: dict[str, Any] = field(default_factory=dict)
    recipe_text: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    epochs: list[dict[str, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    certified: float | None = None
    robustness: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The recipe's name, or the folder's."""
        return str(self.recipe.get("name") or self.folder.resolve().name)

    @property
    def planned_epochs(self) -> int | None:
        """Number of epochs of the recipe."""
        planned = self.section("train").get("epochs")
        return planned if isinstance(planned, int) else None

    @property
    def has_weights(self) -> bool:
        """Whether a model was saved."""
        return (self.folder / "model.safetensors").is_file() and (self.folder / "config.json").is_file()

    def section(self, name: str) -> dict[str, Any]:
        """A table of the recipe; empty where there is none."""
        table = self.recipe.get(name)
        return table if isinstance(table, dict) else {}

    def column(self, key: str) -> list[float]:
        """One metric over all epochs, NaN where it is missing."""
        return [epoch.get(key, math.nan) for epoch in self.epochs]

    def latest(self, key: str) -> float | None:
        """The last finite value of a metric."""
        return next((value for value in reversed(self.column(key)) if math.isfinite(value)), None)


def read_run(folder: Path) -> Run:
    """The run in ``folder``. Damaged files become notes; a folder without a run raises :class:`UserError`."""
    check_readable(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the run folder that `opteq train` wrote, such as runs/digits")
    if not any((folder / sign).is_file() for sign in _SIGNS):
        raise UserError(f"{folder} is not a run folder: it holds none of {', '.join(_SIGNS)}")
    notes: list[str] = []
    recipe_text = _read(folder / "recipe.toml", notes)
    try:
        recipe = tomlkit.parse(recipe_text).unwrap()
    except ParseError as error:
        recipe = {}
        notes.append(f"recipe.toml can't be read: {error}.")
    return Run(
        folder=folder,
        recipe=recipe,
        recipe_text=recipe_text,
        environment=_read_json(folder / "environment.json", notes),
        config=_read_json(folder / "config.json", notes if (folder / "model.safetensors").exists() else []),
        epochs=_read_metrics(folder / "metrics.jsonl", notes),
        notes=notes,
        certified=_certified(folder / "evaluation.json"),
        robustness=_robustness(folder),
    )


def _robustness(folder: Path) -> dict[str, Any]:
    if not (folder / "robustness.json").exists():
        return {}
    from opteq.training.robustness.record import read_record  # reports of other runs need nothing of training

    return read_record(folder)


def _certified(path: Path) -> float | None:
    try:
        share = json.loads(path.read_text(encoding="utf-8"))["certified"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(share) if isinstance(share, int | float) else None


def _read(path: Path, notes: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
    except OSError as error:
        notes.append(f"{path.name} can't be read: {error.strerror}.")
    return ""


def _read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    content = _read(path, notes)
    if not content:
        return {}
    try:
        value = json.loads(content)
    except ValueError as error:
        notes.append(f"{path.name} can't be read: {error}.")
        return {}
    return value if isinstance(value, dict) else {}


def _read_metrics(path: Path, notes: list[str]) -> list[dict[str, float]]:
    """One entry per epoch; the last line of an epoch counts, as a resumed run may repeat it."""
    epochs: dict[int, dict[str, float]] = {}
    damaged = 0
    for number, line in enumerate(_read(path, notes).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            line_values = json.loads(line)  # reads NaN and Infinity, which Python's writer leaves
        except ValueError:
            damaged += 1
            continue
        if not isinstance(line_values, dict):
            damaged += 1
            continue
        values = {key: _number(value) for key, value in line_values.items()}
        epoch = values.get("epoch", math.nan)
        epochs[int(epoch) if math.isfinite(epoch) else number] = values
    if damaged:
        lines = "1 line" if damaged == 1 else f"{damaged} lines"
        notes.append(f"metrics.jsonl: {lines} can't be read and {'is' if damaged == 1 else 'are'} left out.")
    return [{**epochs[epoch], "epoch": float(epoch)} for epoch in sorted(epochs)]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
