"""Predictions for single images, with the preprocessing that was saved beside the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from opteq.common.errors import UserError
from opteq.data.readers.decode import open_image, resize_and_crop, to_rgb

if TYPE_CHECKING:
    from PIL.Image import Image

ImageLike: TypeAlias = "str | Path | IO[bytes] | Image | np.ndarray[Any, Any] | Tensor"
"""A file, an open one, a Pillow image, an array ``(h, w)`` or ``(h, w, channels)``, a tensor ``(channels, h, w)``."""

LARGEST = 16384
"""Of a side of images, in pixels."""
LEAST = 1e-6
"""Of a standard deviation of pixels: those of 8 bits are 4e-3 apart."""


@dataclass(frozen=True)
class Prediction:
    """A classifier's prediction for one image.

    Attributes:
        classes: the names of all classes.
        logits: one number per class.
        probabilities: their softmax.
        steps: solver steps; the most of all equilibrium layers, 0 without any.
        residual: the largest relative residual of the layers, 0 without any.
        converged: whether all layers reached their tolerance.
    """

    classes: tuple[str, ...]
    logits: Tensor
    probabilities: Tensor
    steps: int
    residual: float
    converged: bool

    @property
    def label(self) -> str:
        """The name of the most probable class."""
        return self.classes[self.index]

    @property
    def index(self) -> int:
        """Its number."""
        return int(self.logits.argmax())

    @property
    def confidence(self) -> float:
        """Its probability."""
        return float(self.probabilities[self.index])

    def top(self, count: int = 5) -> list[tuple[str, float]]:
        """The most probable classes with their probabilities; all where there are fewer than ``count``."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UserError(f"the number of classes to show should be a whole number of at least 1; got {count!r}")
        best = self.probabilities.topk(min(count, len(self.classes)))
        return [(self.classes[i], p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]

    def __str__(self) -> str:
        solved = "" if self.converged else f" (not converged: residual {self.residual:.1e})"
        return f"{self.label} {self.confidence:.1%}{solved}"


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes a model's input: channels, size, mean and standard deviation.

    Attributes:
        channels: 1 makes images grey, 3 makes them RGB.
        size: height and width; None leaves images as large as they are.
        mean, std: one number per channel, for pixels in 0..1.
        classes: names of the classes.
    """

    channels: int
    size: tuple[int, int] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Preprocessing:
        """That of a model's configuration.

        Without ``image_shape``, ``mean`` and ``std`` in ``config["extra"]``, which training writes, images keep their
        size and pixels their range 0..1; without ``classes``, classes are called by their numbers.
        """
        extra, channels, count = config.get("extra", {}), config["in_channels"], config["num_classes"]
        try:
            shape = extra.get("image_shape")
            mean, std = (
                tuple(map(float, extra.get(key, [usual] * channels))) for key, usual in (("mean", 0), ("std", 1))
            )
            classes = tuple(map(str, extra.get("classes", range(count))))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"the model's preprocessing can't be read from config['extra']: {str(error)[:200]}"
            ) from error
        size = None if shape is None else check_shape(shape, channels)[1:]
        if len(mean) != channels or len(std) != channels or len(classes) != count:
            raise UserError(
                f"config['extra'] should have mean and std for {channels} channels and names of {count} classes; got "
                f"{len(mean)}, {len(std)} and {len(classes)}"
            )
        if not all(map(math.isfinite, mean + std)) or not all(one >= LEAST for one in std):
            raise UserError(f"config['extra'] should have a finite mean and a positive std; got {mean} and {std}")
        return cls(channels, size, mean, std, classes)

    def pixels(self, image: ImageLike) -> Tensor:
        """The image as uint8 ``(channels, h, w)``: grey or RGB, covering the model's size, cropped at the centre."""
        from PIL import Image

        if isinstance(image, Tensor):
            image = _array(image)
        if isinstance(image, np.ndarray):
            if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (1, 3, 4)) or not image.size:
                raise UserError(f"an image should be (h, w) or (h, w, 1, 3 or 4 channels); got {image.shape}")
            if image.dtype != np.uint8:
                raise UserError(f"an image's pixels should be uint8, 0 to 255; got {image.dtype}")
            image = Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image)
        opened = to_rgb(image) if isinstance(image, Image.Image) else open_image(_file(image))
        if self.channels not in (1, 3):
            raise UserError(
                f"the model takes {self.channels} channels, images have 1 or 3: call model(x) with a tensor"
            )
        if self.size is not None:
            opened = resize_and_crop(opened, *self.size)
        array = np.array(opened.convert("L" if self.channels == 1 else "RGB"))
        return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy())

    def normalised(self, pixels: Tensor) -> Tensor:
        """The model's input for uint8 pixels ``(..., channels, h, w)``."""
        mean, std = (torch.tensor(values, device=pixels.device).reshape(-1, 1, 1) for values in (self.mean, self.std))
        return (pixels.float() / 255 - mean) / std


def check_shape(shape: Any, channels: int) -> tuple[int, int, int]:
    """Channels, height and width of images, where ``shape`` says so for a model of ``channels``; else a line."""
    whole = isinstance(shape, Sequence) and len(shape) == 3 and all(type(side) is int for side in shape)
    if not whole or shape[0] != channels or not all(1 <= side <= LARGEST for side in shape[1:]):
        raise UserError(
            f"image_shape should be the numbers [{channels}, height, width] with sides of 1 to {LARGEST}; "
            f"got {str(shape)[:200]}"
        )
    return shape[0], shape[1], shape[2]


def _array(image: Tensor) -> np.ndarray[Any, Any]:
    if image.ndim != 3:
        raise UserError(f"an image should be a tensor (channels, h, w); got {tuple(image.shape)}")
    return image.detach().cpu().movedim(0, -1).contiguous().numpy()


def _file(image: Any) -> Any:
    if not isinstance(image, str | Path):
        return image
    path = Path(image)
    if not path.is_file():
        raise UserError(f"there is no image {path}")
    return path


def stack(pixels: Sequence[Tensor]) -> Tensor:
    """Images as one batch; an error where they differ in size."""
    sizes = {tuple(one.shape) for one in pixels}
    if len(sizes) > 1:
        raise UserError(
            f"the images have different sizes, {sorted(sizes)}, and the model was saved without one; predict them one "
            "by one, or set config['extra']['image_shape']"
        )
    return torch.stack(list(pixels))
