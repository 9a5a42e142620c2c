"""A stem that gives every branch a view of its own size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from opteq.models.residual import ResidualBlock, normalised_conv
from opteq.states import State


class Pyramid(nn.Module):
    """Residual blocks on smaller and smaller pictures; each branch of an equilibrium sees the level of its scale.

    A branch that sees the finest level averaged over 8 x 8 pixels is blind for what averages out. Here level i is made
    from the one before by learned convolutions, so coarse branches see deeper features instead of blurred ones.

    Args:
        in_channels: of pictures.
        widths: channels of the levels; each but the first is half as large as the one before.
        depth: residual blocks on each level; with 0, levels are single convolutions.
        kernel: size of the first convolution.
        levels: which level each branch sees; None gives the last one alone, as a tensor.
        attention: weigh the channels of every block by what the whole picture shows.

    >>> import torch
    >>> stem = Pyramid(3, (8, 16), depth=1, levels=(0, 1, 1))
    >>> [tuple(level.shape) for level in stem(torch.rand(2, 3, 32, 32))]
    [(2, 8, 32, 32), (2, 16, 16, 16), (2, 16, 16, 16)]
    """

    def __init__(
        self,
        in_channels: int,
        widths: Sequence[int],
        depth: int,
        kernel: int = 3,
        levels: Sequence[int] | None = None,
        attention: bool = False,
    ) -> None:
        super().__init__()
        first = [normalised_conv(in_channels, widths[0], kernel)]
        stages = [
            nn.Sequential(*first, *(ResidualBlock(widths[0], widths[0], attention=attention) for _ in range(depth)))
        ]
        for before, width in pairwise(widths):
            if depth:
                more = [ResidualBlock(width, width, attention=attention) for _ in range(depth - 1)]
                stages.append(nn.Sequential(ResidualBlock(before, width, 2, attention), *more))
            else:
                stages.append(normalised_conv(before, width, stride=2))
        self.stages = nn.ModuleList(stages)
        self.levels = None if levels is None else tuple(levels)

    def forward(self, x: Tensor) -> State:
        """``(B, in_channels, h, w)`` to ``(B, widths[i], h / 2^i, w / 2^i)`` for the level i of every branch."""
        made = []
        for stage in self.stages:
            x = stage(x)
            made.append(x)
        return x if self.levels is None else tuple(made[level] for level in self.levels)
