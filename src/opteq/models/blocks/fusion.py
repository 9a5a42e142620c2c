"""Fusion of the features of several branches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.operators.resample import repeat_pixels


class AverageBranches(nn.Module):
    """The mean of images of several sizes, after each was pooled or repeated to one size.

    This is how the GEQ paper fuses its branches. Larger images are averaged over squares, and pixels of smaller ones
    are repeated, so a constant image does not change. All have the same number of channels.

    Args:
        size: height and width of the result; None takes those of the largest image.

    >>> features = (torch.zeros(2, 3, 8, 8), torch.ones(2, 3, 4, 4))
    >>> AverageBranches()(features).shape, AverageBranches(2)(features)[0, 0]
    (torch.Size([2, 3, 8, 8]), tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]]))
    """

    def __init__(self, size: int | tuple[int, int] | None = None) -> None:
        super().__init__()
        if size is not None:
            pair = (size, size) if isinstance(size, int) and not isinstance(size, bool) else size
            if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(n, int) and n > 0 for n in pair):
                raise ValueError(f"size should be a positive whole number, a pair of them or None; got {size!r}")
            size = pair
        self.size = size

    def forward(self, features: tuple[Tensor, ...]) -> Tensor:
        """The mean, ``(B, C, height, width)``."""
        shapes = [tuple(z.shape) for z in features]
        # Compared one by one: an exported batch size is a symbol, which no set can hold.
        if not features or any(z.ndim != 4 for z in features) or any(s[:2] != shapes[0][:2] for s in shapes[1:]):
            raise ValueError(
                f"AverageBranches needs a tuple of images with the same batch and number of channels; got {shapes}"
            )
        size = self.size or (max(shape[2] for shape in shapes), max(shape[3] for shape in shapes))
        return torch.stack([_resized(z, size) for z in features]).mean(dim=0)

    def extra_repr(self) -> str:
        """The size."""
        return f"size={self.size}"


def _resized(z: Tensor, size: tuple[int, int]) -> Tensor:
    height, width = z.shape[2:]
    if (height, width) == size:
        return z
    if height % size[0] == 0 and width % size[1] == 0:
        return F.adaptive_avg_pool2d(z, size)
    if size[0] % height == 0 and size[1] % width == 0:
        return repeat_pixels(z, size[0] // height, size[1] // width)
    raise ValueError(f"an image of {height} x {width} does not become {size[0]} x {size[1]} by pooling or repeating")
