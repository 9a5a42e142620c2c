"""Crop, flip, erase and mix, for a whole batch at once."""

from __future__ import annotations

import torch
from torch import Tensor


def crop_and_flip(images: Tensor, rows: Tensor | None, move: Tensor, padding: int, reflect: bool) -> Tensor:
    """The images ``rows`` of ``images`` (N, C, h, w), each padded, cropped and flipped.

    ``move`` is int64 ``(B, 3)``: top and left of the crop in the padded image, in 0..2 * padding, and 1 for flipped.
    ``rows`` None takes all of ``images``. No padded copy is made: the source pixel of every output pixel is computed,
    and one gather reads them.
    """
    channels, height, width = images.shape[1:]
    top, left, mirrored = move[:, 0, None], move[:, 1, None], move[:, 2, None].bool()
    across = torch.arange(width, device=move.device)
    down = top - padding + torch.arange(height, device=move.device)
    across = left - padding + torch.where(mirrored, width - 1 - across, across)
    inside: Tensor | None = None
    if padding and reflect:
        down, across = _reflect(down, height), _reflect(across, width)
    elif padding:
        inside = _within(down, 0, height)[:, None, :, None] & _within(across, 0, width)[:, None, None, :]
        down, across = down.clamp(0, height - 1), across.clamp(0, width - 1)
    came_from = (down[:, :, None] * width + across[:, None, :]).flatten(1)
    # Select samples first: on a CPU one gather over samples and pixels takes five times as long.
    chosen = images if rows is None else images.index_select(0, rows)
    moved = chosen.flatten(2).gather(2, came_from[:, None].expand(-1, channels, -1)).view_as(chosen)
    return moved if inside is None else moved.mul_(inside)


def _reflect(place: Tensor, side: int) -> Tensor:
    """Coordinates outside of 0..side - 1 reflected at the edge pixel, which is not repeated."""
    return side - 1 - (side - 1 - place.abs()).abs()


def _within(place: Tensor, start: Tensor | int, stop: Tensor | int) -> Tensor:
    return (place >= start) & (place < stop)


def inside_boxes(boxes: Tensor, height: int, width: int) -> Tensor:
    """True inside each box ``(top, bottom, left, right)``: bool ``(B, 1, h, w)``."""
    top, bottom, left, right = (boxes[:, side, None] for side in range(4))
    down = _within(torch.arange(height, device=boxes.device), top, bottom)
    across = _within(torch.arange(width, device=boxes.device), left, right)
    return down[:, None, :, None] & across[:, None, None, :]


def mix(images: Tensor, partners: Tensor, boxes: Tensor, blend: Tensor) -> Tensor:
    """``blend * image + (1 - blend) * partner``; inside the box the partner alone."""
    weight = blend[:, None, None, None].masked_fill(inside_boxes(boxes, *images.shape[2:]), 0.0)
    return torch.lerp(partners, images, weight)


def soft_labels(labels: Tensor, partners: Tensor, keep: Tensor, classes: int) -> Tensor:
    """``keep`` for the own class and ``1 - keep`` for the partner's: float ``(B, classes)``."""
    names = torch.arange(classes, device=labels.device)
    own, other = (names == kind[:, None] for kind in (labels, partners))
    return torch.lerp(other.float(), own.float(), keep[:, None])
