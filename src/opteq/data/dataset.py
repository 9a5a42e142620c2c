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


@dataclass(frozen=True, eq=False)
class Split:
    """Pictures and their classes: ``images`` is uint8 ``(N, C, H, W)``, ``labels`` int64 ``(N,)``.

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
        if self.labels.dtype != torch.int64 or self.labels.ndim != 1:
            shape = tuple(self.labels.shape)
            raise TypeError(f"Split.labels should be int64 of shape (N,); got {self.labels.dtype} {shape}")
        if len(self.images) != len(self.labels):
            raise ValueError(f"Split has {len(self.images)} images and {len(self.labels)} labels; give one label each")

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set for classification, as :func:`~opteq.data.load` returns it.

    ``mean`` and ``std`` have one number a channel: of the training split's pixels in 0..1, each pixel counted once.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    mean: tuple[float, ...]
    std: tuple[float, ...]


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
