"""From bytes and random numbers to the floats of one batch, on the device and without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opteq.common.errors import needs_extra
from opteq.data.augmentation.geometry import crop_and_flip, inside_boxes, mix, soft_labels
from opteq.data.augmentation.options import Augmentation
from opteq.data.augmentation.shard import Plan
from opteq.data.augmentation.windows import Windows
from opteq.data.dataset import IGNORED
from opteq.data.prefetch import to_device


class Maker:
    """Crop and flip, of pictures and maps of labels alike; colours; normalisation; erasing; mixing, in this order."""

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
        # Normalising is one subtraction and one multiplication in units of bytes, which need no division by 255.
        shift = torch.tensor(mean, dtype=torch.float64) * 255
        scale = 1 / (torch.tensor(std, dtype=torch.float64) * 255)
        self.shift, self.scale = (value.float().view(1, -1, 1, 1).to(device) for value in (shift, scale))

    def __call__(self, images: Tensor, rows: Tensor | None, labels: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """The batch of ``plan``. ``images`` holds its bytes at ``rows``, or is just them where ``rows`` is None.

        ``labels`` are the batch's own, one a picture or a map each.
        """
        options, dense = self.augmentation, labels.ndim == 3
        if options.windows:
            windows = Windows(self._drawn(plan.part("window")), options.crop_height, options.crop_width, images)
            made = windows.of_pictures(images, rows, self.shift).contiguous(memory_format=self.memory_format)
            labels = windows.of_labels(labels, IGNORED) if dense else labels
        elif options.moves:
            move = self._drawn(plan.part("move"))
            pixels = crop_and_flip(images, rows, move, options.crop_padding, options.crop_fill == "reflect")
            made = pixels.to(torch.float32, memory_format=self.memory_format)
            labels = crop_and_flip(labels[:, None], None, move, 0, False)[:, 0] if dense else labels
        else:
            pixels = images if rows is None else images.index_select(0, rows)
            made = pixels.to(torch.float32, memory_format=self.memory_format)
        labels = labels.long()
        if options.recolours:
            with needs_extra("train"):
                from opteq.data.augmentation.color import recoloured

            made = recoloured(made.div_(255), options, plan).mul_(255)
            made = made.contiguous(memory_format=self.memory_format)
        made = made.sub_(self.shift).mul_(self.scale)
        if options.erase:
            erased = inside_boxes(self._drawn(plan.part("erase")), *made.shape[2:])
            made = made.masked_fill_(erased, 0.0)
        if options.mixes:
            return self._mixed(made, labels, plan)
        return made, labels

    def _mixed(self, images: Tensor, labels: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        count = len(plan.own)
        paste, blend, keep = (
            self._drawn(plan.draws[name][plan.own.start : plan.own.stop]) for name in ("paste", "blend", "keep")
        )
        if plan.partners is None:
            partner = self._drawn(plan.draws["partner"])
            partners, their_labels = images[partner], labels[partner]
        else:
            partners, their_labels = images[count:], labels[count:]
            images, labels = images[:count], labels[:count]
        return mix(images, partners, paste, blend), soft_labels(labels, their_labels, keep, self.classes)

    def _drawn(self, numbers: npt.NDArray[np.generic]) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(numbers)), self.device)
