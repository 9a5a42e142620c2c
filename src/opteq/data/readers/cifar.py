"""CIFAR-10 and CIFAR-100 from their official archives: packed or unpacked, python or binary version.

CIFAR-100 names each image's class twice, finely (100 classes) and coarsely (20 super-classes of five classes each).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from opteq.common.errors import UserError
from opteq.data.dataset import Labels, Pixels
from opteq.data.paths import data_folders
from opteq.data.readers.archive import read_members
from opteq.data.readers.safe_pickle import pixels, read_pickle
from opteq.data.readers.source import FoundDataset, Source, reason, whole
from opteq.data.readers.superclasses import hold_out

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Version:
    """How one archive is laid out: its names, the files of each split and the file with the classes' names."""

    archive: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    key: bytes  # of the labels; with b"_names" appended, of the names, where the files are pickles
    label_bytes: int  # bytes in front of each image; 0 where the files are pickles
    label_at: int = -1  # which of them is the label
    finer: bytes | None = None  # the key of labels that say which part of its class a image shows; in bytes, the last

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, *self.test, self.names)


_FIVE = tuple(f"data_batch_{number}" for number in range(1, 6))
VERSIONS: dict[str, tuple[Version, ...]] = {
    "cifar10": (
        Version("cifar-10-python.tar.gz", "cifar-10-batches-py", _FIVE, ("test_batch",), "batches.meta", b"label", 0),
        Version(
            "cifar-10-binary.tar.gz",
            "cifar-10-batches-bin",
            tuple(f"{name}.bin" for name in _FIVE),
            ("test_batch.bin",),
            "batches.meta.txt",
            b"label",
            1,
        ),
    ),
    "cifar100": (
        Version("cifar-100-python.tar.gz", "cifar-100-python", ("train",), ("test",), "meta", b"fine_label", 0),
        Version(
            "cifar-100-binary.tar.gz",
            "cifar-100-binary",
            ("train.bin",),
            ("test.bin",),
            "fine_label_names.txt",
            b"fine_label",
            2,
        ),
    ),
}
VERSIONS["cifar100-superclasses"] = tuple(
    replace(version, key=b"coarse_label", names=names, label_at=0, finer=version.key)
    for version, names in zip(VERSIONS["cifar100"], ("meta", "coarse_label_names.txt"), strict=True)
)


# Bytes and MD5 of files as they were published. A file of another size was written anew, by a newer Python say; one of
# the same size and other bytes is damaged.
_PUBLISHED = {
    "cifar-10-batches-py/data_batch_1": (31035704, "c99cafc152244af753f735de768cd75f"),
    "cifar-10-batches-py/data_batch_2": (31035320, "d4bba439e000b95fd0a9bffe97cbabec"),
    "cifar-10-batches-py/data_batch_3": (31035999, "54ebc095f3ab1f0389bbae665268c751"),
    "cifar-10-batches-py/data_batch_4": (31035696, "634d18415352ddfa80567beed471001a"),
    "cifar-10-batches-py/data_batch_5": (31035623, "482c414d41f54cd18b22e5b47cb7c3cb"),
    "cifar-10-batches-py/test_batch": (31035526, "40351d587109b95175f43aff81a1287e"),
    "cifar-10-batches-py/batches.meta": (158, "5ff9c542aee3614f3951f8cda6e48888"),
    "cifar-100-python/train": (155249918, "16019d7e3df5f24257cddd939b257f8d"),
}


def _remedy(name: str) -> str:
    archive = VERSIONS[name][0].archive
    fetched = f"fetch https://www.cs.toronto.edu/~kriz/{archive}"
    return f"{fetched} and give it, or its folder, as root (--set data.root=PATH)"


def find_cifar(name: str, root: Path | None) -> FoundDataset:
    """Look for an archive or an unpacked folder: ``root`` itself, or inside of it, or in the usual places."""
    places = data_folders(name.partition("-")[0]) if root is None else [root]
    for place in places:
        for version in VERSIONS[name]:
            for archive in (place, place / version.archive):
                if archive.is_file() and (archive == place or archive.name == version.archive):
                    return FoundDataset(archive.parent, (archive.name,), partial(_read_archive, name, archive))
            for folder in (place / version.folder, place):
                present = [file for file in version.files if (folder / file).is_file()]
                if len(present) == len(version.files):
                    return FoundDataset(folder, version.files, partial(_read_folder, name, version, folder))
                if present and folder.name == version.folder:
                    missing = next(file for file in version.files if file not in present)
                    raise UserError(f"{folder / missing}: missing, although others are there; {_remedy(name)}")
    searched = ", ".join(map(str, places))
    raise UserError(f"{searched}: no archive and no unpacked folder of {name} there; {_remedy(name)}")


def _read_folder(name: str, version: Version, folder: Path) -> Source:
    try:
        contents = {file: (folder / file).read_bytes() for file in version.files}
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({reason(error)}); {_remedy(name)}") from error
    return _source(version, contents, folder)


def _read_archive(name: str, archive: Path) -> Source:
    wanted = {f"{version.folder}/{file}": version for version in VERSIONS[name] for file in version.files}
    members = read_members(archive, wanted, _remedy(name))
    found = next((wanted[path] for path in members), None)
    contents = {path.rpartition("/")[2]: content for path, content in members.items() if wanted[path] is found}
    if found is None:
        raise UserError(f"{archive}: an archive, but without the files of {name}; {_remedy(name)}")
    for needed in found.files:
        if needed not in contents:
            raise UserError(f"{archive}: has no {found.folder}/{needed}; {_remedy(name)}")
    return _source(found, contents, archive)


def _source(version: Version, contents: Mapping[str, bytes], place: Path) -> Source:
    for file, content in contents.items():
        size, digest = _PUBLISHED.get(f"{version.folder}/{file}", (-1, ""))
        if len(content) == size and hashlib.md5(content, usedforsecurity=False).hexdigest() != digest:
            raise UserError(f"{place / file}: damaged, its bytes are not those that were published; fetch it again")
    classes = _class_names(version, contents[version.names], place / version.names)
    read = _read_binary if version.label_bytes else _read_python
    splits = []
    for files in (version.train, version.test):
        batches = [read(version, contents[file], place / file) for file in files]
        images, labels, parts = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        splits.append((whole(images, labels, place / files[0], len(classes)), parts))
    if version.finer is not None:
        return hold_out(classes, splits[0], splits[1], place)
    return Source(classes, splits[0][0], splits[1][0])


def _class_names(version: Version, content: bytes, path: Path) -> tuple[str, ...]:
    try:
        if version.label_bytes:
            return tuple(line for line in content.decode("utf-8").splitlines() if line.strip())
        names = read_pickle(content, str(path))[version.key + b"_names"]
        return tuple(name.decode("utf-8") if isinstance(name, bytes) else str(name) for name in names)
    except (KeyError, TypeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: has no list of class names; fetch the archive again") from error


def _read_python(version: Version, content: bytes, path: Path) -> tuple[Pixels, Labels, Labels]:
    """Images, their labels, and the finer ones (the same again where there are none)."""
    batch = read_pickle(content, str(path))
    try:
        rows, labels = batch[b"data"], np.asarray(batch[version.key + b"s"], dtype=np.int64)
        finer = labels if version.finer is None else np.asarray(batch[version.finer + b"s"], dtype=np.int64)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: has no data or no labels; fetch the archive again") from error
    images = pixels(rows, str(path))
    if images.ndim != 2 or images.shape[1] != PIXELS or not labels.shape == finer.shape == images.shape[:1]:
        raise UserError(
            f"{path}: expected images of {PIXELS} bytes and one label each; "
            f"got shapes {images.shape} and {labels.shape}; fetch the archive again"
        )
    return images.reshape(-1, 3, 32, 32), labels, finer


def _read_binary(version: Version, content: bytes, path: Path) -> tuple[Pixels, Labels, Labels]:
    record = version.label_bytes + PIXELS
    if not content or len(content) % record:
        raise UserError(
            f"{path}: truncated or wrong, {len(content)} bytes are not a whole number of records of {record}; "
            "fetch the archive again"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    labels = records[:, : version.label_bytes].astype(np.int64)
    return records[:, version.label_bytes :].reshape(-1, 3, 32, 32), labels[:, version.label_at], labels[:, -1]
