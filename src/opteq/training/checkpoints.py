"""Checkpoints: one file each, whole or not there, without pickle, checked when read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from opteq._files import remove_drafts, write_atomically

KEEP = 2
"""Files kept: the newest, and the one before it in case the newest turns out to be damaged."""
_FORMAT = 1


class CheckpointWarning(UserWarning):
    """A checkpoint was damaged and passed over."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run between two steps: ``tensors`` by name, and ``values`` that JSON can hold."""

    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, ``step-00000042.safetensors`` each.

    A file is safetensors with the values as JSON in its header, so reading it runs no code, and a digest of both
    that is compared when it is read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def files(self) -> list[Path]:
        """Those on disk, newest first."""
        return sorted(self.folder.glob("step-*.safetensors"), reverse=True)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, then remove those that are no longer needed: never the other way round."""
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_drafts(self.folder)
        # Copies on the host, one by one: safetensors wants plain memory that no two tensors share.
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in checkpoint.tensors.items()}
        values = json.dumps({"format": _FORMAT, "step": checkpoint.step, **checkpoint.values}, sort_keys=True)
        header = {"values": values, "digest": _digest(tensors, values)}
        path = self.folder / f"step-{checkpoint.step:08d}.safetensors"
        write_atomically(path, save_tensors(tensors, header))
        for old in self.files()[KEEP:]:
            with contextlib.suppress(OSError):
                old.unlink()
        return path

    def latest(self) -> Checkpoint | None:
        """The newest that is whole; each damaged one before it is warned about. None where there is none."""
        return next((found for found in map(self._read_if_whole, self.files()) if found is not None), None)

    def _read_if_whole(self, path: Path) -> Checkpoint | None:
        try:
            return self._read(path)
        except (SafetensorError, ValueError, KeyError, TypeError, OSError) as error:
            reason = " ".join(str(error).split())
            warnings.warn(
                f"the checkpoint {path} is damaged ({reason}) and is passed over for the one before it",
                CheckpointWarning,
                stacklevel=3,
            )
            return None

    def _read(self, path: Path) -> Checkpoint:
        content = path.read_bytes()
        tensors = load_tensors(content)
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])["__metadata__"]
        if header["digest"] != _digest(tensors, header["values"]):
            raise ValueError("its digest does not match its content")
        values = json.loads(header["values"])
        if values.pop("format") != _FORMAT:
            raise ValueError("it was written by another version of opteq")
        return Checkpoint(values.pop("step"), tensors, values)


def _digest(tensors: dict[str, Tensor], values: str) -> str:
    found = hashlib.sha256(values.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
