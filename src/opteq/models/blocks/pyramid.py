"""A stem with one output per scale."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from opteq.models.blocks.residual import BLOCKS, normalised_conv
from opteq.states import State


class Pyramid(nn.Module):
    """Residual blocks on smaller and smaller images; each branch of an equilibrium gets the level of its scale.

    Level i is computed from the one before by learned convolutions, so coarse branches see deeper features and not
    averages of the finest level.

    Args:
        in_channels: of images.
        widths: channels of the levels; each but the first is half as large as the one before.
        depth: residual blocks per level, one value for all or one per level; with 0, a level is one convolution.
        kernel: size of the first convolution.
        levels: the level of each branch; None returns the last level as a tensor.
        attention: squeeze-and-excitation in every block.
        block: kind of blocks, a name in :data:`~opteq.models.blocks.residual.BLOCKS` for all or one per level.

    >>> import torch
    >>> stem = Pyramid(3, (8, 16), depth=1, levels=(0, 1, 1))
    >>> [tuple(level.shape) for level in stem(torch.rand(2, 3, 32, 32))]
    [(2, 8, 32, 32), (2, 16, 16, 16), (2, 16, 16, 16)]
    """

    def __init__(
        self,
        in_channels: int,
        widths: Sequence[int],
        depth: int | Sequence[int],
        kernel: int = 3,
        levels: Sequence[int] | None = None,
        attention: bool = False,
        block: str | Sequence[str] = "basic",
    ) -> None:
        super().__init__()
        depths = [depth] * len(widths) if isinstance(depth, int) else list(depth)
        kinds = [BLOCKS[name] for name in ([block] * len(widths) if isinstance(block, str) else block)]
        stages = []
        for level, (width, blocks, kind) in enumerate(zip(widths, depths, kinds, strict=True)):
            same = [kind(width, width, attention=attention) for _ in range(blocks if level == 0 else blocks - 1)]
            if level == 0:
                first: nn.Module = normalised_conv(in_channels, width, kernel)
            elif blocks:
                first = kind(widths[level - 1], width, 2, attention)
            else:
                first = normalised_conv(widths[level - 1], width, stride=2)
            stages.append(nn.Sequential(first, *same))
        self.stages = nn.ModuleList(stages)
        self.levels = None if levels is None else tuple(levels)

    def forward(self, x: Tensor) -> State:
        """``(B, in_channels, h, w)`` to ``(B, widths[i], h / 2^i, w / 2^i)`` for the level i of every branch."""
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        return x if self.levels is None else tuple(levels[level] for level in self.levels)
