"""Baselines: residual networks in their usual form for small and for large images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.common.errors import UserError
from opteq.models.blocks.parts import Parts, last_layer
from opteq.models.blocks.residual import ResidualBlock, normalised_conv
from opteq.models.checks import flag, number, option, whole, wholes
from opteq.models.options import Options


@dataclass(frozen=True, kw_only=True)
class ResNetOptions(Options):
    """Options of a residual network."""

    blocks: tuple[int, ...] = option(
        (2, 2, 2, 2), wholes(most=256, longest=8), "blocks a stage; from the second on, a stage halves images"
    )
    width: int = option(64, whole(), "channels of the first stage; each stage doubles them")
    bottleneck: bool = option(False, flag(), "blocks of 1x1, 3x3, 1x1 with four times the channels at the end")
    widen: int = option(1, whole(most=64), "factor of the channels inside bottleneck blocks; 2 is the wide network")
    large: bool = option(False, flag(), "begin with a 7x7 convolution and a max-pooling, which both halve images")
    dropout: float = option(0.0, number(0, 0.99, open_below=False), "share of features dropped before the last layer")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.widen > 1 and not self.bottleneck:
            raise UserError(f"widen = {self.widen} has no effect on basic blocks; set bottleneck = true")


class Bottleneck(nn.Module):
    """1x1 to ``widen width``, 3x3, 1x1 to ``4 width``, with a skip connection."""

    def __init__(self, inputs: int, width: int, stride: int, widen: int = 1) -> None:
        super().__init__()
        inner, outputs = widen * width, 4 * width
        self.reduce = normalised_conv(inputs, inner, 1)
        self.conv = normalised_conv(inner, inner, stride=stride)
        self.expand = normalised_conv(inner, outputs, 1, activate=False)
        same = stride == 1 and inputs == outputs
        self.past = nn.Identity() if same else normalised_conv(inputs, outputs, 1, stride, activate=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, inputs, h, w) -> (B, 4 width, h / stride, w / stride)``."""
        return torch.relu(self.past(x) + self.expand(self.conv(self.reduce(x))))


class PooledHead(nn.Module):
    """The mean over pixels and a linear layer."""

    def __init__(self, channels: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = last_layer(channels, num_classes)

    def embed(self, features: Tensor) -> Tensor:
        """The input of the linear layer, ``(B, channels)``."""
        return features.mean(dim=(2, 3))

    def forward(self, features: Tensor) -> Tensor:
        """Scores, ``(B, num_classes)``."""
        scores: Tensor = self.linear(self.dropout(self.embed(features)))
        return scores


def large_stem(in_channels: int, width: int) -> nn.Sequential:
    """A 7x7 convolution and a max-pooling, which both halve: how networks for large images begin."""
    return nn.Sequential(normalised_conv(in_channels, width, 7, 2), nn.MaxPool2d(3, 2, padding=1))


def build_resnet(in_channels: int, num_classes: int, options: ResNetOptions) -> Parts:
    """A residual network. For images of 32 x 32 it begins with a 3x3 convolution, and nothing halves before stage 2."""
    inputs, stages = options.width, []
    for index, count in enumerate(options.blocks):
        width = options.width * 2**index
        for position in range(count):
            stride = 2 if index > 0 and position == 0 else 1
            stages.append(
                Bottleneck(inputs, width, stride, options.widen)
                if options.bottleneck
                else ResidualBlock(inputs, width, stride)
            )
            inputs = 4 * width if options.bottleneck else width
    stem = large_stem(in_channels, options.width) if options.large else normalised_conv(in_channels, options.width)
    return Parts(stem, nn.Sequential(*stages), PooledHead(inputs, num_classes, options.dropout))
