"""Random choices that depend on nothing but the name of a case, and the error for what should not be."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Option = TypeVar("Option")
BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class FailureError(AssertionError):
    """The library did what it should not do."""


def require(fact: bool, message: str) -> None:
    """A failure unless ``fact``."""
    if not fact:
        raise FailureError(message)


class Draw:
    """The choices of one case.

    Args:
        name: what they depend on.
        device: where the library computes.
        calls: how often a layer is called; the last call is checked. The engine captures at the second one.
    """

    def __init__(self, name: str, device: str = "cpu", calls: int = 1) -> None:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed % 2**63)
        self.device, self.calls = device, calls

    def one_of(self, options: Sequence[Option]) -> Option:
        return self.random.choice(options)

    def whole(self, least: int, most: int) -> int:
        return self.random.randint(least, most)

    def number(self, least: float, most: float) -> float:
        return self.random.uniform(least, most)

    def power(self, least: float, most: float) -> float:
        """Ten to a uniform power."""
        return 10 ** self.random.uniform(least, most)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def normal(self, *shape: int) -> Tensor:
        """Normal numbers in float64, on the CPU."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)


@dataclass(frozen=True)
class Batch:
    """An input, and which of its samples are not finite on purpose."""

    x: Tensor
    bad: list[bool]
    about: str


def drawn_batch(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype, clean: bool = False) -> Batch:
    """A batch of some scale, memory layout and dtype; unless ``clean``, a sample may be NaN, infinite, huge or zero."""
    count = draw.whole(1, 5)
    scale = draw.power(-8, 8) if draw.chance(0.4) else draw.power(-1, 1)
    x = scale * draw.normal(count, *shape)
    bad, mate = [False] * count, "none"
    if not clean and draw.chance(0.25):
        row, mate = draw.whole(0, count - 1), draw.one_of([*BAD, "huge", "zero"])
        if mate in BAD:
            bad[row] = True
            x[row].view(-1)[draw.whole(0, x[row].numel() - 1)] = BAD[mate]
        else:
            x[row] = 0 if mate == "zero" else x[row] * 1e4
    layout = draw.one_of(["contiguous", "contiguous", "channels last", "slice", "transposed"])
    x = laid_out(x.to(draw.device, dtype), layout)
    return Batch(x, bad, f"batch {count} scale {scale:.2g} {dtype} {layout} mate {mate}")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers in another memory layout."""
    if layout == "channels last" and x.ndim == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "slice":  # every other entry of a larger tensor
        whole = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)
        whole[..., ::2] = x
        return whole[..., ::2]
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x
