"""Linear filters and resampling of images, with reflected or repeated borders."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def correlate(x: Tensor, kernel: Tensor) -> Tensor:
    """Every channel of ``(B, C, h, w)`` with one kernel ``(k1, k2)`` of odd sides; the border is repeated."""
    down, right = kernel.shape[0] // 2, kernel.shape[1] // 2
    padded = F.pad(x, (right, right, down, down), mode="replicate")
    channels = x.shape[1]
    return F.conv2d(padded, kernel.to(x).expand(channels, 1, -1, -1), groups=channels)


def gaussian(sigma: float, truncate: float = 4.0) -> Tensor:
    """Weights of a Gaussian over whole pixels, adding up to one."""
    radius = max(1, math.ceil(truncate * sigma))
    place = torch.arange(-radius, radius + 1, dtype=torch.float32)
    weights = torch.exp(-0.5 * (place / max(sigma, 1e-3)) ** 2)
    return weights / weights.sum()


def blur(x: Tensor, sigma: float) -> Tensor:
    """A Gaussian blur with standard deviation ``sigma`` in pixels, the border reflected; none for 0."""
    if sigma <= 0:
        return x
    down, across = (_blur_matrix(side, sigma).to(x) for side in x.shape[2:])
    return down @ x @ across.T


def _blur_matrix(side: int, sigma: float) -> Tensor:
    """The blur along one axis as a matrix: a filter may be wider than the image, which is then reflected repeatedly."""
    weights = gaussian(sigma)
    reach = len(weights) // 2
    place = (torch.arange(side)[:, None] + torch.arange(-reach, reach + 1)) % (2 * side)
    folded = torch.where(place < side, place, 2 * side - 1 - place)
    return torch.zeros(side, side).scatter_add_(1, folded, weights.expand(side, -1).contiguous())


def sample_at(x: Tensor, rows: Tensor, columns: Tensor, border: str = "border") -> Tensor:
    """``x`` at real pixel coordinates ``(B, h, w)``, bilinearly; ``border`` or ``reflection`` outside."""
    height, width = x.shape[2:]
    grid = torch.stack([(2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1], dim=3)
    return F.grid_sample(x, grid.to(x), mode="bilinear", padding_mode=border, align_corners=False)


def pixel_grid(x: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every pixel, each ``(1, h, w)``."""
    rows = torch.arange(x.shape[2], dtype=x.dtype, device=x.device)
    columns = torch.arange(x.shape[3], dtype=x.dtype, device=x.device)
    return rows[None, :, None].expand(1, -1, len(columns)), columns[None, None, :].expand(1, len(rows), -1)


def zoom(x: Tensor, factor: float) -> Tensor:
    """The middle of the images, enlarged by ``factor`` to their size."""
    rows, columns = pixel_grid(x)
    middle = (x.shape[2] - 1) / 2, (x.shape[3] - 1) / 2
    count = x.shape[0]
    return sample_at(
        x,
        (middle[0] + (rows - middle[0]) / factor).expand(count, -1, -1),
        (middle[1] + (columns - middle[1]) / factor).expand(count, -1, -1),
    )


def line_blur(x: Tensor, angle: Tensor, radius: float, sigma: float) -> Tensor:
    """Motion blur: a mean along a line from each pixel, with one half of a Gaussian as weights.

    Args:
        x: ``(B, C, h, w)``.
        angle: of the motion, in degrees, ``(B,)``.
        radius: half the length of the line in pixels.
        sigma: standard deviation of the weights in pixels.
    """
    rows, columns = pixel_grid(x)
    turn = torch.deg2rad(angle.to(x))[:, None, None]
    total, weights = torch.zeros_like(x), 0.0
    for step in range(2 * math.ceil(radius) + 1):  # as ImageMagick, which made the published images
        weight = math.exp(-0.5 * (step / sigma) ** 2)
        total += weight * sample_at(x, rows + step * torch.sin(turn), columns + step * torch.cos(turn))
        weights += weight
    return total / weights


def coarsen(x: Tensor, share: float) -> Tensor:
    """``share`` times as many pixels in each direction, each a mean of those that lie in it, then enlarged again."""
    down, across = (_box_matrix(side, max(1, int(side * share))).to(x) for side in x.shape[2:])
    return F.interpolate(down @ x @ across.T, size=x.shape[2:], mode="nearest-exact")


def _box_matrix(side: int, fewer: int) -> Tensor:
    """Means over the pixels whose middle lies in each of ``fewer`` equal intervals."""
    interval = ((torch.arange(side) + 0.5) * fewer / side).long()
    members = F.one_hot(interval, fewer).float().T
    return members / members.sum(dim=1, keepdim=True)
