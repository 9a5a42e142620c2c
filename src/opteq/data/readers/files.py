"""Where the images of a split are: files below a folder, or members of tar archives below it."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from opteq.common.errors import UserError
from opteq.data.dataset import Labels


class Names:
    """Many short strings in two arrays: a million of them take 40 MB, and worker processes share these pages.

    (A list of strings would be copied by every worker bit by bit, since reading a Python object writes its count of
    references.)

    >>> names = Names(["cat/1.jpg", "dog/2.jpg"])
    >>> len(names), names[1]
    (2, 'dog/2.jpg')
    """

    def __init__(self, names: Sequence[str]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self.letters = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self.ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> str:
        begin = self.ends[row - 1] if row else 0
        return os.fsdecode(self.letters[begin : self.ends[row]].tobytes())


@dataclass(frozen=True)
class Members:
    """Places of images inside of tar archives: for each the archive, the first byte and the number of bytes."""

    archives: tuple[str, ...]  # below the root
    archive: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Files:
    """Images below ``root``: ``names`` are their paths, or their names inside of the archives of ``members``."""

    root: Path
    names: Names
    members: Members | None = None

    def __len__(self) -> int:
        return len(self.names)

    def name(self, row: int) -> str:
        """How messages call image ``row``."""
        if self.members is None:
            return os.path.join(self.root, self.names[row])
        archive = self.members.archives[self.members.archive[row]]
        return f"{os.path.join(self.root, archive)}, {self.names[row]}"

    def open(self, row: int) -> Path | IO[bytes]:
        """The file of image ``row``, or its bytes."""
        if self.members is None:
            return self.root / self.names[row]
        size = int(self.members.size[row])
        try:
            with open(self.root / self.members.archives[self.members.archive[row]], "rb") as file:
                file.seek(int(self.members.offset[row]))
                content = file.read(size)
        except OSError as error:
            raise UserError(f"{self.name(row)}: cannot be read ({error.strerror or error}); put it back") from error
        if len(content) < size:
            raise UserError(f"{self.name(row)}: the archive ends before it does; fetch it again")
        return io.BytesIO(content)

    def sources(self) -> tuple[str, ...]:
        """The files on the disk, below the root."""
        if self.members is not None:
            return self.members.archives
        return tuple(self.names[row] for row in range(len(self)))

    def chosen(self, rows: Labels) -> Files:
        """The images ``rows``."""
        names = Names([self.names[row] for row in rows.tolist()])
        if self.members is None:
            return Files(self.root, names)
        old = self.members
        return Files(self.root, names, Members(old.archives, old.archive[rows], old.offset[rows], old.size[rows]))


@dataclass(frozen=True)
class Listing:
    """The images of one split with their labels, ordered by class and then by name."""

    classes: tuple[str, ...]
    files: Files
    labels: Labels

    def relabel(self, classes: tuple[str, ...], labels: dict[int, int]) -> Listing:
        """The images whose label is a key of ``labels``, with its value as their label."""
        rows = np.flatnonzero(np.isin(self.labels, list(labels)))
        renamed = np.array([labels[label] for label in self.labels[rows].tolist()], dtype=np.int64)
        return Listing(classes, self.files.chosen(rows), renamed)

    def first_of_each(self) -> Listing:
        """One image per class."""
        rows = np.unique(self.labels, return_index=True)[1]
        return Listing(self.classes, self.files.chosen(rows), self.labels[rows])
