"""Batches of normalised floats from a split of bytes: the same ones however many processes share the work."""

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
from opteq.data.augmentation.shard import Plan
from opteq.data.augmentation.transform import Maker
from opteq.data.dataset import Split
from opteq.data.prefetch import Keep, fetched, stays_on_device, to_device

_ORDER, _CHANGES, _NOISE = 0, 1, 2  # what random numbers are for; part of their seed
_MISPLACING = ("crop_padding", "randaugment", "mixup", "cutmix")


class Batches(metaclass=NamedOptions):
    """Epochs of batches: ``images`` float32 ``(B, C, H, W)``, normalised, and ``labels``, both on ``device``.

    ``labels`` is int64 ``(B,)``; with mixup or cutmix float ``(B, K)``, K = ``num_classes``, rows that sum to one. Of a
    split with labels for every pixel it is int64 ``(B, H, W)``, 255 where there is none.

    ``batch_size`` is that of all processes together: process ``rank`` of ``world`` gets its contiguous share of every
    batch, and shares differ by at most one sample (:meth:`share`, :meth:`weight`). Order and augmentation depend on
    ``seed``, the epoch's number and the batch's index alone. So all processes together see what one would see, and an
    epoch that is entered in the middle (``skip``) goes on as it would have. Cropped, flipped, erased and mixed pictures
    are equal bit by bit; RandAugment and jitter compute with floats and are equal up to their rounding.

    Args:
        split: what to draw from.
        mean, std: one number a channel, for pixels in 0..1; :class:`~opteq.data.Dataset` has them.
        batch_size: samples in a batch, over all processes. The last batch of an epoch may be smaller.
        augmentation: random changes; None for none, as for testing.
        shuffle: a new order each epoch.
        seed: another seed, another order and other changes.
        device: where batches are made and handed out.
        rank, world: which process this is, and of how many.
        drop_last: leave a smaller last batch out.
        empty_shares: let a process have nothing of a batch with fewer samples than processes, which is refused
            otherwise: in training they wait for each other, in a test they need not.
        channels_last: hand images out in that memory format.
        keep: ``"device"`` holds all pictures on the device; ``"host"`` leaves them where they are and fetches batches
            ahead of time through pinned memory; ``"auto"`` holds them if they take up to 40 % of the free memory.
        num_classes: K of soft labels; by default the largest label plus one. A split with labels for every pixel needs
            it: to find out would be to read them all.

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
        keep: Keep = "auto",
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
            raise ValueError("Batches.num_classes is needed for a split with labels for every pixel")
        least = 1 if self.dense else int(split.labels.max()) + 1
        self.num_classes = least if num_classes is None else num_classes
        if self.num_classes < least:
            raise ValueError(f"Batches.num_classes should be at least {least}, as labels go; got {num_classes!r}")
        beside = split.labels.numel() if self.dense else 0
        self.kept_on_device = stays_on_device(split.images, self.device, keep, beside)
        self._images = split.images.to(self.device) if self.kept_on_device else split.images
        # Classes of pictures are few numbers; maps of labels are as large as pictures, and stay with them.
        self._labels = split.labels.to(self.device) if self.kept_on_device or not self.dense else split.labels
        self._make = Maker(self.augmentation, mean, std, self.num_classes, self.device, channels_last)

    def _check(self, channels: int, mean: Sequence[float], std: Sequence[float], keep: Keep) -> None:
        for option, least in (("batch_size", 1), ("seed", 0), ("rank", 0), ("world", 1)):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Batches.{option} should be a whole number; got {value!r}")
            if value < least:
                raise UserError(f"Batches.{option} should be at least {least}; got {value!r}")
        if self.rank >= self.world:
            raise ValueError(f"Batches.rank should be below world = {self.world}; got {self.rank}")
        if keep not in ("auto", "device", "host"):
            raise ValueError(f"Batches.keep should be 'auto', 'device' or 'host'; got {keep!r}")
        if self.samples == 0:
            raise UserError("the split has no pictures; batches need at least one")
        if len(mean) != channels or len(std) != channels or not all(value > 0 for value in std):
            raise ValueError(
                f"Batches.mean and std should have one number for each of {channels} channels, std above 0; "
                f"got {tuple(mean)} and {tuple(std)}"
            )
        if len(self) == 0:
            raise UserError(
                f"batch_size {self.batch_size} is more than the {self.samples} samples and drop_last is on: "
                f"there is no batch; take a batch_size of at most {self.samples}"
            )
        misplaced = [name for name in _MISPLACING if self.dense and getattr(self.augmentation, name)]
        if misplaced:
            raise UserError(
                f"augment.{misplaced[0]} moves pictures without the labels of their pixels; "
                "use crop_height and crop_width, scale_min and scale_max, flip, color_jitter or erase"
            )
        padding, side = self.augmentation.crop_padding, min(self.height, self.width)
        if self.augmentation.crop_fill == "reflect" and padding >= side:
            raise UserError(f"crop_padding {padding} cannot be reflected in {side} pixels; take less than {side}")

    def _check_shares(self) -> None:
        smallest = self.global_size(len(self) - 1)
        if smallest < self.world:
            raise UserError(
                f"the last of {len(self)} batches has {smallest} samples, too few for {self.world} processes "
                f"({self.samples} samples, batch_size {self.batch_size}); {self._remedy()}"
            )

    def _remedy(self) -> str:
        """The nearest batch size whose last batch has a sample for everyone."""
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
        """How many samples batch ``index`` has over all processes."""
        if not 0 <= index < len(self):
            raise IndexError(f"there are batches 0 to {len(self) - 1}; got {index}")
        return min(self.batch_size, self.samples - index * self.batch_size)

    def share(self, index: int) -> range:
        """Which places of batch ``index`` are this process's."""
        size = self.global_size(index)
        return range(self.rank * size // self.world, (self.rank + 1) * size // self.world)

    def weight(self, index: int) -> float:
        """What to multiply this process's mean loss by, so that the mean over processes is the mean over the batch.

        It is ``world`` times the share's size over the batch's: 1 where all shares are of one size.
        """
        return len(self.share(index)) * self.world / self.global_size(index)

    def epoch(self, number: int, skip: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of epoch ``number``, without the first ``skip``."""
        for option, value in (("number", number), ("skip", skip)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Batches.epoch's {option} should be a whole number; got {value!r}")
            if value < 0:
                raise ValueError(f"Batches.epoch's {option} should be at least 0; got {value}")
        if skip > len(self):
            raise ValueError(f"Batches.epoch's skip should be at most {len(self)}, the batches there are; got {skip}")
        return self._run(number, skip)

    def noise(self, number: int, index: int) -> Tensor:
        """Random numbers for this process's share of batch ``index`` of epoch ``number``: uniform in [-1, 1], float32.

        They are shaped like the share's images and depend, as these do, on seed, epoch and batch alone, whoever asks
        how often: where an attack on the pictures begins at random (:class:`opteq.analysis.PGD`), it can be repeated.
        """
        own, size = self.share(index), self.global_size(index)
        drawn = self._random(_NOISE, number, index).random(
            (size, self.channels, *self.augmentation.size(self.height, self.width)), dtype=np.float32
        )
        return to_device(torch.from_numpy(drawn[own.start : own.stop]), self.device).mul(2).sub_(1)

    def _random(self, *numbers: int) -> np.random.Generator:
        """Random numbers that depend on the seed and ``numbers`` alone."""
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, *numbers))))

    def _run(self, number: int, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.from_numpy(
            self._random(_ORDER, number).permutation(self.samples) if self.shuffle else np.arange(self.samples)
        )
        on_device = to_device(order, self.device)  # once an epoch; batches take views of it
        plans = (self._plan(number, index) for index in range(skip, len(self)))
        if self.kept_on_device:
            for plan in plans:
                rows = plan.rows(on_device)
                yield self._make(self._images, rows, self._labels[rows], plan)
            return
        ahead, plans_again = itertools.tee(plans)
        sources = (self._images, self._labels) if self.dense else (self._images,)
        with closing(fetched(sources, (plan.rows(order) for plan in ahead), self.device)) as arriving:
            for plan, (images, *maps) in zip(plans_again, arriving, strict=True):
                labels = maps[0] if maps else self._labels[plan.rows(on_device)]
                yield self._make(images, None, labels, plan)

    def _plan(self, number: int, index: int) -> Plan:
        """Which samples of the batch are needed here, and their random numbers."""
        size, own = self.global_size(index), self.share(index)
        draws = self.augmentation.draw(self._random(_CHANGES, number, index), size, self.height, self.width)
        if "partner" not in draws or self.world == 1:
            return Plan(index * self.batch_size, own, None, draws)
        # Partners come from the whole batch, so some belong to other processes: they are made here once more.
        return Plan(index * self.batch_size, own, draws["partner"][own.start : own.stop], draws)
