"""Images in the report: tensors as PNG or JPEG data URLs."""

from __future__ import annotations

import base64
import colorsys
import io

import torch
from torch import Tensor

from opteq.common.errors import needs_extra
from opteq.data.dataset import IGNORE_INDEX

_LARGEST = 160
"""Longer side in pixels of embedded images: with ten of them a report stays below 1.5 MB."""

WIDE = 400
"""The same for label maps, where details matter."""

_HEAT = torch.tensor([[16, 18, 43], [66, 39, 109], [150, 56, 107], [226, 110, 75], [251, 214, 132]]) / 255.0
"""A color map with equal steps of lightness, readable in grey and for color-blind readers."""

HIT = (47, 111, 179)
MISS = (214, 94, 40)
"""Colors of right and wrong in a confusion matrix drawn as an image; visible on light and dark backgrounds."""


def image_data_url(pixels: Tensor, largest: int = _LARGEST) -> str:
    """A uint8 image ``(C, h, w)`` as a data URL: grey, or the first three channels as RGB."""
    channels = pixels[:3] if pixels.shape[0] >= 3 else pixels[:1]
    return _data_url(channels.movedim(0, -1), largest)


def heatmap(values: Tensor, low: float, high: float) -> str:
    """A heat map of ``(h, w)`` as a data URL, dark at ``low`` and bright at ``high``."""
    share = (values.nan_to_num(low).float().cpu() - low) / ((high - low) or 1.0)
    place = share.clamp(0, 1) * (len(_HEAT) - 1)
    below = place.long().clamp(max=len(_HEAT) - 2)
    part = (place - below)[..., None]
    return _data_url(((1 - part) * _HEAT[below] + part * _HEAT[below + 1]).mul(255).round().to(torch.uint8))


def signed_map(values: Tensor, largest: int = 96) -> str:
    """A map ``(h, w)`` of signed shares as a data URL: one color above zero, one below, opaque at the strongest."""
    values = values.nan_to_num(0.0).float().cpu()
    scale = max(values.shape) / largest
    if scale > 1:  # areas keep the balance of signs, and a small image a small page
        height, width = (max(1, round(side / scale)) for side in values.shape)
        values = torch.nn.functional.adaptive_avg_pool2d(values[None], (height, width))[0]
    strength = (values.abs() / values.abs().max().clamp(min=1e-30)).sqrt()  # weak shares stay visible
    colour = torch.where((values >= 0)[..., None], torch.tensor(HIT), torch.tensor(MISS))
    return _data_url(torch.cat([colour, (255 * strength).round()[..., None]], dim=-1).to(torch.uint8))


def class_color(place: int) -> tuple[int, int, int]:
    """The color of class ``place``: hues at multiples of the golden angle, three lightnesses."""
    hue, lightness = place * 0.618034 % 1, (0.55, 0.38, 0.72)[place % 3]
    red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(hue, lightness, 0.6))
    return red, green, blue


def label_map(labels: Tensor, largest: int = _LARGEST) -> str:
    """A label map ``(h, w)`` as a data URL, with one color per class; dark where there is no class."""
    # Subsampled and not interpolated: a mixture of two colors could be that of a third class.
    every = -(-max(labels.shape) // largest)
    labels = labels[::every, ::every]
    table = torch.tensor([class_color(place) for place in range(IGNORE_INDEX)] + [(24, 24, 24)], dtype=torch.uint8)
    return _data_url(table[labels.cpu().long()], lossless=True)


def matrix_image(confusion: Tensor) -> str:
    """A confusion matrix as an image with one pixel per cell, in two colors for right and wrong."""
    shares = confusion / confusion.sum(dim=1, keepdim=True).clamp(min=1)
    diagonal = torch.eye(len(shares), dtype=torch.bool)
    wrong = shares.masked_fill(diagonal, 0)
    # The square root makes rare mistakes visible beside frequent ones.
    alpha = torch.where(diagonal, shares, (wrong / wrong.max().clamp(min=1e-9)).sqrt())
    colour = torch.where(diagonal[..., None], torch.tensor(HIT), torch.tensor(MISS))
    cells = torch.cat([colour, (255 * alpha).round()[..., None]], dim=-1)
    return _data_url(cells.to(torch.uint8))


def _data_url(pixels: Tensor, largest: int = _LARGEST, lossless: bool = False) -> str:
    """uint8 ``(h, w, channels)`` as a data URL: PNG for small images, a smaller JPEG for large ones."""
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
