"""A folder of images: ``train/<class>/*`` and ``test/<class>/*``, as ImageNette and ImageNet have.

With a table ``superclasses.csv`` in the folder it is also a test of generalisation to classes that training lacks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from opteq.common.errors import UserError
from opteq.data.readers.decode import decode_all, decode_one
from opteq.data.readers.source import Found, Source, Stream
from opteq.data.readers.superclasses import TABLE, read_table

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
LAYOUT = "expected train/<class>/<image> and test/<class>/<image> (or val/ for test/)"


@dataclass(frozen=True)
class Listing:
    """The images of one split: class names, and for every file its path below the root and its label."""

    classes: tuple[str, ...]
    files: tuple[str, ...]  # class by class, by name within a class
    labels: tuple[int, ...]

    def relabelled(self, classes: tuple[str, ...], labels: Mapping[int, int]) -> Listing:
        """The files whose label is a key of ``labels``, with its value as their label."""
        kept = [(file, labels[label]) for file, label in zip(self.files, self.labels, strict=True) if label in labels]
        return Listing(classes, tuple(file for file, _ in kept), tuple(label for _, label in kept))


def find_folder(root: Path | None, image_size: int | None, test_only: bool = False) -> Found:
    """List the images under ``root``; they are opened later.

    With ``test_only`` the folder ``train`` may be missing; the first test image of every class then takes its place.
    """
    root = _checked(root, "folder", test_only)
    train, test = list_folder(root, test_only)
    return Found(root, train.files + test.files, partial(_read, root, (train, test), image_size))


def find_superclasses(root: Path | None, image_size: int | None, test_only: bool = False) -> Found:
    """The same, with the super-classes of ``superclasses.csv`` as labels.

    The last class of each, by the alphabet, is held out: its test images are a third split, and the two others lack it.
    """
    root = _checked(root, "folder-superclasses", test_only)
    train, test = list_folder(root, test_only)
    names, known, held_out = read_table(root / TABLE, test.classes)
    splits = tuple(
        listing.relabelled(names, chosen) for listing, chosen in ((train, known), (test, known), (test, held_out))
    )
    files = tuple(file for split in splits for file in split.files)
    return Found(root, (TABLE, *files), partial(_read, root, splits, image_size))


def _checked(root: Path | None, name: str, test_only: bool) -> Path:
    if root is None:
        raise UserError(f"data set {name!r} needs root, the folder of images (--set data.root=PATH); {LAYOUT}")
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; {LAYOUT}")
    if not (root / "train").is_dir() and not test_only:
        raise UserError(f"{root}: has no folder train; {LAYOUT}")
    return root


def list_folder(root: Path, test_only: bool) -> tuple[Listing, Listing]:
    """The images to train on and to test on."""
    held_out = next((name for name in ("test", "val") if (root / name).is_dir()), None)
    if held_out is None:
        raise UserError(f"{root}: has neither a folder test nor val; {LAYOUT}")
    test = _list(root, held_out)
    train = _list(root, "train") if (root / "train").is_dir() else _first_of_each(test)
    for name in sorted(set(train.classes) ^ set(test.classes)):
        has, lacks = ("train", held_out) if name in train.classes else (held_out, "train")
        raise UserError(f"{root / has / name}: {lacks} has no class {name!r}; both need the same class folders")
    return train, test


def _list(root: Path, split: str) -> Listing:
    classes = tuple(sorted(entry.name for entry in os.scandir(root / split) if entry.is_dir() and visible(entry.name)))
    if not classes:
        raise UserError(f"{root / split}: has no class folders; {LAYOUT}")
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        images = sorted(
            entry.name
            for entry in os.scandir(root / split / name)
            if visible(entry.name) and entry.name.lower().endswith(ENDINGS) and entry.is_file()
        )
        if not images:
            endings = ", ".join(ending[1:] for ending in ENDINGS)
            raise UserError(f"{root / split / name}: no images in it ({endings}); fill or remove this class folder")
        files += [f"{split}/{name}/{image}" for image in images]
        labels += [label] * len(images)
    return Listing(classes, tuple(files), tuple(labels))


def _first_of_each(listing: Listing) -> Listing:
    places = [listing.labels.index(label) for label in range(len(listing.classes))]
    return Listing(listing.classes, tuple(listing.files[place] for place in places), tuple(range(len(places))))


def visible(name: str) -> bool:
    """Whether a file is not hidden: file managers leave ``._cat.jpg`` and ``.DS_Store`` behind."""
    return not name.startswith(".")


def _read(root: Path, splits: Sequence[Listing], image_size: int | None) -> Source:
    # All images need the shape of the first one.
    first = root / splits[0].files[0]
    channels, height, width = decode_one(first, image_size).shape

    def stream(listing: Listing) -> Stream:
        paths = [root / name for name in listing.files]

        def pieces() -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
            return decode_all(paths, first, (channels, height, width), image_size)

        return Stream(np.array(listing.labels, dtype=np.int64), (channels, height, width), pieces)

    return Source(splits[0].classes, *(stream(listing) for listing in splits))
