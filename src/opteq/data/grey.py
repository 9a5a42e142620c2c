"""Folders of grey images, and random crops of them made on the device."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from opteq.common.errors import UserError

_ENDINGS = (".png", ".bmp", ".jpg", ".jpeg", ".tif", ".tiff", ".pgm")


def read_grey(folder: str | Path) -> list[Tensor]:
    """The images of a folder in the order of their names, each ``(1, h, w)`` in uint8; colour becomes luminance."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; name one that holds images")
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in _ENDINGS)
    if not files:
        raise UserError(f"{folder} holds no images; known endings: {', '.join(_ENDINGS)}")
    return [_read(file) for file in files]


def _read(file: Path) -> Tensor:
    import numpy as np
    from PIL import Image

    try:
        with Image.open(file) as image:
            return torch.from_numpy(np.array(image.convert("L")))[None]
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error and others
        raise UserError(f"{file}: cannot read this image ({error}); replace or delete it") from error


class Crops:
    """Random square crops of images that lie on the device, turned and mirrored at random.

    Args:
        images: ``(N, h, w)`` floating point, all of one size.
        size: side of a crop.
    """

    def __init__(self, images: Tensor, size: int) -> None:
        if images.ndim != 3 or min(images.shape[1:]) < size:
            raise UserError(f"crops of {size} pixels need images (N, h, w) of at least that; got {tuple(images.shape)}")
        self.images = images
        self.size = size

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """``(count, 1, size, size)``; nothing here waits for the device."""
        number, height, width = self.images.shape
        device = self.images.device

        def below(limit: int) -> Tensor:
            return torch.randint(limit, (count,), device=device, generator=generator)

        along = torch.arange(self.size, device=device)
        which, top, left = below(number), below(height - self.size + 1), below(width - self.size + 1)
        rows, columns = top[:, None] + along, left[:, None] + along
        crops = self.images[which[:, None, None], rows[:, :, None], columns[:, None, :]][:, None]
        turn, mirror, flip = (below(2).bool()[:, None, None, None] for _ in range(3))
        crops = torch.where(turn, crops.mT, crops)
        crops = torch.where(mirror, crops.flip(3), crops)
        return torch.where(flip, crops.flip(2), crops)
