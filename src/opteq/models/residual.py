"""Residual blocks: what stems and baselines are made of."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """``relu(x + BN(conv(relu(BN(conv(x))))))``, with a 1x1 convolution on the way past where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = normalised_conv(inputs, outputs, stride=stride)
        self.second = normalised_conv(outputs, outputs, activate=False)
        same = stride == 1 and inputs == outputs
        self.past = nn.Identity() if same else normalised_conv(inputs, outputs, 1, stride, activate=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, inputs, h, w) -> (B, outputs, h / stride, w / stride)``."""
        return torch.relu(self.past(x) + self.second(self.first(x)))


def normalised_conv(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, activate: bool = True
) -> nn.Sequential:
    """Convolution without bias, batch normalisation and, unless told otherwise, ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    parts: OrderedDict[str, nn.Module] = OrderedDict(conv=conv, norm=nn.BatchNorm2d(outputs))
    if activate:
        parts["activation"] = nn.ReLU(inplace=True)
    return nn.Sequential(parts)
