"""Weights in the package: a folder for each name, with a card that says how they were made and how good they are.

The folder ``models/weights/NAME`` holds ``config.json`` and ``model.safetensors`` as ``save_pretrained`` or
``Denoiser.save`` write them, and ``card.json`` with the fields of :class:`ReleasedWeights` from ``summary`` to
``date``; the others follow from the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent.parent / "weights"


@dataclass(frozen=True)
class ReleasedWeights:
    """Trained weights that come with the package.

    Attributes:
        name: for :func:`~opteq.models.from_pretrained`, ``opteq predict``, ``opteq play`` and ``opteq restore``.
        kind: classifier or denoiser.
        model: the architecture's name; ``denoiser`` for a denoiser.
        summary: what it does, in one line.
        data: what it was trained and measured on.
        figures: what was measured, by name.
        command: what trained it.
        machine: where.
        date: when.
        folder: of its files.
    """

    name: str
    kind: str
    model: str
    summary: str
    data: str
    figures: Mapping[str, float]
    command: str
    machine: str
    date: str
    folder: Path


@cache
def released() -> tuple[ReleasedWeights, ...]:
    """The weights in the package, by name.

    >>> [(one.name, one.model, one.command) for one in released() if one.name == "digits"]
    [('digits', 'opteq-digits', 'opteq train digits')]
    """
    weights = []
    for card in sorted(_HERE.glob("*/card.json")):
        config = json.loads((card.parent / "config.json").read_text(encoding="utf-8"))
        kind, model = ("denoiser", "denoiser") if "denoiser" in config else ("classifier", config["name"])
        known = json.loads(card.read_text(encoding="utf-8"))
        weights.append(ReleasedWeights(card.parent.name, kind, model, folder=card.parent, **known))
    return tuple(weights)


def released_folder(source: str | Path) -> Path:
    """The folder of released weights for their name, unless a folder of that name is here; else ``source`` itself.

    >>> released_folder("digits").name, released_folder("runs/digits").as_posix()
    ('digits', 'runs/digits')
    """
    path = Path(source)
    if len(path.parts) == 1 and not path.exists():
        for one in released():
            if one.name == str(source):
                return one.folder
    return path
