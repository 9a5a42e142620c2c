"""Contrast, elastic deformation, pixelation, JPEG, saturation."""

from __future__ import annotations

import io

import numpy as np
import torch
from torch import Tensor

from opteq.common.errors import needs_extra
from opteq.data.corruptions.draws import Setting
from opteq.data.corruptions.filters import blur, coarsen, pixel_grid, sample_at


def contrast(x: Tensor, at: Setting) -> Tensor:
    """Closer to the mean color of the image."""
    mean = x.mean(dim=(2, 3), keepdim=True)
    return mean + at.level[0] * (x - mean)


def elastic_transform(x: Tensor, at: Setting) -> Tensor:
    """An affine map that moves three points at random, then smooth random displacements; the border is reflected."""
    side = min(x.shape[2:])
    strength, sigma, corners = (side * number for number in at.level)
    rows, columns = pixel_grid(x)
    middle = x.new_tensor([(x.shape[2] - 1) / 2, (x.shape[3] - 1) / 2])
    third = side / 3
    points = middle + third * x.new_tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0]])
    moved = points + at.draws.uniform(3, 2, low=-corners, high=corners).to(x)
    # The map with moved = [points, 1] A, for each image.
    affine = torch.linalg.solve(torch.cat([points, points.new_ones(3, 1)], dim=1), moved)
    place = torch.stack([rows, columns, torch.ones_like(rows)], dim=3) @ affine[:, None]
    shift = blur(at.draws.uniform(2, *x.shape[2:], low=-1, high=1).to(x), sigma) * strength
    return sample_at(x, place[..., 0] + shift[:, 0], place[..., 1] + shift[:, 1], "reflection")


def pixelate(x: Tensor, at: Setting) -> Tensor:
    """Averaged over larger pixels."""
    return coarsen(x, at.level[0])


def jpeg_compression(x: Tensor, at: Setting) -> Tensor:
    """Written as a JPEG file of a low quality, and read again."""
    with needs_extra("train"):
        from PIL import Image
    read = []
    for pixels in (255 * x).round().to(torch.uint8).movedim(1, 3).cpu().numpy():
        file = io.BytesIO()
        Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[..., 0]).save(file, "JPEG", quality=int(at.level[0]))
        read.append(np.asarray(Image.open(file)).reshape(pixels.shape))
    return torch.from_numpy(np.stack(read)).movedim(3, 1).to(x) / 255


def saturate(x: Tensor, at: Setting) -> Tensor:
    """Colors paler (levels 1 and 2) or stronger: the saturation of HSV, scaled and shifted.

    A grey pixel has no hue; where it gets a saturation, it becomes red, as the hue 0 is.
    """
    factor, shift = at.level
    value = x.amax(dim=1, keepdim=True)
    least = x.amin(dim=1, keepdim=True)
    before = (value - least) / value.clamp_min(1e-6)
    after = (factor * before + shift).clamp(0, 1)
    relative = torch.where(
        before > 0, (value - x) / (value - least).clamp_min(1e-6), x.new_tensor([0, 1, 1])[:, None, None]
    )
    return value - relative * value * after
