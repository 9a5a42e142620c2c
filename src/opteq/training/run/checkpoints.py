"""Checkpoints: one safetensors file each, written atomically, verified when read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from opteq.common.errors import UserError
from opteq.common.files import plain_errors, remove_drafts, write_atomically

KEEP = 2
"""Files kept: the newest, and the one before it in case the newest is damaged."""
_FORMAT = 1
_NAME = re.compile(r"step-[0-9]+\.safetensors")


class CheckpointWarning(UserWarning):
    """A checkpoint could not be used, and an older one was taken instead."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run between two steps: ``tensors`` by name, and JSON-able ``values``."""

    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, ``step-00000042.safetensors`` each.

    A file is safetensors with the values as JSON in its header, so reading it runs no code. A digest of both is
    compared when it is read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def files(self) -> list[Path]:
        """The checkpoint files, newest first."""
        # listdir and not glob, for which a folder without read permission looks empty.
        if not os.path.lexists(self.folder):
            return []
        with plain_errors(f"listing {self.folder}", "or give another --out"):
            names = os.listdir(self.folder)
        return sorted((self.folder / name for name in names if _NAME.fullmatch(name)), key=_order, reverse=True)

    def remedy(self) -> str:
        """The end of a message about a run that failed: whether it can continue."""
        if self.files():
            return "then continue with --resume: the checkpoints are intact"
        return "then start again: no checkpoint was saved before"

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, then remove those that are no longer needed.

        The one before it is kept. Files of later steps are removed: they could not be read when the run was resumed,
        and must not be preferred to this one.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_drafts(self.folder)
        # safetensors needs contiguous host memory that no two tensors share.
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in checkpoint.tensors.items()}
        values = json.dumps({"format": _FORMAT, "step": checkpoint.step, **checkpoint.values}, sort_keys=True)
        header = {"values": values, "digest": _digest(tensors, values)}
        path = self.folder / f"step-{checkpoint.step:08d}.safetensors"
        write_atomically(path, save_tensors(tensors, header))
        files = self.files()
        before = [file for file in files if _order(file) < _order(path)]
        for other in {*files} - {path, *before[: KEEP - 1]}:
            with contextlib.suppress(OSError):
                other.unlink()
        return path

    def latest(self) -> Checkpoint | None:
        """The newest intact checkpoint, with a warning about newer ones that are not; None where there is no file.

        Raises:
            UserError: there are files, but none can be used. Starting over silently could lose a run that a backup
                would restore.
        """
        unfit: dict[Path, str] = {}
        for path in self.files():
            checkpoint = self._read_or_reason(path)
            if isinstance(checkpoint, Checkpoint):
                for other, reason in unfit.items():
                    text = f"the checkpoint {other} {reason}; the one before it is used"
                    warnings.warn(text, CheckpointWarning, stacklevel=2)
                return checkpoint
            unfit[path] = checkpoint
        if unfit:
            reasons = ", ".join(f"{path.name} {reason}" for path, reason in unfit.items())
            raise UserError(
                f"no checkpoint in {self.folder} can be resumed from: {reasons}. Nothing was changed. To continue, "
                "restore one from a backup, make it readable, or use the version of opteq that wrote it; to "
                "start over, give another --out, or remove them"
            )
        return None

    def _read_or_reason(self, path: Path) -> Checkpoint | str:
        try:
            return self._read(path)
        except OSError as error:  # the content may be intact
            return f"could not be read ({error.strerror or error})"
        except _AnotherFormatError as error:
            return str(error)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            return f"is damaged ({' '.join(str(error).split())})"

    def _read(self, path: Path) -> Checkpoint:
        content = path.read_bytes()
        tensors = load_tensors(content)
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size]).get("__metadata__", {})
        if "values" not in header:
            raise ValueError("a safetensors file, but not a checkpoint of opteq")
        values = dict(json.loads(header["values"]))
        # Before the digest, which another format may compute differently.
        if (written := values.pop("format")) != _FORMAT:
            raise _AnotherFormatError(written)
        if header["digest"] != _digest(tensors, header["values"]):
            raise ValueError("its digest does not match its content")
        return Checkpoint(values.pop("step"), tensors, values)


class _AnotherFormatError(ValueError):
    """A checkpoint of another version of opteq."""

    def __init__(self, written: object) -> None:
        super().__init__(
            f"was written by another version of opteq (its format is {written}, and this version reads {_FORMAT})"
        )


def _order(path: Path) -> tuple[int, str]:
    """Sort key: the step as a number, which may have more digits than the padding."""
    return int(path.stem.removeprefix("step-")), path.name


def _digest(tensors: dict[str, Tensor], values: str) -> str:
    sha = hashlib.sha256(values.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
