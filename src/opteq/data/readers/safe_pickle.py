"""Reading the pickles of the CIFAR archives without running anything that is in them.

A pickle is a program: it may name any function and call it. The one here may name four, and none of them is real: they
are stand-ins that note down what an array would have been made of. The array is then made from that note, after its
type and size were checked.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np

from opteq.common.errors import UserError
from opteq.data.dataset import Pixels
from opteq.data.readers.source import reason


class _Placeholder:
    """Stands for an array or a dtype: keeps what the pickle says of it, and does nothing."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


def _encode(text: object, encoding: object) -> bytes:
    """How Python 3 writes bytes into old pickles: a string of which each character is one byte."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError("an unusual way to store bytes")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Callable[..., object]] = {
    ("numpy.core.multiarray", "_reconstruct"): _Placeholder,
    ("numpy._core.multiarray", "_reconstruct"): _Placeholder,
    ("numpy", "ndarray"): _Placeholder,
    ("numpy", "dtype"): _Placeholder,
    ("_codecs", "encode"): _encode,
}


class _Reader(pickle.Unpickler):
    def __init__(self, content: bytes, path: str) -> None:
        super().__init__(BytesIO(content), encoding="bytes")
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise UserError(
                f"{self.path}: refused, it would run {module}.{name}, which no CIFAR file does; "
                "delete it and fetch the archive from its official address"
            ) from None


def read_pickle(content: bytes, path: str) -> dict[bytes, Any]:
    """The dictionary in a pickle of numbers, strings, lists and byte arrays; anything else in it is refused.

    >>> read_pickle(pickle.dumps({b"labels": [3, 1]}), "batch")
    {b'labels': [3, 1]}
    """
    try:
        value = _Reader(content, path).load()
    except UserError:
        raise
    except Exception as error:  # a damaged pickle fails in any of a dozen ways
        raise UserError(f"{path}: not a CIFAR file, or damaged ({reason(error)}); fetch the archive again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a {type(value).__name__}, not the dictionary of a CIFAR file; fetch it again")
    return {key.encode() if isinstance(key, str) else key: item for key, item in value.items()}


def pixels(note: object, path: str) -> Pixels:
    """The byte array that ``note`` describes."""
    try:
        _, shape, kind, column_major, content = note.state  # type: ignore[attr-defined]
        if kind.arguments[0] not in ("u1", b"u1") or len(content) != math.prod(shape):
            raise ValueError(f"an array of type {kind.arguments[0]!r} and shape {shape}")
        array: Pixels = np.frombuffer(content, dtype=np.uint8).reshape(shape, order="F" if column_major else "C")
        return array
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(f"{path}: its images are not an array of bytes; fetch the archive again") from error
