"""Random windows of resized images: bilinear interpolation for pixels, the nearest pixel for labels."""

from __future__ import annotations

import torch
from torch import Tensor


class Windows:
    """The source coordinates of every pixel of a batch of windows.

    The centre of row ``i`` of a window lies at ``top + i + 1/2`` in the resized image and at ``(top + i + 1/2) / tall``
    in the original. The resized image is not computed, so the cost depends on the size of the windows, not of the
    images.

    Args:
        drawn: float ``(B, 5)``: top, left, scale of the height, scale of the width, flipped; see
            :class:`~opteq.data.Augmentation`.
        height, width: of the windows.
        images: ``(N, C, h, w)``, for h and w.
    """

    def __init__(self, drawn: Tensor, height: int, width: int, images: Tensor) -> None:
        self.sides = images.shape[2:]
        top, left, tall, wide, mirrored = (drawn[:, column, None] for column in range(5))
        across = torch.arange(width, device=drawn.device, dtype=drawn.dtype)
        across = torch.where(mirrored > 0, width - 1 - across, across)
        down = torch.arange(height, device=drawn.device, dtype=drawn.dtype)
        self.down, self.across = (top + down + 0.5) / tall, (left + across + 0.5) / wide
        rows, columns = (
            (place >= 0) & (place < side) for place, side in zip((self.down, self.across), self.sides, strict=True)
        )
        self.inside = rows[:, :, None] & columns[:, None, :]

    def of_images(self, images: Tensor, rows: Tensor | None, beside: Tensor) -> Tensor:
        """The windows of the images ``rows`` of ``images`` (all for None), float ``(B, C, height, width)``.

        Bilinear interpolation; pixels outside the image have the color ``beside``.
        """
        count = len(self.down)
        which = (torch.arange(count, device=images.device) if rows is None else rows)[:, None, None]
        (above, below, lower), (before, after, later) = (
            _neighbours(place, side) for place, side in zip((self.down, self.across), self.sides, strict=True)
        )

        def taken(down: Tensor, across: Tensor) -> Tensor:
            return images[which, :, down[:, :, None], across[:, None, :]].float()  # (B, height, width, C)

        lower, later = lower[:, :, None, None], later[:, None, :, None]
        upper_row = torch.lerp(taken(above, before), taken(above, after), later)
        lower_row = torch.lerp(taken(below, before), taken(below, after), later)
        mixed = torch.lerp(upper_row, lower_row, lower).permute(0, 3, 1, 2)
        return torch.where(self.inside[:, None], mixed, beside)

    def of_labels(self, labels: Tensor, beside: int) -> Tensor:
        """The windows of label maps ``(B, h, w)``: the nearest pixel's label, ``beside`` outside the image."""
        which = torch.arange(len(labels), device=labels.device)[:, None, None]
        down, across = (
            place.floor().long().clamp(0, side - 1)
            for place, side in zip((self.down, self.across), self.sides, strict=True)
        )
        return labels[which, down[:, :, None], across[:, None, :]].masked_fill(~self.inside, beside)


def _neighbours(place: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pixels whose centres lie before and after ``place``, and the weight of the second."""
    centre = (place - 0.5).clamp(0, side - 1)
    first = centre.floor()
    index = first.long()
    return index, (index + 1).clamp(max=side - 1), centre - first
