"""The published files of CIFAR-10-C and CIFAR-100-C: an array of images for each corruption, and one of labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from opteq.common.errors import UserError
from opteq.data.corruptions.severities import NAMES
from opteq.data.dataset import Split
from opteq.data.readers.source import reason

LEVELS = 5


class PublishedCorruptions:
    """``NAME.npy`` with images ``(5 n, height, width, 3)`` of uint8, and ``labels.npy`` with ``(5 n,)``.

    The first n belong to severity 1, the next n to severity 2, and so on. Files are mapped into memory: of each, the
    images that are asked for are read.

    Args:
        folder: where they lie.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise UserError(f"{folder} is no folder with the files of CIFAR-10-C, such as fog.npy and labels.npy")
        self.names = tuple(name for name in NAMES if (self.folder / f"{name}.npy").is_file())
        if not self.names:
            raise UserError(f"{folder} holds no corrupted images: they are in files such as fog.npy beside labels.npy")
        labels = self._array("labels")
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels) or len(labels) % LEVELS:
            raise UserError(
                f"{folder}/labels.npy should have a whole number for each image of {LEVELS} severities; "
                f"got {labels.dtype} of shape {labels.shape}"
            )
        self.labels = torch.from_numpy(labels.astype(np.int64))
        if bool((self.labels < 0).any()):
            raise UserError(f"{folder}/labels.npy has a label below 0")

    def __len__(self) -> int:
        """The number of images of each severity."""
        return len(self.labels) // LEVELS

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the images of one severity: number, channels, height, width."""
        images = self._array(self.names[0])
        return (len(self), *images.shape[3:], *images.shape[1:3])

    def split(self, name: str, severity: int, rows: Tensor | None = None) -> Split:
        """The images of one file at one severity, all or those of ``rows``, with their labels."""
        images = self._array(name)
        if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8 or len(images) != len(self.labels):
            raise UserError(
                f"{self.folder / name}.npy should have {len(self.labels)} images (height, width, 3) of uint8, as many "
                f"as labels.npy; got {images.dtype} of shape {images.shape}"
            )
        chosen = (torch.arange(len(self)) if rows is None else rows) + (severity - 1) * len(self)
        pixels = torch.from_numpy(images[chosen.numpy()]).permute(0, 3, 1, 2).contiguous()
        return Split(pixels, self.labels[chosen])

    def chosen(self, only: Sequence[str]) -> tuple[str, ...]:
        """The names of ``only``, each of which has a file, or all."""
        for name in only:
            if name not in self.names:
                raise UserError(f"{self.folder} has no file {name}.npy; it has {', '.join(self.names)}")
        return tuple(name for name in self.names if name in only) if only else self.names

    def _array(self, name: str) -> np.ndarray:
        path = self.folder / f"{name}.npy"
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # a damaged header fails in any of a dozen ways
            why = reason(error)[:200]
            raise UserError(f"{path} can't be read as an array of NumPy: {why}") from error
        if not isinstance(array, np.ndarray):
            array.close()
            raise UserError(f"{path} should be one array of NumPy; it is an archive of several")
        return array
