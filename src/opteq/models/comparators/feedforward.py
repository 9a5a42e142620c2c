"""Networks that end where an equilibrium would begin, or have none: what OptEq is compared with at its own size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.models.blocks.parts import Head, Parts, make_stem
from opteq.models.checks import option, wholes
from opteq.models.families.extracted import DeepHead, DeepHeadOptions, ExtractorOptions, make_extractor
from opteq.models.options import ClassifierOptions


@dataclass(frozen=True, kw_only=True)
class PlainOptions(ClassifierOptions):
    """Options of a plain network with input-skip connections."""

    hidden: tuple[int, ...] = option((16, 32, 64, 128, 128), wholes(), "channels of each layer")
    injected: tuple[int, ...] = option((2, 3, 4), wholes(0), "layers that see the input, from 0; the first always does")


class PlainLayers(nn.Module):
    """``z_(k+1) = relu(W_k z_k + U_k x + b_k)`` with 3x3 convolutions, beginning with ``relu(U_0 x + b_0)``.

    Kernels are drawn so that the sum before a ReLU has variance two for an input of that ReLU's kind.
    """

    def __init__(self, inputs: int, hidden: Sequence[int], injected: Sequence[int]) -> None:
        super().__init__()
        self.U = nn.ModuleDict()
        self.W = nn.ModuleList()
        for index, size in enumerate(hidden):
            seen = index == 0 or index in injected
            scale = 0.5**0.5 if index > 0 and seen else 1.0  # two convolutions share the variance
            if seen:
                self.U[str(index)] = _conv(inputs, size, scale, bias=True)
            if index > 0:
                self.W.append(_conv(hidden[index - 1], size, scale, bias=not seen))

    def forward(self, x: Tensor) -> Tensor:
        """``(B, inputs, h, w) -> (B, hidden[-1], h, w)``."""
        z = torch.relu(self.U["0"](x))
        for index, W in enumerate(self.W, start=1):
            given = W(z)
            z = torch.relu(given + self.U[str(index)](x) if str(index) in self.U else given)
        return z


def _conv(inputs: int, outputs: int, scale: float, bias: bool) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    with torch.no_grad():
        conv.weight.mul_(scale)
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


def build_plain(in_channels: int, num_classes: int, options: PlainOptions) -> Parts:
    """The stem and the head of an OptEq with plain layers in between."""
    stem = make_stem(in_channels, options)
    layers = PlainLayers(stem.channels[0], options.hidden, options.injected)
    return Parts(stem.module, layers, Head([options.hidden[-1]], num_classes, options))


@dataclass(frozen=True, kw_only=True)
class StemClassifierOptions(ClassifierOptions):
    """Options of a stem with a classification layer."""

    scales: tuple[int, ...] = option((1,), wholes(), "downsampling factors of the pyramid's levels that the head reads")

    def read_branches(self) -> int:
        return len(self.scales)


def build_stem(in_channels: int, num_classes: int, options: StemClassifierOptions) -> Parts:
    """The stem and the head of a model of a redesigned family, with nothing in between."""
    stem = make_stem(in_channels, options, options.scales)
    return Parts(stem.module, nn.Identity(), Head(stem.channels, num_classes, options))


@dataclass(frozen=True, kw_only=True)
class ExtractorClassifierOptions(DeepHeadOptions, ExtractorOptions):
    """Options of an extractor with a classification layer."""


def build_extractor(in_channels: int, num_classes: int, options: ExtractorClassifierOptions) -> Parts:
    """The extractor of an OptEq and a classification layer, with nothing in between."""
    first, *stages = make_extractor(in_channels, options).children()
    head = DeepHead(options.extractor_channels, num_classes, options.head_widths, options.dropout)
    return Parts(first, nn.Sequential(*stages), head)
