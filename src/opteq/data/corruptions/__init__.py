"""The 19 corruptions of ImageNet-C and CIFAR-10-C (Hendrycks and Dietterich 2019) at five severities, on tensors.

They are written anew from what the paper says, with the published severities, for images of any size: noise, blurs,
weather and digital ones. Three differ on purpose: frost is drawn instead of photographed, glass blur displaces all
pixels at once, and water drops are lit more simply. Figures are close to those on the published files, not equal.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opteq.common.errors import UserError, unknown_name
from opteq.data.corruptions import digital, noise_and_blur, weather
from opteq.data.corruptions.draws import Draws, Setting
from opteq.data.corruptions.severities import MAIN, NAMES, parameters

Corruption = Callable[[Tensor, Setting], Tensor]

_FUNCTIONS: dict[str, Corruption] = {
    name: next(getattr(module, name) for module in (noise_and_blur, weather, digital) if hasattr(module, name))
    for name in NAMES
}
SEVERITIES = (1, 2, 3, 4, 5)


def names(channels: int = 3) -> tuple[str, ...]:
    """The corruptions that change images with so many channels: all but ``saturate`` for grey ones."""
    return NAMES if channels == 3 else tuple(name for name in NAMES if name != "saturate")


@torch.no_grad()
def corrupt(images: Tensor, name: str, severity: int, *, seed: int = 0, first: int = 0) -> Tensor:
    """Corrupted images in the shape, type and range of ``images``.

    Args:
        images: ``(B, C, h, w)``, grey or RGB: uint8, or floats from 0 to 1.
        name: one of :data:`NAMES`.
        severity: 1 to 5; 0 leaves the images as they are.
        seed: of the random numbers.
        first: the first image's place in its data set. Random numbers depend on seed, name and place alone: not on
            the batch, the device or the severity.

    >>> clean = torch.full((2, 3, 32, 32), 0.5)
    >>> noisy = corrupt(clean, "gaussian_noise", 3)
    >>> noisy.shape, torch.equal(noisy[1:], corrupt(clean[1:], "gaussian_noise", 3, first=1))
    (torch.Size([2, 3, 32, 32]), True)
    """
    if name not in _FUNCTIONS:
        raise unknown_name("corruption", name, NAMES)
    if isinstance(severity, bool) or not isinstance(severity, int) or not 0 <= severity <= max(SEVERITIES):
        raise UserError(f"a severity should be a whole number from 0 to {max(SEVERITIES)}; got {severity!r}")
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise UserError(f"corruptions need images (B, 1 or 3, height, width); got {tuple(images.shape)}")
    if name not in names(images.shape[1]):
        raise UserError(f"{name} changes colors, and these images are grey: leave it out")
    if severity == 0 or not len(images):
        return images.clone()
    whole = images.dtype == torch.uint8
    x = images.float() / 255 if whole else images.float()
    draws = Draws(seed, name, range(first, first + len(images)), images.device)
    level, scale = parameters(name, severity, min(images.shape[2:]))
    corrupted = _FUNCTIONS[name](x, Setting(level, draws, scale)).clamp(0, 1)
    return (255 * corrupted).round().to(torch.uint8) if whole else corrupted.to(images.dtype)


__all__ = ["MAIN", "NAMES", "SEVERITIES", "corrupt", "names"]
