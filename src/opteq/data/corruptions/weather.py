"""Weather: snow, frost, fog, bright light, and drops on the lens."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.data.corruptions.draws import Setting, plasma
from opteq.data.corruptions.filters import blur, line_blur, zoom

_ICE = (0.80, 0.90, 1.00)
_WATER = (0.686, 0.933, 0.933)
_MUD = (0.247, 0.165, 0.078)


def snow(x: Tensor, at: Setting) -> Tensor:
    """A whiter scene behind flakes that fall, streaked by their motion."""
    mean, spread, size, least, radius, sigma, kept = at.level
    flakes = (mean + spread * at.draws.normal(1, *x.shape[2:])).clamp(0, 1)
    flakes = zoom(flakes, max(1.0, at.scale * size))
    flakes = torch.where(flakes < least, 0.0, flakes)
    flakes = line_blur(flakes, at.draws.uniform(low=-135, high=-45), at.scale * radius, at.scale * sigma)
    pale = torch.maximum(x, 1.5 * _grey(x) + 0.5)
    return kept * x + (1 - kept) * pale + flakes + flakes.flip(2, 3)


def frost(x: Tensor, at: Setting) -> Tensor:
    """Ice on the lens, in front of a dimmed scene.

    The benchmark has photographs of frost here. This has crystals that are drawn: ridges of clouds of several scales.
    """
    height, width = x.shape[2:]
    ridges = [1 - (2 * plasma(at.draws, height, width, 1.3) - 1).abs() for _ in range(2)]
    ice = 0.7 * ridges[0] * ridges[1] + 0.3 * plasma(at.draws, height, width, 2.0)
    return at.level[0] * x + at.level[1] * ice[:, None] * _coloured(x, _ICE)


def fog(x: Tensor, at: Setting) -> Tensor:
    """Clouds before the scene, which keeps its brightest value."""
    thick, decay = at.level
    most = x.flatten(1).amax(dim=1)[:, None, None, None]
    mist = thick * plasma(at.draws, x.shape[2], x.shape[3], decay)[:, None]
    return (x + mist) * most / (most + thick)


def brightness(x: Tensor, at: Setting) -> Tensor:
    """More light: the largest channel grows by a constant, hue and saturation stay."""
    value = x.amax(dim=1, keepdim=True)
    lit = (value + at.level[0]).clamp(0, 1)
    return torch.where(value > 0, x / value.clamp_min(1e-6) * lit, lit)


def spatter(x: Tensor, at: Setting) -> Tensor:
    """Drops on the lens: of water in levels 1 to 3, lit at one side, and of mud in the others.

    The light on the water is simpler than the benchmark's, which comes from the edges of the drops.
    """
    mean, spread, sigma, least, strength, mud = at.level
    liquid = blur(mean + spread * at.draws.normal(1, *x.shape[2:]), at.scale * sigma)
    if mud:
        cover = blur((liquid > least).to(x), at.scale * strength)
        cover = torch.where(cover < 0.8, 0.0, cover)
        return x * (1 - cover) + _coloured(x, _MUD) * cover
    depth = torch.where(liquid < least, 0.0, liquid)
    light = (depth - depth.roll((1, 1), (2, 3))).clamp_min(0)  # the edge that faces the upper left
    cover = blur(depth * 0.5 + light, 0.5 * at.scale)
    return x + _coloured(x, _WATER) * cover * strength


def _grey(x: Tensor) -> Tensor:
    """Luma; the image itself where there is one channel."""
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True)
    return (x * x.new_tensor([0.299, 0.587, 0.114])[None, :, None, None]).sum(dim=1, keepdim=True)


def _coloured(x: Tensor, color: tuple[float, float, float]) -> Tensor:
    """A color as ``(1, C, 1, 1)``; its mean where images have no three channels."""
    made = x.new_tensor(color)[None, :, None, None]
    return made if x.shape[1] == 3 else made.mean(dim=1, keepdim=True)
