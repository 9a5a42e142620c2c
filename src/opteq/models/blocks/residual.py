"""Residual blocks of stems and baselines."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """``relu(x + BN(conv(relu(BN(conv(x))))))``, with a 1x1 convolution in the skip connection where shapes change.

    With ``attention``, :class:`ChannelWeights` scale the output of the convolutions.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1, attention: bool = False) -> None:
        super().__init__()
        self.first = normalised_conv(inputs, outputs, stride=stride)
        self.second = normalised_conv(outputs, outputs, activate=False)
        self.weights = ChannelWeights(outputs) if attention else nn.Identity()
        same = stride == 1 and inputs == outputs
        self.past = nn.Identity() if same else normalised_conv(inputs, outputs, 1, stride, activate=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, inputs, h, w) -> (B, outputs, h / stride, w / stride)``."""
        return torch.relu(self.past(x) + self.weights(self.second(self.first(x))))


class InvertedBlock(nn.Module):
    """``x + BN(mix(relu(BN(mix(BN(spread(x)))))))``: a depthwise convolution, then an inverted bottleneck.

    ``spread`` is a depthwise 5x5 convolution, the first ``mix`` a 1x1 convolution to four times as many channels, the
    second one back. That is ``8 C^2`` parameters, where a :class:`ResidualBlock` has ``18 C^2``. The output is not
    rectified. Where shapes change, the skip connection averages pixels and mixes channels.

    >>> InvertedBlock(8, 12, stride=2)(torch.rand(2, 8, 6, 6)).shape
    torch.Size([2, 12, 3, 3])
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1, attention: bool = False) -> None:
        super().__init__()
        self.spread = normalised_conv(inputs, inputs, 5, stride, activate=False, groups=inputs)
        self.widen = normalised_conv(inputs, 4 * outputs, 1)
        self.narrow = normalised_conv(4 * outputs, outputs, 1, activate=False)
        self.weights = ChannelWeights(outputs) if attention else nn.Identity()
        self.past: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            # Rounded up, as a strided convolution does for an odd size.
            self.past = nn.Sequential(
                nn.AvgPool2d(stride, ceil_mode=True), normalised_conv(inputs, outputs, 1, activate=False)
            )

    def forward(self, x: Tensor) -> Tensor:
        """``(B, inputs, h, w) -> (B, outputs, h / stride, w / stride)``."""
        output: Tensor = self.past(x) + self.weights(self.narrow(self.widen(self.spread(x))))
        return output


BLOCKS: dict[str, type[ResidualBlock] | type[InvertedBlock]] = {"basic": ResidualBlock, "inverted": InvertedBlock}


class ChannelWeights(nn.Module):
    """Squeeze-and-excitation: every channel times a weight in [0, 1] from the means of all channels.

    It has ``C^2 / 4`` parameters.

    >>> ChannelWeights(16)(torch.rand(2, 16, 4, 4)).shape
    torch.Size([2, 16, 4, 4])
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        narrow = max(8, channels // 8)
        self.layers = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, narrow, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(narrow, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, h, w)``, weighed."""
        weighed: Tensor = x * self.layers(x)
        return weighed


def normalised_conv(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, activate: bool = True, groups: int = 1
) -> nn.Sequential:
    """Convolution without bias, batch normalisation and, by default, ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    parts: OrderedDict[str, nn.Module] = OrderedDict(conv=conv, norm=nn.BatchNorm2d(outputs))
    if activate:
        parts["activation"] = nn.ReLU(inplace=True)
    return nn.Sequential(parts)
