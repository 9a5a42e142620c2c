"""How close an image is to another: PSNR and SSIM."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def psnr(images: Tensor, clean: Tensor) -> Tensor:
    """The peak signal-to-noise ratio in dB of images ``(B, 1, h, w)`` in [0, 1], one number per image."""
    errors = (images - clean).double().square().mean(dim=(1, 2, 3))
    value: Tensor = -10 * errors.log10()
    return value


def ssim(images: Tensor, clean: Tensor, sigma: float = 1.5, size: int = 11) -> Tensor:
    """The mean structural similarity of images ``(B, 1, h, w)`` in [0, 1], one number per image.

    Wang et al. 2004: means, variances and covariances under a Gaussian window, where it lies inside the image.
    """
    if min(images.shape[2:]) < size:
        raise ValueError(f"SSIM needs images of at least {size} x {size} pixels; got {tuple(images.shape[2:])}")
    x, y = images.double(), clean.double()
    place = torch.arange(size, dtype=x.dtype, device=x.device) - size // 2
    line = torch.softmax(-place.square() / (2 * sigma**2), dim=0)
    window = (line[:, None] * line)[None, None]

    def mean(values: Tensor) -> Tensor:
        return F.conv2d(values, window)

    mx, my = mean(x), mean(y)
    vx, vy, cov = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    one, two = 0.01**2, 0.03**2
    index = (2 * mx * my + one) * (2 * cov + two) / ((mx * mx + my * my + one) * (vx + vy + two))
    value: Tensor = index.mean(dim=(1, 2, 3))
    return value
