"""What a reader of some format hands over: files to know it by, and pictures that come in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from opteq.common.errors import UserError
from opteq.data.dataset import Labels, Pixels


@dataclass(frozen=True)
class Stream:
    """One split before it is cached: labels in full, pictures as an iterator of uint8 pieces ``(n, C, H, W)``.

    Where every pixel has a class, ``maps`` are the labels, in uint8 pieces ``(n, H, W)``; ``labels`` then only numbers
    the pictures.
    """

    labels: Labels
    shape: tuple[int, int, int]
    pieces: Callable[[], Iterator[Pixels]]
    maps: Callable[[], Iterator[Pixels]] | None = None


@dataclass(frozen=True)
class Source:
    """A data set that is being read."""

    classes: tuple[str, ...]
    train: Stream
    test: Stream
    unseen: Stream | None = None

    def splits(self) -> dict[str, Stream]:
        """Those that there are, by name."""
        found = {"train": self.train, "test": self.test, "unseen": self.unseen}
        return {name: stream for name, stream in found.items() if stream is not None}


@dataclass(frozen=True)
class Found:
    """A data set that was found on the disk and not read yet.

    ``files`` in the folder ``root`` are what the cache knows it by; ``read`` opens it.
    """

    root: Path
    files: tuple[str, ...]
    read: Callable[[], Source] = field(repr=False)


def reason(error: Exception) -> str:
    """What an error says, in one line: some libraries write several."""
    return str(error).partition("\n")[0].rstrip(":") or type(error).__name__


def whole(images: Pixels, labels: Labels, path: Path, classes: int) -> Stream:
    """A split that was read at once; checks that each picture has a label and each label a class."""
    if len(images) != len(labels):
        raise UserError(f"{path}: {len(images)} pictures and {len(labels)} labels; fetch the files again")
    if len(images) == 0:
        raise UserError(f"{path}: there are no pictures in it; fetch the files again")
    if labels.min() < 0 or labels.max() >= classes:
        raise UserError(
            f"{path}: labels go from {labels.min()} to {labels.max()}, but there are {classes} classes; "
            "this is another data set or a damaged file"
        )
    _, channels, height, width = images.shape
    return Stream(labels, (channels, height, width), lambda: iter((images,)))
