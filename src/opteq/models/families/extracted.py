"""OptEq after a feature extractor, the first stages of a residual network, for large images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.common.errors import UserError
from opteq.models.blocks.parts import Parts, last_layer, make_injection
from opteq.models.blocks.residual import normalised_conv
from opteq.models.checks import flag, number, option, whole, wholes
from opteq.models.comparators.residual_networks import Bottleneck, large_stem
from opteq.models.families.opteq import LayerOptions, make_problem
from opteq.models.options import Options
from opteq.operators import Conv2d, Operator, SeparableConv2d
from opteq.problems.base import Problem


@dataclass(frozen=True, kw_only=True)
class ExtractorOptions(Options):
    """Options of the first stages of a residual network, and of dropout."""

    extractor_blocks: tuple[int, ...] = option(
        (3, 4, 6), wholes(most=256, longest=8), "bottleneck blocks of each stage of the extractor"
    )
    extractor_strides: tuple[int, ...] = option((1, 2, 1), wholes(), "2 for a stage that halves images, 1 for others")
    extractor_width: int = option(64, whole(), "channels of its first convolution; the stages have 4, 8, 16 times that")
    widen: int = option(1, whole(), "factor of the channels inside its blocks; 2 is the wide residual network")
    dropout: float = option(0.0, number(0, 0.99, open_below=False), "share of features dropped before the last layer")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.extractor_strides) != len(self.extractor_blocks):
            raise UserError(
                "extractor_blocks and extractor_strides should have one value per stage; "
                f"got {len(self.extractor_blocks)} and {len(self.extractor_strides)}"
            )

    @property
    def extractor_channels(self) -> int:
        """Channels of the extractor's output."""
        return 4 * self.extractor_width << len(self.extractor_blocks) - 1


@dataclass(frozen=True, kw_only=True)
class ExtractedOptions(ExtractorOptions, LayerOptions):
    """Options shared by OptEq models with an extractor."""

    channels: int = option(512, whole(), "channels of the features, where the layers' W begin and end")
    separable: bool = option(
        True, flag(), "W and U as a filter per channel and a mixing of channels, not as one kernel"
    )


@dataclass(frozen=True, kw_only=True)
class DeepHeadOptions(Options):
    """Options of a head with convolutions."""

    head_widths: tuple[int, ...] = option(
        (1024, 2048), wholes(), "channels of the head's 1x1 convolutions, each followed by max-pooling by 2"
    )


@dataclass(frozen=True, kw_only=True)
class ExtractedClassifierOptions(DeepHeadOptions, ExtractedOptions):
    """Options of a classifier with an extractor."""


class SeparableInjection(SeparableConv2d):
    """U as a separable convolution, with the bias b: ``U x + b``. Adjoint and norm are those of its linear part.

    The output has variance one for a rectified input, as with ``make_injection``: U need not be a contraction, so
    it has no bound.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__(inputs, outputs, kernel)
        self.bias = nn.Parameter(torch.zeros(outputs))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights again."""
        nn.init.normal_(self.depthwise, std=self.depthwise[0].numel() ** -0.5)
        nn.init.normal_(self.pointwise, std=(2 / self.in_channels) ** 0.5)

    def forward(self, v: Tensor) -> Tensor:
        """``U v + b``."""
        return super().forward(v) + self.bias[:, None, None]

    def norm(self) -> Tensor:
        return super().norm()  # a bias does not change it


class DeepHead(nn.Module):
    """1x1 convolutions, each rectified and max-pooled by 2, then the mean over pixels and a linear layer."""

    def __init__(self, channels: int, num_classes: int, widths: Sequence[int], dropout: float) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for width in widths:
            # Rounded up, so that an image of one pixel keeps it.
            parts += [normalised_conv(channels, width, 1), nn.MaxPool2d(2, ceil_mode=True)]
            channels = width
        self.convolutions = nn.Sequential(*parts)
        self.dropout = nn.Dropout(dropout)
        self.linear = last_layer(channels, num_classes)

    def embed(self, features: Tensor) -> Tensor:
        """The input of the linear layer, ``(B, F)``."""
        mixed: Tensor = self.convolutions(features)
        return mixed.mean(dim=(2, 3))

    def forward(self, features: Tensor) -> Tensor:
        """Scores, ``(B, num_classes)``."""
        scores: Tensor = self.linear(self.dropout(self.embed(features)))
        return scores


def build_classifier(in_channels: int, num_classes: int, options: ExtractedClassifierOptions) -> Parts:
    """Extractor, Deep OptEq and head of a classifier for large images."""
    extractor = make_extractor(in_channels, options)
    layer = options.layer(extracted_problem(options))
    return Parts(extractor, layer, DeepHead(options.channels, num_classes, options.head_widths, options.dropout))


def make_extractor(in_channels: int, options: ExtractorOptions) -> nn.Sequential:
    """A 7x7 convolution and a max-pooling, which both halve, then stages of bottleneck blocks.

    With blocks (3, 4, 6), (1, 2, 2) as strides and ``widen`` 1 or 2 these are the first stages of ResNet-50 or
    Wide-ResNet-50-2.
    """
    inputs = options.extractor_width
    parts: list[nn.Module] = [*large_stem(in_channels, inputs)]
    for index, (count, stride) in enumerate(zip(options.extractor_blocks, options.extractor_strides, strict=True)):
        width = options.extractor_width * 2**index
        for position in range(count):
            parts.append(Bottleneck(inputs, width, stride if position == 0 else 1, options.widen))
            inputs = 4 * width
    return nn.Sequential(*parts)


def extracted_problem(options: ExtractedOptions) -> Problem:
    """The OptEq layers on the output of :func:`make_extractor`."""
    layers = [
        (
            _operator(size, options),
            _injection(options.extractor_channels, size, options) if options.sees_input(index) else None,
        )
        for index, size in enumerate(options.hidden)
    ]
    return make_problem(layers, options)


def _operator(size: int, options: ExtractedOptions) -> Operator:
    kind = SeparableConv2d if options.separable else Conv2d
    return kind(options.channels, size, options.weight_kernel, bound=options.bound)


def _injection(inputs: int, size: int, options: ExtractedOptions) -> nn.Module:
    if not options.separable:
        return make_injection(inputs, size, options)
    norm, kernel = options.injection_norm, options.injection_kernel
    if norm == "none":
        return SeparableInjection(inputs, size, kernel)
    normalisation = nn.BatchNorm2d(size) if norm == "batch" else nn.GroupNorm(1, size)
    return nn.Sequential(SeparableConv2d(inputs, size, kernel), normalisation)
