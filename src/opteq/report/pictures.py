"""Pictures inside the page: tensors as PNG or JPEG data addresses."""

from __future__ import annotations

import base64
import io

import torch
from torch import Tensor

_LARGEST = 160
"""Longer side in pixels of what is put into the page: with some ten pictures it stays well below 1.5 MB."""

_HEAT = torch.tensor([[16, 18, 43], [66, 39, 109], [150, 56, 107], [226, 110, 75], [251, 214, 132]]) / 255.0
"""From dark to bright by even steps of lightness, so that it reads the same for the colour-blind and in grey."""

HIT = (47, 111, 179)
MISS = (214, 94, 40)
"""Colours of right and wrong in a confusion matrix that is a picture; visible on light and on dark paper."""


def photograph(pixels: Tensor) -> str:
    """A uint8 picture ``(C, H, W)``: grey for one channel, the first three as red, green and blue otherwise."""
    channels = pixels[:3] if pixels.shape[0] >= 3 else pixels[:1]
    return _address(channels.movedim(0, -1))


def heat(values: Tensor, low: float, high: float) -> str:
    """A map ``(H, W)`` as a picture, dark at ``low`` and bright at ``high``."""
    share = (values.nan_to_num(low).float().cpu() - low) / ((high - low) or 1.0)
    place = share.clamp(0, 1) * (len(_HEAT) - 1)
    below = place.long().clamp(max=len(_HEAT) - 2)
    part = (place - below)[..., None]
    return _address(((1 - part) * _HEAT[below] + part * _HEAT[below + 1]).mul(255).round().to(torch.uint8))


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


def _address(pixels: Tensor) -> str:
    """``(H, W, channels)`` in uint8 as a data address: small ones without loss, large ones as JPEG."""
    from PIL import Image  # imported late: only a page with pictures needs it

    array = pixels.cpu().contiguous().numpy()
    image = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
    if max(image.size) > _LARGEST and image.mode != "RGBA":
        image.thumbnail((_LARGEST, _LARGEST), Image.Resampling.LANCZOS)
    kind, options = (
        ("PNG", {"optimize": True}) if max(image.size) <= 96 or image.mode == "RGBA" else ("JPEG", {"quality": 88})
    )
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
