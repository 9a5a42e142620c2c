"""From uint8 images and random numbers to one augmented, normalised float batch, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opteq.common.errors import needs_extra
from opteq.data.augmentation.geometry import crop_and_flip, inside_boxes, mix, soft_labels
from opteq.data.augmentation.options import Augmentation
from opteq.data.augmentation.shard import Shard
from opteq.data.augmentation.windows import Windows
from opteq.data.dataset import IGNORE_INDEX
from opteq.data.prefetch import to_device


class BatchTransform:
    """Crop and flip images and label maps, change colors, normalise, erase, mix, in this order."""

    def __init__(
        self,
        augmentation: Augmentation,
        mean: Sequence[float],
        std: Sequence[float],
        classes: int,
        device: torch.device,
        channels_last: bool,
    ) -> None:
        self.augmentation, self.classes, self.device = augmentation, classes, device
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        # Mean and std in units of uint8 values, so that no division by 255 is needed.
        shift = torch.tensor(mean, dtype=torch.float64) * 255
        scale = 1 / (torch.tensor(std, dtype=torch.float64) * 255)
        self.shift, self.scale = (value.float().view(1, -1, 1, 1).to(device) for value in (shift, scale))

    def __call__(self, images: Tensor, rows: Tensor | None, labels: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
        """The batch of ``shard``. Its images are the ``rows`` of ``images``, or all of them where ``rows`` is None.

        ``labels`` are the labels of the batch: one class per image, or one label map.
        """
        options, dense = self.augmentation, labels.ndim == 3
        if options.windows:
            windows = Windows(self._drawn(shard.part("window")), options.crop_height, options.crop_width, images)
            batch = windows.of_images(images, rows, self.shift).contiguous(memory_format=self.memory_format)
            labels = windows.of_labels(labels, IGNORE_INDEX) if dense else labels
        elif options.moves:
            move = self._drawn(shard.part("move"))
            pixels = crop_and_flip(images, rows, move, options.crop_padding, options.crop_fill == "reflect")
            batch = pixels.to(torch.float32, memory_format=self.memory_format)
            labels = crop_and_flip(labels[:, None], None, move, 0, False)[:, 0] if dense else labels
        else:
            pixels = images if rows is None else images.index_select(0, rows)
            batch = pixels.to(torch.float32, memory_format=self.memory_format)
        labels = labels.long()
        if options.changes_colors:
            with needs_extra("train"):
                from opteq.data.augmentation.color import jitter_and_randaugment

            batch = jitter_and_randaugment(batch.div_(255), options, shard).mul_(255)
            batch = batch.contiguous(memory_format=self.memory_format)
        batch = batch.sub_(self.shift).mul_(self.scale)
        if options.erase:
            erased = inside_boxes(self._drawn(shard.part("erase")), *batch.shape[2:])
            batch = batch.masked_fill_(erased, 0.0)
        if options.mixes:
            return self._mixed(batch, labels, shard)
        return batch, labels

    def _mixed(self, images: Tensor, labels: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
        count = len(shard.own)
        paste, blend, keep = (
            self._drawn(shard.draws[name][shard.own.start : shard.own.stop]) for name in ("paste", "blend", "keep")
        )
        if shard.partners is None:
            partner = self._drawn(shard.draws["partner"])
            partners, their_labels = images[partner], labels[partner]
        else:
            partners, their_labels = images[count:], labels[count:]
            images, labels = images[:count], labels[:count]
        return mix(images, partners, paste, blend), soft_labels(labels, their_labels, keep, self.classes)

    def _drawn(self, numbers: npt.NDArray[np.generic]) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(numbers)), self.device)
