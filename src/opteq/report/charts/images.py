"""Pictures inside the page: tensors as PNG or JPEG data addresses."""

from __future__ import annotations

import base64
import colorsys
import io

import torch
from torch import Tensor

from opteq.common.errors import needs_extra
from opteq.data.dataset import IGNORED

_LARGEST = 160
"""Longer side in pixels of what is put into the page: with some ten pictures it stays well below 1.5 MB."""

WIDE = 400
"""The same for pictures of which few are shown, and details matter."""

_HEAT = torch.tensor([[16, 18, 43], [66, 39, 109], [150, 56, 107], [226, 110, 75], [251, 214, 132]]) / 255.0
"""From dark to bright by even steps of lightness, so that it reads the same for the colour-blind and in grey."""

HIT = (47, 111, 179)
MISS = (214, 94, 40)
"""Colours of right and wrong in a confusion matrix that is a picture; visible on light and on dark paper."""


def photograph(pixels: Tensor, largest: int = _LARGEST) -> str:
    """A uint8 picture ``(C, H, W)``: grey for one channel, the first three as red, green and blue otherwise."""
    channels = pixels[:3] if pixels.shape[0] >= 3 else pixels[:1]
    return _address(channels.movedim(0, -1), largest)


def heat(values: Tensor, low: float, high: float) -> str:
    """A map ``(H, W)`` as a picture, dark at ``low`` and bright at ``high``."""
    share = (values.nan_to_num(low).float().cpu() - low) / ((high - low) or 1.0)
    place = share.clamp(0, 1) * (len(_HEAT) - 1)
    below = place.long().clamp(max=len(_HEAT) - 2)
    part = (place - below)[..., None]
    return _address(((1 - part) * _HEAT[below] + part * _HEAT[below + 1]).mul(255).round().to(torch.uint8))


def class_colour(place: int) -> tuple[int, int, int]:
    """A colour for class number ``place``: hues by the golden angle, so that neighbours differ; three lightnesses."""
    hue, lightness = place * 0.618034 % 1, (0.55, 0.38, 0.72)[place % 3]
    red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(hue, lightness, 0.6))
    return red, green, blue


def labels_picture(labels: Tensor, largest: int = _LARGEST) -> str:
    """A map of classes ``(H, W)``, a colour a class; what has none is dark."""
    # Pixels are left out, not mixed: between the colours of two classes lies that of a third.
    every = -(-max(labels.shape) // largest)
    labels = labels[::every, ::every]
    table = torch.tensor([class_colour(place) for place in range(IGNORED)] + [(24, 24, 24)], dtype=torch.uint8)
    return _address(table[labels.cpu().long()], lossless=True)


def matrix_picture(confusion: Tensor) -> str:
    """A confusion matrix of counts, a pixel a cell: right ones in one colour, wrong ones in another, as shares."""
    shares = confusion / confusion.sum(dim=1, keepdim=True).clamp(min=1)
    diagonal = torch.eye(len(shares), dtype=torch.bool)
    wrong = shares.masked_fill(diagonal, 0)
    # A square root lets single mistakes be seen beside frequent ones.
    alpha = torch.where(diagonal, shares, (wrong / wrong.max().clamp(min=1e-9)).sqrt())
    colour = torch.where(diagonal[..., None], torch.tensor(HIT), torch.tensor(MISS))
    cells = torch.cat([colour, (255 * alpha).round()[..., None]], dim=-1)
    return _address(cells.to(torch.uint8))


def _address(pixels: Tensor, largest: int = _LARGEST, lossless: bool = False) -> str:
    """``(H, W, channels)`` in uint8 as a data address: small ones without loss, large ones smaller and as JPEG."""
    with needs_extra("report"):
        from PIL import Image

    array = pixels.cpu().contiguous().numpy()
    image = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
    lossless = lossless or image.mode == "RGBA"
    if max(image.size) > largest and not lossless:
        image.thumbnail((largest, largest), Image.Resampling.LANCZOS)
    kind, options = ("PNG", {"optimize": True}) if max(image.size) <= 96 or lossless else ("JPEG", {"quality": 88})
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
