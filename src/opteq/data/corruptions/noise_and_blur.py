"""Noise and blur."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.data.corruptions.draws import Setting
from opteq.data.corruptions.filters import blur, correlate, gaussian, line_blur, zoom


def gaussian_noise(x: Tensor, at: Setting) -> Tensor:
    """Independent normal noise, as of a dark scene."""
    return x + at.level[0] * at.draws.normal(*x.shape[1:])


def shot_noise(x: Tensor, at: Setting) -> Tensor:
    """Poisson noise of a count of ``level`` particles at white."""
    return at.draws.poisson(at.level[0] * x) / at.level[0]


def impulse_noise(x: Tensor, at: Setting) -> Tensor:
    """A share of all values becomes 0 or 1."""
    chance = at.draws.uniform(*x.shape[1:])
    dark, light = chance < at.level[0] / 2, chance > 1 - at.level[0] / 2
    return torch.where(light, 1.0, torch.where(dark, 0.0, x))


def speckle_noise(x: Tensor, at: Setting) -> Tensor:
    """Noise in proportion to the value."""
    return x + at.level[0] * x * at.draws.normal(*x.shape[1:])


def gaussian_blur(x: Tensor, at: Setting) -> Tensor:
    """A Gaussian blur."""
    return blur(x, at.scale * at.level[0])


def glass_blur(x: Tensor, at: Setting) -> Tensor:
    """Frosted glass: pixels trade places with near ones, between two blurs."""
    sigma, reach, times = at.scale * at.level[0], max(1, round(at.scale * at.level[1])), int(at.level[2])
    x = blur(x, sigma)
    count, channels, height, width = x.shape
    row, column = (torch.arange(n, device=x.device) for n in (height, width))
    for _ in range(times):
        moved = at.draws.whole(reach, 2, height, width)
        rows = (row[:, None] + moved[:, 0]).clamp(0, height - 1)
        columns = (column[None, :] + moved[:, 1]).clamp(0, width - 1)
        place = (rows * width + columns).flatten(1)[:, None].expand(-1, channels, -1)
        x = x.flatten(2).gather(2, place).view(count, channels, height, width)
    return blur(x, sigma)


def defocus_blur(x: Tensor, at: Setting) -> Tensor:
    """A lens out of focus: the mean over a disk with a softened edge."""
    radius, soft = at.scale * at.level[0], at.level[1]
    reach = int(radius) + 2
    place = torch.arange(-reach, reach + 1, dtype=torch.float32)
    disk = (place[:, None] ** 2 + place[None, :] ** 2 <= radius**2).float()
    edge = gaussian(soft, truncate=(2 if radius > 8 else 1) / soft)
    kernel = correlate(disk[None, None], edge[:, None] * edge[None, :])[0, 0]
    return correlate(x, kernel / kernel.sum())


def motion_blur(x: Tensor, at: Setting) -> Tensor:
    """A camera that moves, in a random direction."""
    angle = at.draws.uniform(low=-45, high=45)
    return line_blur(x, angle, at.scale * at.level[0], at.scale * at.level[1])


def zoom_blur(x: Tensor, at: Setting) -> Tensor:
    """A camera that moves towards the scene: a mean over enlargements."""
    most, step = at.level
    count = round((most - 1) / step) + 1
    return (x + sum(zoom(x, 1 + step * place) for place in range(count))) / (count + 1)
