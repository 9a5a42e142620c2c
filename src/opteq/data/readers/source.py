"""The result of a reader: the files that identify a data set, and its images in chunks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from opteq.common.errors import UserError
from opteq.data.dataset import Labels, Pixels


@dataclass(frozen=True)
class Stream:
    """One split before it is cached: all labels, and images as an iterator of uint8 chunks ``(n, C, h, w)``.

    For segmentation ``maps`` are the label maps, in uint8 chunks ``(n, h, w)``; ``labels`` then enumerates the images.
    """

    labels: Labels
    shape: tuple[int, int, int]
    pieces: Callable[[], Iterator[Pixels]]
    maps: Callable[[], Iterator[Pixels]] | None = None


@dataclass(frozen=True)
class Source:
    """A data set as it is read: classes and splits."""

    classes: tuple[str, ...]
    train: Stream
    test: Stream
    unseen: Stream | None = None

    def splits(self) -> dict[str, Stream]:
        """The splits that exist, by name."""
        splits = {"train": self.train, "test": self.test, "unseen": self.unseen}
        return {name: stream for name, stream in splits.items() if stream is not None}


@dataclass(frozen=True)
class FoundDataset:
    """A data set that was found on disk and not read yet.

    The cache identifies it by ``files`` in the folder ``root``; ``read`` opens it.
    """

    root: Path
    files: tuple[str, ...]
    read: Callable[[], Source] = field(repr=False)


def reason(error: Exception) -> str:
    """The first line of an error's message, without the addresses of open files."""
    message = re.sub(r" ?<_io\.\w+[^>]*>", "", str(error).partition("\n")[0])
    return message.rstrip(": ") or type(error).__name__


def whole(images: Pixels, labels: Labels, path: Path, classes: int) -> Stream:
    """A split in memory; checks that each image has a label and each label a class."""
    if len(images) != len(labels):
        raise UserError(f"{path}: {len(images)} images and {len(labels)} labels; fetch the files again")
    if len(images) == 0:
        raise UserError(f"{path}: there are no images in it; fetch the files again")
    if labels.min() < 0 or labels.max() >= classes:
        raise UserError(
            f"{path}: labels go from {labels.min()} to {labels.max()}, but there are {classes} classes; "
            "this is another data set or a damaged file"
        )
    _, channels, height, width = images.shape
    return Stream(labels, (channels, height, width), lambda: iter((images,)))
