"""Inception-V2 (Ioffe and Szegedy 2015): paths of several depths side by side, with batch normalisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.models.blocks.parts import Parts
from opteq.models.blocks.residual import normalised_conv
from opteq.models.checks import number, option, whole
from opteq.models.comparators.residual_networks import PooledHead, large_stem
from opteq.models.options import Options

# Channels of each block in units of 32: of the 1x1 path (0 for a block that halves), inside and after the 3x3 path,
# inside and after the path of two 3x3 convolutions, and after the pooling (0: as they come).
_BLOCKS: tuple[tuple[int, int, int, int, int, int], ...] = (
    (2, 2, 2, 2, 3, 1),
    (2, 2, 3, 2, 3, 2),
    (0, 4, 5, 2, 3, 0),
    (7, 2, 3, 3, 4, 4),
    (6, 3, 4, 3, 4, 4),
    (5, 4, 5, 4, 5, 4),
    (3, 4, 6, 5, 6, 4),
    (0, 4, 6, 6, 8, 0),
    (11, 6, 10, 5, 7, 4),
    (11, 6, 10, 6, 7, 4),
)


@dataclass(frozen=True, kw_only=True)
class InceptionOptions(Options):
    """Options of Inception-V2."""

    unit: int = option(32, whole(most=256), "channels of the narrowest path; all others are multiples of it")
    dropout: float = option(0.0, number(0, 0.99, open_below=False), "share of features dropped before the last layer")


class Inception(nn.Module):
    """Four paths side by side, whose channels are stacked: 1x1, 3x3, two 3x3, pooling. Without 1x1 path it halves."""

    def __init__(
        self, inputs: int, one: int, three: tuple[int, int], double: tuple[int, int], pooled: int, largest: bool
    ) -> None:
        super().__init__()
        stride = 1 if one else 2
        paths: list[nn.Module] = [normalised_conv(inputs, one, 1)] if one else []
        paths.append(nn.Sequential(normalised_conv(inputs, three[0], 1), normalised_conv(*three, 3, stride)))
        before, after = double
        paths.append(
            nn.Sequential(
                normalised_conv(inputs, before, 1),
                normalised_conv(before, after),
                normalised_conv(after, after, 3, stride),
            )
        )
        pool = nn.MaxPool2d(3, stride, padding=1) if largest else nn.AvgPool2d(3, stride, padding=1)
        paths.append(nn.Sequential(pool, normalised_conv(inputs, pooled, 1)) if pooled else pool)
        self.paths = nn.ModuleList(paths)
        self.outputs = one + three[1] + after + (pooled or inputs)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, inputs, h, w)`` to the channels of all paths."""
        return torch.cat([path(x) for path in self.paths], dim=1)


def build(in_channels: int, num_classes: int, options: InceptionOptions) -> Parts:
    """Three convolutions and two poolings, ten blocks, the mean over pixels and a linear layer."""
    unit = options.unit
    stem = nn.Sequential(
        *large_stem(in_channels, 2 * unit),
        normalised_conv(2 * unit, 2 * unit, 1),
        normalised_conv(2 * unit, 6 * unit),
        nn.MaxPool2d(3, 2, padding=1),
    )
    blocks, inputs = [], 6 * unit
    for index, widths in enumerate(_BLOCKS):
        one, three_in, three, double_in, double, pooled = (unit * width for width in widths)
        largest = one == 0 or index == len(_BLOCKS) - 1  # the last block and those that halve; all others average
        blocks.append(Inception(inputs, one, (three_in, three), (double_in, double), pooled, largest))
        inputs = blocks[-1].outputs
    return Parts(stem, nn.Sequential(*blocks), PooledHead(inputs, num_classes, options.dropout))
