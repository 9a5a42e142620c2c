"""Members of a tar archive, read into memory without unpacking to disk.

What is checked: the checksum of the compression, which tar's own end would leave unread; that a wanted member is a
plain file and no link; and that neither a member nor the whole is larger than any archive of images that is read
here, so that a small file which unpacks to gigabytes is refused instead.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
from collections.abc import Callable, Container
from pathlib import Path
from typing import IO, Any, cast

from opteq.common.errors import UserError
from opteq.data.readers.source import reason

LARGEST = 2**28
"""Bytes of a member at most; the largest of CIFAR has 155 million."""
TOTAL = 2**30
"""Bytes of an archive at most, unpacked."""
MEMBERS = 1000
"""Members at most."""

_PACKED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
_CHUNK = 2**20


def read_members(path: Path, wanted: Container[str], remedy: str) -> dict[str, bytes]:
    """The members whose paths are ``wanted``, by path; one line, with the ``remedy``, where something is amiss."""
    contents: dict[str, bytes] = {}
    try:
        with _open(path) as stream:
            bounded = _LimitedStream(stream)
            with tarfile.open(fileobj=cast(IO[bytes], bounded), mode="r:") as tar:
                for count, member in enumerate(tar):
                    _check(path, member, count, remedy, member.name.removeprefix("./") in wanted)
                    if member.name.removeprefix("./") in wanted and (file := tar.extractfile(member)) is not None:
                        contents[member.name.removeprefix("./")] = file.read()
            while bounded.read(_CHUNK):  # to the end, where the checksum is
                pass
    except UserError:
        raise
    except Exception as error:  # a damaged archive fails in any of a dozen ways
        raise UserError(f"{path}: not a whole archive ({reason(error)}); {remedy}") from error
    return contents


def _check(path: Path, member: tarfile.TarInfo, count: int, remedy: str, wanted: bool) -> None:
    if count >= MEMBERS:
        raise UserError(f"{path}: refused, it has more than {MEMBERS} members; {remedy}")
    if wanted and (not member.isreg() or member.issparse()):
        kind = "a link" if member.islnk() or member.issym() else "no plain file"
        raise UserError(f"{path}: refused, {member.name} in it is {kind}; {remedy}")
    if member.size > LARGEST:
        raise UserError(f"{path}: refused, {member.name} in it has {member.size} bytes, over {LARGEST}; {remedy}")


def _open(path: Path) -> IO[bytes]:
    with open(path, "rb") as file:
        head = file.read(6)
    for magic, opener in _PACKED.items():
        if head.startswith(magic):
            stream: IO[bytes] = opener(path, "rb")
            return stream
    return open(path, "rb")


class _LimitedStream:
    """A stream that ends with an error where more is asked of it than an honest archive holds."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > LARGEST:
            raise tarfile.ReadError(f"it asks for {size} bytes at once, over {LARGEST}")
        self._limit(self.stream.tell() + min(size, _CHUNK))
        return self.stream.read(size)

    def seek(self, position: int, whence: int = 0) -> int:
        self._limit(position)
        return self.stream.seek(position, whence)

    def tell(self) -> int:
        return self.stream.tell()

    def _limit(self, position: int) -> None:
        if position > TOTAL:
            raise tarfile.ReadError(f"it unpacks to more than {TOTAL} bytes")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
