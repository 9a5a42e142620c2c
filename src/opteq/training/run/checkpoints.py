"""Checkpoints: one file each, whole or not there, without pickle, checked when read."""

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
"""Files kept: the newest, and the one before it in case the newest turns out to be damaged."""
_FORMAT = 1
_NAME = re.compile(r"step-[0-9]+\.safetensors")


class CheckpointWarning(UserWarning):
    """A checkpoint could not be used and was passed over for an older one."""


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
        # Listed rather than globbed: a folder that may not be read would look empty, and a run in it be begun anew.
        if not os.path.lexists(self.folder):
            return []
        with plain_errors("listing the checkpoints", "make that a folder which can be read, or give another --out"):
            names = os.listdir(self.folder)
        return sorted((self.folder / name for name in names if _NAME.fullmatch(name)), key=_place, reverse=True)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, then remove those that are no longer needed: never the other way round.

        The one before it is kept as well. Files of later steps are removed: the run has gone back behind them, since
        they could not be read, and they must not come before this one when it is resumed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_drafts(self.folder)
        # Copies on the host, one by one: safetensors wants plain memory that no two tensors share.
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in checkpoint.tensors.items()}
        values = json.dumps({"format": _FORMAT, "step": checkpoint.step, **checkpoint.values}, sort_keys=True)
        header = {"values": values, "digest": _digest(tensors, values)}
        path = self.folder / f"step-{checkpoint.step:08d}.safetensors"
        write_atomically(path, save_tensors(tensors, header))
        found = self.files()
        before = [file for file in found if _place(file) < _place(path)]
        for other in {*found} - {path, *before[: KEEP - 1]}:
            with contextlib.suppress(OSError):
                other.unlink()
        return path

    def latest(self) -> Checkpoint | None:
        """The newest that is whole; those that were passed over for it are warned about. None where there is no file.

        Raises:
            UserError: there are files, but none can be used. To begin anew in silence would cost a run that may only
                have to be restored from a copy.
        """
        unfit: dict[Path, str] = {}
        for path in self.files():
            found = self._read_or_reason(path)
            if isinstance(found, Checkpoint):
                for other, reason in unfit.items():
                    text = f"the checkpoint {other} {reason} and is passed over for the one before it"
                    warnings.warn(text, CheckpointWarning, stacklevel=2)
                return found
            unfit[path] = found
        if unfit:
            reasons = ", ".join(f"{path.name} {reason}" for path, reason in unfit.items())
            raise UserError(
                f"no checkpoint in {self.folder} can be resumed from: {reasons}. Nothing was changed. To go on, "
                "restore one of them from a copy, make it readable, or use the version of opteq that wrote it; to "
                "begin anew, give another --out, or remove them"
            )
        return None

    def _read_or_reason(self, path: Path) -> Checkpoint | str:
        try:
            return self._read(path)
        except OSError as error:  # which says nothing about the content: it may be whole
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
            raise ValueError("it is a safetensors file, but no checkpoint of opteq")
        values = dict(json.loads(header["values"]))
        # Before the digest, which another format may compute in another way.
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


def _place(path: Path) -> tuple[int, str]:
    """For the order of a run: the number itself, which may have more digits than the name was padded to."""
    return int(path.stem.removeprefix("step-")), path.name


def _digest(tensors: dict[str, Tensor], values: str) -> str:
    found = hashlib.sha256(values.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
