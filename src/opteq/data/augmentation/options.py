"""The options of data augmentation, and the random numbers for one batch.

kornia computes the changes of colour. Its random classes are not used: a sample's random numbers depend on the batch
that it is in, so that a resumed run, or one with another number of processes, would see other images, and RandAugment
chooses its operations once per batch. Crop and flip take 3.0 ms here and 13.6 ms there (128 images of 3x32x32, one
thread of a CPU).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from opteq.common import validate as _validate
from opteq.common.options import NamedOptions

Draws = dict[str, npt.NDArray[np.generic]]
"""Random numbers of a batch by purpose; the first dimension is the sample's position in the batch."""

OPERATIONS = (
    "identity",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "rotate",
    "brightness",
    "color",
    "contrast",
    "sharpness",
    "posterize",
    "solarize",
    "autocontrast",
    "equalize",
)
"""The operations of RandAugment; a random number is an index into them."""


@dataclass(frozen=True)
class Augmentation(metaclass=NamedOptions):
    """Random changes to each image, applied in this order. All are off by default.

    Args:
        crop_padding: pad by this number of pixels, then crop to the original size at random; 4 is usual for 32x32.
        crop_fill: the padding: ``"zero"`` (black) or ``"reflect"``.
        flip: flip horizontally with probability 1/2.
        crop_height, crop_width: crop a random window of this size, instead of ``crop_padding``: for images that are
            larger than the network's training size. Label maps are cropped with the images.
        scale_min, scale_max: before the crop, resize by a factor between the two. Pixels of a window outside the image
            have the mean color and no label.
        randaugment: number of operations per image, drawn from 14 (RandAugment, Cubuk et al. 2020), independently for
            each image as in the paper; 2 is usual.
        randaugment_magnitude: their strength in (0, 30]: at 30, rotations by 30 degrees, shears by 0.3, translations by
            45 % of the side, color factors of 1 ± 0.9. The default is the paper's for CIFAR-sized networks.
        color_jitter: multiply brightness, contrast, then saturation by a factor from [1 - v, 1 + v] each.
        erase: probability of filling a box with the mean color (Random Erasing, Zhong et al. 2020), of 2 to 33 % of the
            area and an aspect ratio of 0.3 to 3.3.
        mixup: alpha > 0 blends each image with another of its batch, with weight from Beta(alpha, alpha); 0.2 is usual.
        cutmix: alpha > 0 pastes a box of another image instead, with area from Beta(alpha, alpha); 1 is usual. If both
            are on, each image gets one of them with probability 1/2.

    With ``mixup`` or ``cutmix``, labels are soft: float ``(B, K)``, each row summing to one.

    >>> Augmentation(crop_padding=4, flip=True).mixes
    False
    >>> Augmentation(erase=2)
    Traceback (most recent call last):
    ...
    ValueError: Augmentation.erase should be in [0, 1]; got 2
    """

    crop_padding: int = 0
    crop_fill: Literal["zero", "reflect"] = "zero"
    flip: bool = False
    crop_height: int = 0
    crop_width: int = 0
    scale_min: float = 1.0
    scale_max: float = 1.0
    randaugment: int = 0
    randaugment_magnitude: float = 9.0
    color_jitter: float = 0.0
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        _validate.whole(self, "crop_padding", 0)
        _validate.whole(self, "randaugment", 0)
        _validate.choice(self, "crop_fill", ("zero", "reflect"))
        _validate.flag(self, "flip")
        for field, most in (("color_jitter", 1.0), ("erase", 1.0), ("mixup", math.inf), ("cutmix", math.inf)):
            self._check_number(field, most)
        self._check_window()
        _validate.positive(self, "randaugment_magnitude")
        self._check_number("randaugment_magnitude", 30.0)

    def _check_window(self) -> None:
        for field in ("crop_height", "crop_width"):
            _validate.whole(self, field, 0)
        for field in ("scale_min", "scale_max"):
            _validate.positive(self, field)
        if (self.crop_height == 0) != (self.crop_width == 0):
            raise ValueError(
                "Augmentation.crop_height and crop_width belong together: give both or neither; "
                f"got {self.crop_height} and {self.crop_width}"
            )
        if self.scale_min > self.scale_max:
            raise ValueError(
                f"Augmentation.scale_min should be at most scale_max = {self.scale_max:g}; got {self.scale_min:g}"
            )
        if not self.windows and (self.scale_min, self.scale_max) != (1, 1):
            raise ValueError("Augmentation.scale_min and scale_max need crop_height and crop_width")
        if self.windows and self.crop_padding:
            raise ValueError("Augmentation.crop_padding and crop_height are two ways to crop; give one of them")

    def _check_number(self, field: str, most: float) -> None:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"Augmentation.{field} should be a number; got {value!r}")
        if not (0 <= value <= most and math.isfinite(value)):
            limits = "at least 0 and finite" if most == math.inf else f"in [0, {most:g}]"
            raise ValueError(f"Augmentation.{field} should be {limits}; got {value!r}")

    @property
    def windows(self) -> bool:
        """Whether windows are cropped (and flipped)."""
        return self.crop_height > 0

    @property
    def moves(self) -> bool:
        """Whether images are cropped or flipped at their original size."""
        return not self.windows and (self.crop_padding > 0 or self.flip)

    @property
    def changes_colors(self) -> bool:
        """Whether colors change, which needs kornia."""
        return self.randaugment > 0 or self.color_jitter > 0

    @property
    def mixes(self) -> bool:
        """Whether labels are soft."""
        return self.mixup > 0 or self.cutmix > 0

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of augmented images from images of ``height`` x ``width``."""
        return (self.crop_height, self.crop_width) if self.windows else (height, width)

    def draw(self, random: np.random.Generator, count: int, height: int, width: int) -> Draws:
        """All random numbers for one batch of ``count`` images of ``height`` x ``width``.

        They are drawn on the host for the whole batch: a process with a part of it takes its part of the numbers, so
        the result does not depend on how the batch is divided.
        """
        draws: Draws = {}
        if self.moves:
            shifts = random.integers(0, 2 * self.crop_padding, size=(count, 2), endpoint=True)
            mirrored = random.integers(0, 2, size=(count, 1)) if self.flip else np.zeros((count, 1), dtype=np.int64)
            draws["move"] = np.concatenate((shifts, mirrored), axis=1)
        if self.windows:
            draws["window"] = self._draw_windows(random, count, height, width)
            height, width = self.size(height, width)
        if self.randaugment:
            draws["operation"] = random.integers(0, len(OPERATIONS), size=(count, self.randaugment))
            draws["sign"] = 2 * random.integers(0, 2, size=(count, self.randaugment)) - 1
        if self.color_jitter:
            reach = self.color_jitter
            draws["jitter"] = random.uniform(1 - reach, 1 + reach, size=(count, 3)).astype(np.float32)
        if self.erase:
            area = random.uniform(0.02, 0.33, size=count)
            ratio = np.exp(random.uniform(math.log(0.3), math.log(3.3), size=count))
            box = _boxes(random, np.sqrt(area * ratio), np.sqrt(area / ratio), height, width)
            draws["erase"] = box * (random.random(count) < self.erase)[:, None]
        if self.mixes:
            draws |= self._draw_mixing(random, count, height, width)
        return draws

    def _draw_windows(
        self, random: np.random.Generator, count: int, height: int, width: int
    ) -> npt.NDArray[np.float32]:
        """``(count, 5)``: top and left of the window in the resized image, the scale factors of height and width, and
        1 for flipped.
        """
        scale = random.uniform(self.scale_min, self.scale_max, size=count)
        columns = []
        for side, window in ((height, self.crop_height), (width, self.crop_width)):
            enlarged = np.maximum(np.rint(side * scale), 1).astype(np.int64)
            # Negative where the resized image is smaller than the window, which then contains it.
            spare = enlarged - window
            start = random.integers(np.minimum(spare, 0), np.maximum(spare, 0), endpoint=True)
            columns.append((start, enlarged / side))
        mirrored = random.integers(0, 2, size=count) if self.flip else np.zeros(count)
        (top, tall), (left, wide) = columns
        return np.stack((top, left, tall, wide, mirrored), axis=1).astype(np.float32)

    def _draw_mixing(self, random: np.random.Generator, count: int, height: int, width: int) -> Draws:
        pastes = random.random(count) < 0.5 if self.mixup and self.cutmix else np.full(count, self.cutmix > 0)
        share = np.where(
            pastes,
            random.beta(self.cutmix or 1.0, self.cutmix or 1.0, size=count),
            random.beta(self.mixup or 1.0, self.mixup or 1.0, size=count),
        )
        side = np.sqrt(1 - share)
        box = _boxes(random, side, side, height, width) * pastes[:, None]
        covered = (box[:, 1] - box[:, 0]) * (box[:, 3] - box[:, 2]) / (height * width)
        return {
            "partner": random.permutation(count),
            "paste": box,
            "blend": np.where(pastes, 1.0, share).astype(np.float32),
            # Weight of the own label; for a pasted box the remaining area after rounding to whole pixels.
            "keep": np.where(pastes, 1 - covered, share).astype(np.float32),
        }


def _boxes(
    random: np.random.Generator,
    tall: npt.NDArray[np.float64],
    wide: npt.NDArray[np.float64],
    height: int,
    width: int,
) -> npt.NDArray[np.int64]:
    """Random boxes ``(top, bottom, left, right)`` from their relative heights and widths."""
    columns = []
    for share, side in ((tall, height), (wide, width)):
        length = np.clip(np.rint(share * side), 0, side).astype(np.int64)
        start = random.integers(0, side - length, endpoint=True)
        columns += [start, start + length]
    return np.stack(columns, axis=1)
