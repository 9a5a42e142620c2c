"""A cache of decoded images in memory-mapped files that processes share.

An entry is a folder ``<name>-<fingerprint>`` with two ``.npy`` files per split and ``meta.json``. The fingerprint
covers the names, sizes and modification times of the source files, so a changed source is decoded again. An entry is
written to a temporary folder and renamed under a lock: it is complete or absent, and of two processes that start
together one decodes and the other waits. No file is a pickle.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from opteq.common.errors import UserError
from opteq.common.files import plain_errors
from opteq.data.dataset import ChannelStatistics, Dataset, Pixels, Split
from opteq.data.progress import progress
from opteq.data.readers.source import FoundDataset, Source, Stream

SHORT = 5000  # images; fewer are decoded before a bar could be read
LARGE = 1 << 16  # bytes; above, decoding an image takes longer than opening it
FORMAT = 2  # part of the fingerprint; incremented when the layout of entries or the decoding changes


def load_cached(name: str, found: FoundDataset, folder: Path, image_size: int | None) -> Dataset:
    """The data set ``found``, decoded into ``folder`` if it is not cached yet."""
    entry = folder / f"{name}-{fingerprint(found, image_size)}"
    dataset = open_entry(entry, name)
    if dataset is not None:  # without the lock: a shared cache may be read-only
        return dataset
    with _cache_errors(folder):
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
            raise UserError(f"{entry}: the entry just written cannot be read back; check this disk, or set OPTEQ_CACHE")
        return dataset
    finally:
        lock.release()


def fingerprint(found: FoundDataset, image_size: int | None) -> str:
    """16 hexadecimal digits that identify the files by their names, sizes and modification times."""
    digest = hashlib.blake2b(f"{FORMAT} {image_size}".encode(), digest_size=8)
    for name in found.files:
        status = os.stat(os.path.join(found.root, name))  # strings: pathlib takes seconds for a million files
        digest.update(os.fsencode(f"\0{name}\0{status.st_size}\0{status.st_mtime_ns}"))
    return digest.hexdigest()


def open_entry(entry: Path, name: str) -> Dataset | None:
    """The data set of an entry, with memory-mapped images; None if there is no complete entry."""
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        splits = {split: _open_split(entry, split) for split in meta.get("splits", ("train", "test"))}
        return Dataset(name, tuple(meta["classes"]), mean=tuple(meta["mean"]), std=tuple(meta["std"]), **splits)
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def _open_split(entry: Path, split: str) -> Split:
    labels = _memory_map(entry / f"{split}-labels.npy")
    # Labels of images are copied into memory; label maps are as large as images and stay mapped.
    return Split(_memory_map(entry / f"{split}-images.npy"), labels.clone() if labels.ndim == 1 else labels)


def _memory_map(path: Path) -> Tensor:
    """The array of a file, memory-mapped: pages are read on demand and shared between processes."""
    try:
        # Copy-on-write: writing to the tensor copies pages and never changes the file.
        return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
    # Larger than memory: private pages are refused, a read-only mapping is not.
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(array)


def write_entry(entry: Path, source: Source) -> None:
    """Decode ``source`` into ``entry``, which appears when it is complete."""
    unfinished = entry.with_name(f"{entry.name}.unfinished")
    with _cache_errors(entry.parent):
        # This process holds the lock, so an unfinished folder was left by a process that died.
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
    try:
        statistics = ChannelStatistics(source.train.shape[0])
        splits = source.splits()
        total = sum(len(stream.labels) for stream in splits.values())
        with progress("decoding images", total, takes_long(total, source.train.shape)) as advance:
            for split, stream in splits.items():
                pieces = _counted(stream, advance, statistics if split == "train" else None)
                _write_array(unfinished / f"{split}-images.npy", (len(stream.labels), *stream.shape), pieces)
                _write_labels(unfinished / f"{split}-labels.npy", stream)
        mean, std = statistics.statistics()
        meta: dict[str, Any] = {"classes": source.classes, "splits": list(splits), "mean": mean, "std": std}
        with _cache_errors(entry.parent):
            (unfinished / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
            shutil.rmtree(entry, ignore_errors=True)  # a damaged entry
            os.rename(unfinished, entry)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def takes_long(count: int, shape: Sequence[int]) -> bool:
    """Whether a person who waits for so many images of that shape to be decoded should see how far it is."""
    return count * max(math.prod(shape) / LARGE, 1) >= SHORT


def _counted(stream: Stream, advance: Callable[[int], None], statistics: ChannelStatistics | None) -> Iterator[Pixels]:
    for piece in stream.pieces():
        if statistics is not None:
            statistics.add(piece)
        yield piece
        advance(len(piece))


def _write_labels(path: Path, stream: Stream) -> None:
    if stream.maps is not None:
        _write_array(path, (len(stream.labels), *stream.shape[1:]), stream.maps())
        return
    with _cache_errors(path.parent.parent):
        np.save(path, stream.labels, allow_pickle=False)


def _write_array(path: Path, shape: tuple[int, ...], pieces: Iterator[Pixels]) -> None:
    """Write a ``.npy`` file piece by piece.

    With write calls and not through a memory map: on a full disk a write raises an error, a map kills the process.
    """
    # Readers raise UserError; an OSError here is about this file.
    with _cache_errors(path.parent.parent), path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        for piece in pieces:
            file.write(np.ascontiguousarray(piece).data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    """Report an error of the file system in one line that says what to do."""
    remedy = "or give another folder by cache=, --set data.cache=DIR or OPTEQ_CACHE"
    with plain_errors(f"writing the cache of decoded images in {folder}", remedy):
        try:
            yield
        except NotImplementedError as error:  # a file system without locks
            raise OSError(str(error)) from error
