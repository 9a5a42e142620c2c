"""The story of a run, epoch by epoch: ``metrics.jsonl`` and TensorBoard."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from opteq.training.storage import write_atomically

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
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and needed only here

        self.path = folder / "metrics.jsonl"
        write_atomically(self.path, "".join(_text(line) for line in history).encode())
        # purge_step makes TensorBoard forget what an interrupted run drew beyond the checkpoint.
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=len(history) + 1 if history else None)

    def add(self, line: Line) -> None:
        """Record one epoch."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(_text(line))
            file.flush()
            os.fsync(file.fileno())
        for key, value in line.items():
            if key != "epoch" and value is not None:
                kind, _, name = key.partition("_")
                tag = f"{name}/{kind}" if kind in ("train", "test") else f"run/{key}"
                self._board.add_scalar(tag, value, line["epoch"])
        self._board.flush()

    def close(self) -> None:
        """Finish the TensorBoard file."""
        self._board.close()


def read(path: Path) -> list[Line]:
    """The lines of a ``metrics.jsonl``."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _text(line: Line) -> str:
    return json.dumps(line) + "\n"
