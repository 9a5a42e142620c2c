"""Tar shards: archives of images, found by a pass over their headers and read in any order."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from opteq.common.errors import UserError
from opteq.data.readers.files import Files, Listing, Members, Names
from opteq.data.readers.source import reason

CLASS_FILE = ".cls"
LONGEST = 200  # bytes of a class name
PACKED = "repack it without compression (images are compressed already): only then can any image be read by itself"


@dataclass(frozen=True)
class _Member:
    category: str
    name: str
    archive: int
    offset: int
    size: int
    labelled: bool  # by a file beside it


def list_shards(root: Path, archives: Sequence[str], endings: tuple[str, ...]) -> Listing:
    """The images of uncompressed tar archives, given by their paths below ``root``.

    The class of an image is what the file ``<key>.cls`` beside it says (as WebDataset writes shards), else the folder
    that it is in, else the name of the archive (as ImageNet is distributed). Classes that are all numbers are ordered
    as numbers. Either all images have such files or none.
    """
    found = [member for number, name in enumerate(archives) for member in _members(root / name, number, endings)]
    if not found:
        raise UserError(f"{root / archives[0]}: no images in it or in the archives beside it; {', '.join(endings)}")
    bare = [member for member in found if not member.labelled]
    if 0 < len(bare) < len(found):
        path, name = root / archives[bare[0].archive], bare[0].name
        raise UserError(
            f"{path}, {name}: has no file {_key(name)}{CLASS_FILE} beside it that names its class, and other images "
            "have one; add it, or delete the image"
        )
    names = {member.category for member in found}
    numbers = all(name.isdecimal() and len(name) <= LONGEST for name in names)
    classes = tuple(sorted(names, key=lambda name: (int(name) if numbers else 0, name)))
    labels = {name: label for label, name in enumerate(classes)}
    found.sort(key=lambda member: (labels[member.category], member.name))
    members = Members(
        tuple(archives),
        np.array([member.archive for member in found], dtype=np.int32),
        np.array([member.offset for member in found], dtype=np.int64),
        np.array([member.size for member in found], dtype=np.int64),
    )
    files = Files(root, Names([member.name for member in found]), members)
    return Listing(classes, files, np.array([labels[member.category] for member in found], dtype=np.int64))


def _members(path: Path, number: int, endings: tuple[str, ...]) -> list[_Member]:
    images: list[tarfile.TarInfo] = []
    named: dict[str, str] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.size < 0:  # tarfile would go back by it, again and again
                    raise tarfile.ReadError(f"{member.name} in it has {member.size} bytes")
                last = member.name.rpartition("/")[2]
                if not member.isreg() or last.startswith("."):
                    continue
                if last.lower().endswith(endings):
                    images.append(member)
                elif last.endswith(CLASS_FILE):
                    named[_key(member.name)] = _class(path, tar, member)
            _check_end(path, tar.offset)
    except tarfile.ReadError as error:
        packed = not _starts_as_tar(path)
        raise UserError(
            f"{path}: {'not an uncompressed' if packed else 'not a whole'} tar archive ({reason(error)}); "
            + (PACKED if packed else "fetch it again")
        ) from error
    members = []
    for image in images:
        folder = image.name.rpartition("/")[0].rpartition("/")[2].strip(".")
        label = named.get(_key(image.name))
        category = label or folder or path.stem
        members.append(_Member(category, image.name, number, image.offset_data, image.size, label is not None))
    return members


def _check_end(path: Path, end: int) -> None:
    """Raise unless nothing but zeros follows the last member, at byte ``end``.

    tarfile takes a damaged header for the end, and so it does the end of a file that was cut between two members.
    """
    with path.open("rb") as file:
        file.seek(end)
        rest = file.read(tarfile.BLOCKSIZE)
        if len(rest) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError("its end is missing")
        while rest:
            if any(rest):
                raise tarfile.ReadError(f"there is more after its end, or a damaged member, at byte {end}")
            rest = file.read(2**20)


def _key(name: str) -> str:
    """The part of a name that an image and its class have in common: all up to the first dot of its last part."""
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]


def _class(path: Path, tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = tar.extractfile(member)
    name = "" if file is None else file.read(LONGEST).decode("utf-8", "replace").strip()
    if not name or member.size > LONGEST:
        raise UserError(f"{path}: {member.name} in it names no class; it should hold one short name or number")
    return name


def _starts_as_tar(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(512)[257:262] == b"ustar"
