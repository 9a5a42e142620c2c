"""Files that are either whole or not there, and one clear line where a disk refuses them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from opteq._errors import UserError


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that after a crash at any moment ``path`` holds the old content or the new, never a part.

    The bytes go to a file beside it, are forced onto the disk, and take the name in one step; the folder is forced too,
    since the name is its content.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
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
    """Remove what a killed process left half-written."""
    for pattern in (".*.tmp", ".model.safetensors.*", ".config.json.*"):
        for draft in folder.glob(pattern):
            with contextlib.suppress(OSError):
                draft.unlink()


@contextlib.contextmanager
def plain_errors(doing: str, remedy: str) -> Iterator[None]:
    """Turn what the file system says into one line: what was being done, why it failed, what to do."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise UserError(f"{doing} failed: {error.strerror or error}{where}; {remedy}") from error
