"""Damage to bytes and to structured values, of the kinds that disks, networks and people do."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hunt.drawing import Draw, require
from opteq.common.errors import UserError

_MEMORY = 2**30

# Values that are wrong nearly everywhere.
HOSTILE: list[Any] = [
    None, True, 0, -1, 1, 2.5, 1e308, -0.0, math.inf, math.nan, 2**31, 2**63, 10**18, 10**400,
    "", "none", "relu", "../../etc/passwd", "\x00", "é" * 50, "x" * 5000, "1e999", "__import__('os').system('true')",
    [], [0], [-1, 2], [[1]], [10**9] * 3, ["relu", 1], [1.5], [True], list(range(1000)),
    {}, {"a": {"b": {}}}, {"__class__": "x"},
]  # fmt: skip


def damaged(draw: Draw, content: bytes) -> tuple[bytes, str]:
    """Other bytes, and what was done."""
    kinds = ["flip", "flip", "overwrite", "zeros", "truncate", "append", "insert", "delete", "swap", "empty"]
    kind = draw.one_of(kinds)
    data = bytearray(content)
    where = draw.whole(0, max(len(data) - 1, 0))
    length = draw.one_of([1, 2, 8, 100, 1000])
    noise = bytes(draw.whole(0, 255) for _ in range(length))
    piece = slice(where, where + length)
    if kind == "flip" and data:
        data[where] ^= 1 << draw.whole(0, 7)
    elif kind == "overwrite":
        data[piece] = noise[: len(data[piece])]
    elif kind == "zeros":
        data[piece] = bytes(len(data[piece]))
    elif kind == "truncate":
        del data[where:]
    elif kind == "append":
        data += noise
    elif kind == "insert":
        data[where:where] = noise
    elif kind == "delete":
        del data[piece]
    elif kind == "swap":
        first, second = sorted((where, draw.whole(0, max(len(data) - 1, 0))))
        length = min(length, second - first, len(data) - second)
        one, other = slice(first, first + length), slice(second, second + length)
        data[one], data[other] = data[other], data[one]
    elif kind == "empty":
        data.clear()
    return bytes(data), f"{kind} at {where} of {len(content)}, {length} bytes"


def mutated(draw: Draw, value: Any, depth: int = 0) -> Any:
    """The same structure with something changed in it."""
    if depth > 3 or draw.chance(0.2):
        return draw.one_of(HOSTILE)
    if isinstance(value, dict) and value:
        changed = dict(value)
        key = draw.one_of(list(changed))
        kind = draw.one_of(["change", "change", "change", "remove", "add", "rename"])
        if kind == "remove":
            del changed[key]
        elif kind == "add":
            changed[draw.one_of(["extra_key", "nmae", "", "ünïcode", "a.b", "options"])] = draw.one_of(HOSTILE)
        elif kind == "rename":
            changed[key[:-1] or "k"] = changed.pop(key)
        else:
            changed[key] = mutated(draw, changed[key], depth + 1)
        return changed
    if isinstance(value, list) and value:
        changed = list(value)
        index = draw.whole(0, len(changed) - 1)
        changed[index] = mutated(draw, changed[index], depth + 1)
        return changed if draw.chance(0.8) else changed * draw.one_of([0, 2, 1000])
    return draw.one_of(HOSTILE)


@contextmanager
def refused_in_a_line(about: str) -> Iterator[None]:
    """Lets errors pass that a person is meant to read: one line each, of moderate length. Memory stays small."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    except UserError as error:
        require("\n" not in str(error), f"an error of several lines, {error}: {about}")
        require(len(str(error)) < 2000, f"an error of {len(str(error))} characters: {about}")
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    require(grown < _MEMORY, f"took {grown / 1e9:.1f} GB of memory: {about}")
