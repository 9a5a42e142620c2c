"""What a data set is: two splits of pictures held as bytes, names for the classes, and the colours' statistics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

IGNORED = 255
"""In a map of labels: a pixel without one, which is neither learned from nor judged."""


@dataclass(frozen=True, eq=False)
class Split:
    """Pictures and their classes: ``images`` is uint8 ``(N, C, H, W)``, ``labels`` int64 ``(N,)``.

    Where every pixel has a class of its own (``dense``), ``labels`` is uint8 ``(N, H, W)``, with 255 for pixels that
    have none.

    Bytes, not floats: a data set then fits into a quarter of the memory, on the host and on the device, and several
    processes that map the same cache file share one copy. :class:`~opteq.data.Batches` makes floats, a batch at a time.

    >>> split = Split(torch.zeros(5, 3, 8, 8, dtype=torch.uint8), torch.arange(5))
    >>> len(split)
    5
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            shape = tuple(self.images.shape)
            raise TypeError(f"Split.images should be uint8 of shape (N, C, H, W); got {self.images.dtype} {shape}")
        if (self.labels.dtype, self.labels.ndim) not in ((torch.int64, 1), (torch.uint8, 3)):
            given = f"{self.labels.dtype} {tuple(self.labels.shape)}"
            raise TypeError(f"Split.labels should be int64 of shape (N,), or uint8 of shape (N, H, W); got {given}")
        if len(self.images) != len(self.labels):
            raise ValueError(f"Split has {len(self.images)} images and {len(self.labels)} labels; give one label each")
        if self.dense and self.labels.shape[1:] != self.images.shape[2:]:
            height, width = self.images.shape[2:]
            raise ValueError(
                f"Split.labels should be {height}x{width} as the images are; got {tuple(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def dense(self) -> bool:
        """Whether every pixel has a label."""
        return self.labels.ndim == 3


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set for the classification of pictures or of their pixels, as :func:`~opteq.data.load` returns it.

    ``mean`` and ``std`` have one number a channel: of the training split's pixels in 0..1, each pixel counted once.
    ``unseen`` is a second test split where a data set has one: pictures of the same classes, but of kinds that are not
    among the training pictures.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    mean: tuple[float, ...]
    std: tuple[float, ...]
    unseen: Split | None = None


class Colours:
    """Mean and standard deviation of each channel, from a histogram of its 256 values.

    Counts are whole numbers, so the result is exact and does not depend on the order or the size of the pieces in
    which the pictures come.
    """

    def __init__(self, channels: int) -> None:
        self.counts = np.zeros((channels, 256), dtype=np.int64)

    def add(self, images: Pixels) -> None:
        """Count the pixels of ``(n, C, H, W)`` pictures."""
        for channel, counts in enumerate(self.counts):
            counts += np.bincount(images[:, channel].reshape(-1), minlength=256)

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """``(mean, std)`` of values in 0..1; a channel that never changes gets std 1, so that division is safe."""
        values = np.arange(256) / 255
        share = self.counts / self.counts.sum(axis=1, keepdims=True)
        mean = share @ values
        variance = (share * (values - mean[:, None]) ** 2).sum(axis=1)
        std = np.where(variance > 0, np.sqrt(variance), 1.0)
        return tuple(mean.tolist()), tuple(std.tolist())


def colours(pieces: Iterable[Pixels], channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation a channel of all pictures in ``pieces``."""
    tally = Colours(channels)
    for piece in pieces:
        tally.add(piece)
    return tally.statistics()
