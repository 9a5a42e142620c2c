"""Atomic writes of files, and errors of the file system in one line."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from opteq.common.errors import UserError

_DRAFT = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
"""The names of drafts: so unlike anything else that what matches may be removed."""


@contextlib.contextmanager
def draft(target: Path, content: bytes) -> Iterator[Path]:
    """A hidden file beside ``target`` with ``content``, forced onto the disk; gone at the end unless it was moved."""
    path = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with naming(target, hidden=path):
            with open(path, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(target: Path, hidden: Path | None = None) -> Iterator[None]:
    """Errors of the file system name ``target``: a failed write names no file, a draft begins with ``hidden``."""
    try:
        yield
    except OSError as error:
        if error.filename is None or (hidden is not None and str(error.filename).startswith(str(hidden))):
            error.filename = str(target)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that after a crash at any moment ``path`` holds the old content or the new, never a part.

    The bytes go to a draft beside it, which takes the name in one step; the folder is forced onto the disk too, since
    the name is its content.
    """
    with draft(path, content) as written:
        os.replace(written, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force a folder's list of names onto the disk, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_drafts(folder: Path) -> None:
    """Remove what a killed process left half-written, and nothing else: the folder may be somebody's home."""
    for path in folder.glob(".*.tmp"):
        if _DRAFT.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


class FileError(UserError):
    """An error of the file system in one line, which ``failure`` is without the end."""

    def __init__(self, failure: str, remedy: str = "") -> None:
        super().__init__(f"{failure}, {remedy}" if remedy else failure)
        self.failure = failure


@contextlib.contextmanager
def plain_errors(doing: str, remedy: str | Callable[[], str] = "") -> Iterator[None]:
    """Turn what the file system says into one line: what was being done, why it failed, what to do.

    Args:
        doing: what is done in the block, such as ``"writing FILE"``.
        remedy: follows what mends the cause, such as ``"or choose another place"``; a function is called where it is
            needed. Of two blocks, one in the other, the outer one knows more of what to do.
    """
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename and not doing.endswith(str(error.filename)) else ""
        mend = _MEND.get(errno.errorcode.get(error.errno or 0, ""), "mend that")
        failure = f"{doing} failed: {error.strerror or error}{where}; {mend}"
        raise FileError(failure, remedy if isinstance(remedy, str) else remedy()) from error
    except FileError as error:
        raise FileError(error.failure, remedy if isinstance(remedy, str) else remedy()) from error


_MEND = {
    **dict.fromkeys(("ENOSPC", "EDQUOT", "EFBIG"), "make room"),
    **dict.fromkeys(("EACCES", "EPERM"), "mend its permissions"),
    **dict.fromkeys(("EISDIR", "ENOTDIR", "EEXIST", "ENOTEMPTY"), "move away what is in its place"),
    "EROFS": "make it writable", "ENOENT": "make its folder", "ENAMETOOLONG": "shorten its name",
    "ENOMEM": "free memory",
}  # fmt: skip
"""What mends an error of the file system, by its name."""


def check_readable(folder: Path) -> None:
    """Raise where one may not look into a folder: what is in it can't be known then. It need not exist.

    ``Path.exists`` of what is in it would raise the system's own error, or in later versions of Python say no.
    """
    with (
        plain_errors(f"looking into {folder}", "or give another folder"),
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
    ):
        os.stat(os.path.join(folder, "."))


@contextlib.contextmanager
def lock_folder(folder: Path, refusal: str, shared: bool = False) -> Iterator[None]:
    """Hold a folder inside the block: a second process that wants it is refused. A process that dies lets go of it.

    ``shared`` asks whether another process holds it, and is no reason to refuse one that asks as well.
    It leaves no file behind. Where the system has no such locks (Windows, some network disks) nothing is held.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with plain_errors(f"opening {folder}", "or give another folder"):
        handle = os.open(folder, os.O_RDONLY)
    _HELD.add(handle)
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(refusal) from error
        except OSError:
            pass
        yield
    finally:
        if handle in _HELD:  # not in a forked process
            _HELD.remove(handle)
            os.close(handle)


_HELD: set[int] = set()
"""The folders that this process holds, open."""


def _let_go() -> None:
    """Close them in a forked process: the lock of a killed training would last as long as its workers."""
    while _HELD:
        os.close(_HELD.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
