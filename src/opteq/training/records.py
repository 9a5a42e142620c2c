"""The story of a run, epoch by epoch: ``metrics.jsonl`` and TensorBoard."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from opteq.common.files import write_atomically
from opteq.training.board import Board

Line = dict[str, Any]
"""One epoch: ``epoch`` (1 is the first), ``train_loss``, ``test_accuracy`` and the like; accuracies lie in 0..1."""


class Records:
    """Writes one line an epoch, and the same numbers to TensorBoard.

    Args:
        folder: of the run.
        history: lines of epochs that are finished already, as the checkpoint has them. The file is written anew from
            them, so that epochs which a killed run recorded but will repeat are not there twice, and none is missing.
    """

    def __init__(self, folder: Path, history: list[Line]) -> None:
        self.path = folder / "metrics.jsonl"
        write_atomically(self.path, "".join(_text(line) for line in history).encode())
        self._board = Board(folder / "tensorboard", done=len(history))

    def add(self, line: Line) -> None:
        """Record one epoch."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(_text(line))
            file.flush()
            os.fsync(file.fileno())
        points = {_tag(key): value for key, value in line.items() if key != "epoch" and value is not None}
        self._board.add(line["epoch"], points)

    def close(self) -> None:
        """Finish the TensorBoard file."""
        self._board.close()


def _tag(key: str) -> str:
    """``train_loss`` and ``test_loss`` are two curves of one chart."""
    kind, _, name = key.partition("_")
    return f"{name}/{kind}" if kind in ("train", "test", "unseen") else f"run/{key}"


def _text(line: Line) -> str:
    return json.dumps(line) + "\n"
