"""Pictures decoded once, into files that any number of processes map into memory and share.

An entry is a folder ``<name>-<fingerprint>`` with two ``.npy`` files a split and ``meta.json``. The fingerprint covers
the names, sizes and times of the source's files, so a changed source is decoded anew. An entry is written beside its
place and renamed into it, under a lock: it is there whole or not at all, and of two processes that start together one
decodes and the other waits. Nothing here is ever a pickle.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from opteq.common.errors import UserError
from opteq.data.dataset import Colours, Dataset, Pixels, Split
from opteq.data.progress import progress
from opteq.data.readers.source import Found, Source, Stream

FORMAT = 1  # raised when an entry's layout or the way of decoding changes; it is part of the fingerprint


def cached(name: str, found: Found, folder: Path, image_size: int | None) -> Dataset:
    """The data set ``found``, decoded into ``folder`` unless it is there already."""
    entry = folder / f"{name}-{fingerprint(found, image_size)}"
    dataset = open_entry(entry, name)
    if dataset is not None:  # no lock and nothing written: a cache that others filled may be read-only
        return dataset
    with _mendable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(entry.with_name(f"{entry.name}.lock"))
        lock.acquire()
    try:
        dataset = open_entry(entry, name)
        if dataset is None:
            source = found.read()
            write_entry(entry, source)
            dataset = open_entry(entry, name)
        if dataset is None:
            raise UserError(f"{entry}: what was just written cannot be read back; check this disk, or set OPTEQ_CACHE")
        return dataset
    finally:
        lock.release()


def fingerprint(found: Found, image_size: int | None) -> str:
    """A short name for exactly these files: 16 hexadecimal digits over names, sizes and times of change."""
    digest = hashlib.blake2b(f"{FORMAT} {image_size}".encode(), digest_size=8)
    for name in found.files:
        status = os.stat(os.path.join(found.root, name))  # strings: with a million files pathlib takes seconds
        digest.update(os.fsencode(f"\0{name}\0{status.st_size}\0{status.st_mtime_ns}"))
    return digest.hexdigest()


def open_entry(entry: Path, name: str) -> Dataset | None:
    """The data set in this entry, its pictures mapped from the file; None if there is no whole entry."""
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        splits = {split: _open_split(entry, split) for split in meta.get("splits", ("train", "test"))}
        return Dataset(name, tuple(meta["classes"]), mean=tuple(meta["mean"]), std=tuple(meta["std"]), **splits)
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def _open_split(entry: Path, split: str) -> Split:
    labels = _mapped(entry / f"{split}-labels.npy")
    # One number a picture is soon read, and then independent of the file; maps of labels are as large as pictures.
    return Split(_mapped(entry / f"{split}-images.npy"), labels.clone() if labels.ndim == 1 else labels)


def _mapped(path: Path) -> Tensor:
    """The array in this file, mapped: its pages are read when they are needed and shared with other processes."""
    try:
        # Copy on write: who writes to the tensor gets pages of his own, and nobody changes the file.
        return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
    # More than all memory: the system does not promise that many private pages. Read-only it maps anything.
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(array)


def write_entry(entry: Path, source: Source) -> None:
    """Decode ``source`` into ``entry``, which appears only when it is complete."""
    unfinished = entry.with_name(f"{entry.name}.unfinished")
    with _mendable(entry.parent):
        # We hold the lock: what lies there was left by a process that died.
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
    try:
        colours = Colours(source.train.shape[0])
        splits = source.splits()
        total, size = sum(len(stream.labels) for stream in splits.values()), math.prod(source.train.shape)
        with progress("decoding pictures", total, size) as advance:
            for split, stream in splits.items():
                pieces = _watched(stream, advance, colours if split == "train" else None)
                _write_array(unfinished / f"{split}-images.npy", (len(stream.labels), *stream.shape), pieces)
                _write_labels(unfinished / f"{split}-labels.npy", stream)
        mean, std = colours.statistics()
        meta: dict[str, Any] = {"classes": source.classes, "splits": list(splits), "mean": mean, "std": std}
        with _mendable(entry.parent):
            (unfinished / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
            shutil.rmtree(entry, ignore_errors=True)  # a damaged entry, or there would have been no need to decode
            os.rename(unfinished, entry)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _watched(stream: Stream, advance: Callable[[int], None], colours: Colours | None) -> Iterator[Pixels]:
    for piece in stream.pieces():
        if colours is not None:
            colours.add(piece)
        yield piece
        advance(len(piece))


def _write_labels(path: Path, stream: Stream) -> None:
    if stream.maps is not None:
        _write_array(path, (len(stream.labels), *stream.shape[1:]), stream.maps())
        return
    with _mendable(path.parent.parent):
        np.save(path, stream.labels, allow_pickle=False)


def _write_array(path: Path, shape: tuple[int, ...], pieces: Iterator[Pixels]) -> None:
    """A ``.npy`` file written piece by piece.

    Plain writes, not a memory map: on a full disk a write raises an error that can be told, a map kills the process.
    """
    # Readers tell their own errors as UserError: an OSError in here is about this file.
    with _mendable(path.parent.parent), path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        for piece in pieces:
            file.write(np.ascontiguousarray(piece).data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _mendable(folder: Path) -> Iterator[None]:
    """Turn the system's refusal to write into one line that says what to do."""
    try:
        yield
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"{folder}: cannot write the cache of decoded pictures ({reason}); "
            "make room or give another folder by cache= or OPTEQ_CACHE"
        ) from error
