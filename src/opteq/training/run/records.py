"""The metrics of a run, epoch by epoch: ``metrics.jsonl`` and TensorBoard."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from opteq.common.errors import needs_extra
from opteq.common.files import naming, write_atomically

Line = dict[str, Any]
"""One epoch: ``epoch`` (1 is the first), ``train_loss``, ``test_accuracy`` and the like; accuracies lie in 0..1."""


class Records:
    """Writes one line per epoch, and the same values to TensorBoard.

    Args:
        folder: of the run.
        history: lines of epochs that are finished already, as the checkpoint has them. The file is rewritten from
            them, and TensorBoard hides later points: epochs that a killed run recorded and now repeats appear once.
    """

    def __init__(self, folder: Path, history: list[Line]) -> None:
        self.path = folder / "metrics.jsonl"
        write_atomically(self.path, "".join(_text(line) for line in history).encode())
        with needs_extra("train"):  # imported here: TensorBoard is slow to import, and only a run that writes needs it
            from torch.utils.tensorboard import SummaryWriter
        purge = len(history) + 1 if history else None
        with naming(folder / "tensorboard"):
            self._tensorboard = SummaryWriter(folder / "tensorboard", purge_step=purge)

    def add(self, line: Line) -> None:
        """Record one epoch."""
        with naming(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(_text(line))
            file.flush()
            os.fsync(file.fileno())
        with naming(self.path.with_name("tensorboard")):
            for key, value in line.items():
                if key != "epoch" and value is not None:
                    self._tensorboard.add_scalar(_tag(key), value, line["epoch"])
            self._tensorboard.flush()  # raises here what its thread could not write

    def close(self) -> None:
        """Close the TensorBoard file. An error of the disk was raised when the epoch was recorded."""
        with contextlib.suppress(OSError):
            self._tensorboard.close()


def _tag(key: str) -> str:
    """``train_loss`` and ``test_loss`` are two curves of one chart."""
    kind, _, name = key.partition("_")
    return f"{name}/{kind}" if kind in ("train", "test", "unseen") else f"run/{key}"


def _text(line: Line) -> str:
    return json.dumps(line) + "\n"
