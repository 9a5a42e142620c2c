"""A data set: two splits of uint8 images, the names of the classes, and mean and std of every channel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

IGNORE_INDEX = 255
"""In a label map: a pixel without a class, which counts neither in the loss nor in any metric."""


class LazyImages(Protocol):
    """The interface that :class:`~opteq.data.StreamedImages` share with a tensor of images; indexing decodes."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def ndim(self) -> int: ...

    @property
    def shape(self) -> torch.Size: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Split:
    """Images and labels: ``images`` is uint8 ``(N, C, h, w)``, ``labels`` int64 ``(N,)``.

    For segmentation (``dense``) ``labels`` is uint8 ``(N, h, w)``, with 255 for pixels without a class.

    ``images`` may also be :class:`~opteq.data.StreamedImages`, which are decoded when they are needed.

    uint8 takes a quarter of the memory of float32, on the host and on the device, and processes that map the same cache
    file share one copy. :class:`~opteq.data.Batches` converts one batch at a time to float32.

    >>> split = Split(torch.zeros(5, 3, 8, 8, dtype=torch.uint8), torch.arange(5))
    >>> len(split)
    5
    """

    images: Tensor | LazyImages
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            shape = tuple(self.images.shape)
            raise TypeError(f"Split.images should be uint8 of shape (N, C, h, w); got {self.images.dtype} {shape}")
        if (self.labels.dtype, self.labels.ndim) not in ((torch.int64, 1), (torch.uint8, 3)):
            given = f"{self.labels.dtype} {tuple(self.labels.shape)}"
            raise TypeError(f"Split.labels should be int64 of shape (N,), or uint8 of shape (N, h, w); got {given}")
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
        """Whether every pixel has a label (segmentation)."""
        return self.labels.ndim == 3


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set for classification or segmentation, as :func:`~opteq.data.load` returns it.

    ``mean`` and ``std`` have one value per channel, over all training pixels scaled to 0..1. ``unseen`` is a second
    test split, where a data set has one: images of the same classes but of sub-classes that training does not contain.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    mean: tuple[float, ...]
    std: tuple[float, ...]
    unseen: Split | None = None


class ChannelStatistics:
    """Mean and standard deviation of each channel, from a histogram of its 256 values.

    The counts are integers, so the result does not depend on the order or the size of the chunks that are added.
    """

    def __init__(self, channels: int) -> None:
        self.counts = np.zeros((channels, 256), dtype=np.int64)

    def add(self, images: Pixels) -> None:
        """Add the pixels of images ``(n, C, h, w)`` to the histogram."""
        for channel, counts in enumerate(self.counts):
            counts += np.bincount(images[:, channel].reshape(-1), minlength=256)

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """``(mean, std)`` of values in 0..1; std is 1 for a constant channel, so that division is safe."""
        values = np.arange(256) / 255
        share = self.counts / self.counts.sum(axis=1, keepdims=True)
        mean = share @ values
        variance = (share * (values - mean[:, None]) ** 2).sum(axis=1)
        std = np.where(variance > 0, np.sqrt(variance), 1.0)
        return tuple(mean.tolist()), tuple(std.tolist())


def channel_statistics(pieces: Iterable[Pixels], channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel over all images in ``pieces``."""
    statistics = ChannelStatistics(channels)
    for piece in pieces:
        statistics.add(piece)
    return statistics.statistics()
