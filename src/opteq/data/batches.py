"""Batches of normalised float images from a uint8 split, the same for any number of processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
import torch
from torch import Tensor

from opteq.common.errors import UserError
from opteq.common.options import NamedOptions
from opteq.data.augmentation.options import Augmentation
from opteq.data.augmentation.shard import Shard
from opteq.data.augmentation.transform import BatchTransform
from opteq.data.dataset import Split
from opteq.data.prefetch import Residency, fits_on_device, prefetch, to_device
from opteq.data.streaming import StreamedImages

_ORDER, _AUGMENTATION, _NOISE = 0, 1, 2  # purposes of random numbers; part of their seed
_BREAKS_LABEL_MAPS = ("crop_padding", "randaugment", "mixup", "cutmix")


class Batches(metaclass=NamedOptions):
    """Epochs of batches: ``images`` float32 ``(B, C, h, w)``, normalised, and ``labels``, both on ``device``.

    ``labels`` is int64 ``(B,)``; with mixup or cutmix float ``(B, K)``, K = ``num_classes``, each row summing to one;
    for segmentation int64 ``(B, h, w)``, with 255 for pixels without a class.

    ``batch_size`` counts all processes: process ``rank`` of ``world`` gets a contiguous share of every batch, and
    shares differ by at most one sample (:meth:`share`, :meth:`weight`). Order and augmentation depend only on ``seed``,
    the epoch and the batch index. So the processes together see the same batches as a single process, and an epoch that
    is resumed in the middle (``skip``) continues unchanged. Cropped, flipped, erased and mixed images agree bit by bit;
    RandAugment and color jitter agree up to float rounding.

    Args:
        split: the images and labels.
        mean, std: one value per channel, for pixels in 0..1; see :class:`~opteq.data.Dataset`.
        batch_size: samples per batch over all processes. The last batch of an epoch may be smaller.
        augmentation: random changes; None for evaluation.
        shuffle: draw a new order for each epoch.
        seed: of the order and the augmentation.
        device: where batches are computed and returned.
        rank, world: the index of this process, and the number of processes.
        drop_last: skip a smaller last batch.
        empty_shares: allow an empty share of a batch with fewer samples than processes. An error otherwise: in training
            every process takes part in every step.
        channels_last: return images in that memory format.
        keep: ``"device"`` keeps all images on the device; ``"host"`` prefetches batches through pinned memory;
            ``"auto"`` chooses the device if the images take at most 40 % of its free memory. Streamed images are
            always prefetched, by their workers.
        num_classes: K of soft labels; by default the largest label plus one. Required for segmentation, where finding
            it would read every label map.

    >>> import opteq.data
    >>> digits = opteq.data.load("digits")
    >>> batches = Batches(digits.train, digits.mean, digits.std, 128, shuffle=True)
    >>> images, labels = next(batches.epoch(0))
    >>> len(batches), images.shape, images.dtype, labels.shape
    (12, torch.Size([128, 1, 8, 8]), torch.float32, torch.Size([128]))
    """

    def __init__(
        self,
        split: Split,
        mean: Sequence[float],
        std: Sequence[float],
        batch_size: int,
        *,
        augmentation: Augmentation | None = None,
        shuffle: bool = False,
        seed: int = 0,
        device: str | torch.device = "cpu",
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
        empty_shares: bool = False,
        channels_last: bool = False,
        keep: Residency = "auto",
        num_classes: int | None = None,
    ) -> None:
        self.augmentation = Augmentation() if augmentation is None else augmentation
        self.batch_size, self.shuffle, self.seed, self.rank, self.world = batch_size, shuffle, seed, rank, world
        self.samples, self.drop_last = len(split), drop_last
        self.mean, self.std = tuple(mean), tuple(std)
        _, self.channels, self.height, self.width = split.images.shape
        self.dense = split.dense
        self._check(self.channels, mean, std, keep)
        if not empty_shares:
            self._check_shares()
        self.device = torch.device(device)
        if self.dense and num_classes is None:
            raise ValueError("Batches.num_classes is needed for a split with label maps")
        least = 1 if self.dense else int(split.labels.max()) + 1
        self.num_classes = least if num_classes is None else num_classes
        if self.num_classes < least:
            raise ValueError(
                f"Batches.num_classes should be at least {least}, the largest label plus one; got {num_classes!r}"
            )
        beside = split.labels.numel() if self.dense else 0
        self._images = split.images
        self.kept_on_device = False
        if isinstance(split.images, Tensor) and fits_on_device(split.images, self.device, keep, beside):
            self.kept_on_device, self._images = True, split.images.to(self.device)
        # Classes of images are small; label maps are as large as the images, and stay beside them.
        self._labels = split.labels.to(self.device) if self.kept_on_device or not self.dense else split.labels
        self._make = BatchTransform(self.augmentation, mean, std, self.num_classes, self.device, channels_last)

    def _check(self, channels: int, mean: Sequence[float], std: Sequence[float], keep: Residency) -> None:
        for option, least in (("batch_size", 1), ("seed", 0), ("rank", 0), ("world", 1)):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Batches.{option} should be an integer; got {value!r}")
            if value < least:
                raise UserError(f"Batches.{option} should be at least {least}; got {value!r}")
        if self.rank >= self.world:
            raise ValueError(f"Batches.rank should be below world = {self.world}; got {self.rank}")
        if keep not in ("auto", "device", "host"):
            raise ValueError(f"Batches.keep should be 'auto', 'device' or 'host'; got {keep!r}")
        if self.samples == 0:
            raise UserError("the split has no images; batches need at least one")
        if len(mean) != channels or len(std) != channels or not all(value > 0 for value in std):
            raise ValueError(
                f"Batches.mean and std should have one value for each of {channels} channels, std above 0; "
                f"got {tuple(mean)} and {tuple(std)}"
            )
        if len(self) == 0:
            raise UserError(
                f"batch_size {self.batch_size} is more than the {self.samples} samples and drop_last is on: "
                f"there is no batch; take a batch_size of at most {self.samples}"
            )
        misplaced = [name for name in _BREAKS_LABEL_MAPS if self.dense and getattr(self.augmentation, name)]
        if misplaced:
            raise UserError(
                f"augment.{misplaced[0]} would move images but not their label maps; "
                "use crop_height and crop_width, scale_min and scale_max, flip, color_jitter or erase"
            )
        padding, side = self.augmentation.crop_padding, min(self.height, self.width)
        if padding >= side:  # a crop could show nothing of the image, and there is nothing to reflect
            raise UserError(f"crop_padding should be less than the {side} pixels of an image; got {padding}")

    def _check_shares(self) -> None:
        smallest = self.global_size(len(self) - 1)
        if smallest < self.world:
            raise UserError(
                f"the last of {len(self)} batches has {smallest} samples, too few for {self.world} processes "
                f"({self.samples} samples, batch_size {self.batch_size}); {self._remedy()}"
            )

    def _remedy(self) -> str:
        """The nearest batch size whose last batch has a sample for every process."""
        sizes = range(self.world, max(self.samples, self.world) + 1)
        good = [size for size in sizes if size <= self.samples and (self.samples % size or size) >= self.world]
        if not good:
            return f"use at most {self.samples} processes"
        nearest = min(good, key=lambda size: abs(size - self.batch_size))
        return f"take batch_size {nearest}" + ("" if self.batch_size < self.world else " or drop_last")

    def __len__(self) -> int:
        """Batches in an epoch."""
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def global_size(self, index: int) -> int:
        """Number of samples of batch ``index`` over all processes."""
        if not 0 <= index < len(self):
            raise IndexError(f"there are batches 0 to {len(self) - 1}; got {index}")
        return min(self.batch_size, self.samples - index * self.batch_size)

    def share(self, index: int) -> range:
        """The positions of batch ``index`` that belong to this process."""
        size = self.global_size(index)
        return range(self.rank * size // self.world, (self.rank + 1) * size // self.world)

    def weight(self, index: int) -> float:
        """The factor of this process's mean loss for which the mean over processes is the mean over the batch.

        It is ``world * share size / batch size``: 1 where all shares have the same size.
        """
        return len(self.share(index)) * self.world / self.global_size(index)

    def epoch(self, number: int, skip: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of epoch ``number``, without the first ``skip``."""
        for option, value in (("number", number), ("skip", skip)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Batches.epoch's {option} should be an integer; got {value!r}")
            if value < 0:
                raise ValueError(f"Batches.epoch's {option} should be at least 0; got {value}")
        if skip > len(self):
            raise ValueError(f"Batches.epoch's skip should be at most {len(self)}, the number of batches; got {skip}")
        return self._run(number, skip)

    def noise(self, number: int, index: int) -> Tensor:
        """Uniform noise in [-1, 1], float32, in the shape of this process's images of batch ``index`` of an epoch.

        It depends only on seed, epoch and batch, as the images do, so that the random start of an attack
        (:class:`opteq.analysis.PGD`) can be repeated.
        """
        own, size = self.share(index), self.global_size(index)
        drawn = self._random(_NOISE, number, index).random(
            (size, self.channels, *self.augmentation.size(self.height, self.width)), dtype=np.float32
        )
        return to_device(torch.from_numpy(drawn[own.start : own.stop]), self.device).mul(2).sub_(1)

    def _random(self, *numbers: int) -> np.random.Generator:
        """A generator that depends only on the seed and ``numbers``."""
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, *numbers))))

    def _run(self, number: int, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.from_numpy(
            self._random(_ORDER, number).permutation(self.samples) if self.shuffle else np.arange(self.samples)
        )
        on_device = to_device(order, self.device)  # once per epoch; batches index into it
        shards = (self._shard(number, index) for index in range(skip, len(self)))
        images = self._images
        if self.kept_on_device and isinstance(images, Tensor):
            for shard in shards:
                rows = shard.rows(on_device)
                yield self._make(images, rows, self._labels[rows], shard)
            return
        ahead, shards_again = itertools.tee(shards)
        wanted = (shard.rows(order) for shard in ahead)
        if isinstance(images, StreamedImages):
            with closing(images.batches(wanted, self.device)) as decoded:
                for shard, batch in zip(shards_again, decoded, strict=True):
                    yield self._make(batch, None, self._labels[shard.rows(on_device)], shard)
            return
        assert isinstance(images, Tensor)
        sources = (images, self._labels) if self.dense else (images,)
        with closing(prefetch(sources, wanted, self.device)) as arriving:
            for shard, (images, *maps) in zip(shards_again, arriving, strict=True):
                labels = maps[0] if maps else self._labels[shard.rows(on_device)]
                yield self._make(images, None, labels, shard)

    def _shard(self, number: int, index: int) -> Shard:
        """The samples of the batch that this process needs, and the random numbers of the whole batch."""
        size, own = self.global_size(index), self.share(index)
        draws = self.augmentation.draw(self._random(_AUGMENTATION, number, index), size, self.height, self.width)
        if "partner" not in draws or self.world == 1:
            return Shard(index * self.batch_size, own, None, draws)
        # Partners come from the whole batch: those of other processes are computed here as well.
        return Shard(index * self.batch_size, own, draws["partner"][own.start : own.stop], draws)
