"""A folder of images: ``train/<class>/*`` and ``test/<class>/*``, as ImageNette and ImageNet have.

Instead of class folders, ``train`` and ``test`` may hold tar archives. With a table ``superclasses.csv`` in the folder
it is also a test of generalisation to classes that training lacks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from opteq.common.errors import UserError
from opteq.data.readers.decode import Decoder
from opteq.data.readers.files import Files, Listing, Names
from opteq.data.readers.shards import list_shards
from opteq.data.readers.source import FoundDataset, Source, Stream
from opteq.data.readers.superclasses import TABLE, read_table

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst")
ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
LAYOUT = "expected train/<class>/<image> and test/<class>/<image> (or val/ for test/)"


def find_folder(root: Path | None, image_size: int | None, test_only: bool = False) -> FoundDataset:
    """List the images under ``root``; they are opened later.

    With ``test_only`` the folder ``train`` may be missing; the first test image of every class then takes its place.
    """
    return _found(list_splits("folder", root, test_only), (), image_size)


def find_superclasses(root: Path | None, image_size: int | None, test_only: bool = False) -> FoundDataset:
    """The same, with the super-classes of ``superclasses.csv`` as labels.

    The last class of each, by the alphabet, is held out: its test images are a third split, and the two others lack it.
    """
    return _found(list_splits("folder-superclasses", root, test_only), (TABLE,), image_size)


def list_splits(name: str, root: Path | None, test_only: bool) -> tuple[Listing, ...]:
    """The images to train on, to test on and, with super-classes, those of unseen classes."""
    root = _checked(root, name, test_only)
    held_out = next((split for split in ("test", "val") if (root / split).is_dir()), None)
    if held_out is None:
        raise UserError(f"{root}: has neither a folder test nor val; {LAYOUT}")
    test = _list(root, held_out)
    train = _list(root, "train") if (root / "train").is_dir() else test.first_of_each()
    for category in sorted(set(train.classes) ^ set(test.classes)):
        has, lacks = ("train", held_out) if category in train.classes else (held_out, "train")
        raise UserError(f"{root / has / category}: {lacks} has no class {category!r}; both need the same class folders")
    if name == "folder":
        return train, test
    names, known, unseen = read_table(root / TABLE, test.classes)
    return train.relabel(names, known), test.relabel(names, known), test.relabel(names, unseen)


def _checked(root: Path | None, name: str, test_only: bool) -> Path:
    if root is None:
        raise UserError(f"data set {name!r} needs root, the folder of images (--set data.root=PATH); {LAYOUT}")
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; {LAYOUT}")
    if not (root / "train").is_dir() and not test_only:
        raise UserError(f"{root}: has no folder train; {LAYOUT}")
    return root


def _list(root: Path, split: str) -> Listing:
    entries = [entry for entry in os.scandir(root / split) if visible(entry.name)]
    classes = tuple(sorted(entry.name for entry in entries if entry.is_dir()))
    archives = sorted(f"{split}/{entry.name}" for entry in entries if entry.name.lower().endswith(ARCHIVES))
    if classes and archives:
        raise UserError(
            f"{root / archives[0]}: an archive beside class folders; keep either the folders or the archives"
        )
    if archives:
        return list_shards(root, archives, ENDINGS)
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
    return Listing(classes, Files(root, Names(files)), np.array(labels, dtype=np.int64))


def visible(name: str) -> bool:
    """Whether a file is not hidden: file managers leave ``._cat.jpg`` and ``.DS_Store`` behind."""
    return not name.startswith(".")


def _found(splits: Sequence[Listing], beside: tuple[str, ...], image_size: int | None) -> FoundDataset:
    files = (*beside, *dict.fromkeys(name for split in splits for name in split.files.sources()))
    return FoundDataset(splits[0].files.root, files, partial(_read, splits, image_size))


def _read(splits: Sequence[Listing], image_size: int | None) -> Source:
    decoder = Decoder.like(splits[0].files, 0, image_size)  # all images need the shape of the first one
    streams = [Stream(split.labels, decoder.shape, partial(decoder.all, split.files)) for split in splits]
    return Source(splits[0].classes, *streams)
