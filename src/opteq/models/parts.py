"""What is before and behind an equilibrium: stems, injections and heads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from opteq._errors import UserError
from opteq.models.options import ClassifierOptions


class Parts(NamedTuple):
    """The three parts of a classifier, in the order in which data passes them."""

    stem: nn.Module
    equilibrium: nn.Module
    head: nn.Module


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


def make_stem(in_channels: int, options: ClassifierOptions) -> nn.Sequential:
    """From pictures to the input of the equilibrium, ``(B, in_channels, h, w) -> (B, channels, h', w')``.

    Every convolution is followed by batch normalisation and ReLU, the last one too: the branches' injections are
    linear, so without it two linear maps would follow each other.

    ``plain`` is a convolution to ``channels`` and ``stem_depth`` more. ``residual`` is one to ``stem_width``,
    ``stem_depth`` residual blocks and a convolution to ``channels``: deeper for the same number of parameters.
    """
    if options.stem_kernel % 2 == 0:
        raise UserError(f"stem_kernel should be odd, so that a picture keeps its size; got {options.stem_kernel}")
    channels, depth = options.channels, options.stem_depth
    if options.stem == "plain":
        if options.stem_width is not None:
            raise UserError("stem_width has no effect with stem='plain'; it belongs to stem='residual'")
        widths = [in_channels, *[channels] * (depth + 1)]
        _check_downsample(options.downsample, depth + 1)
        return nn.Sequential(
            *(
                normalised_conv(a, b, options.stem_kernel if i == 0 else 3, 2 if i < options.downsample else 1)
                for i, (a, b) in enumerate(pairwise(widths))
            )
        )
    width = options.stem_width or channels
    _check_downsample(options.downsample, depth + 1)
    strides = [2 if i < options.downsample else 1 for i in range(depth + 1)]
    return nn.Sequential(
        normalised_conv(in_channels, width, options.stem_kernel, strides[0]),
        *(ResidualBlock(width, width, stride) for stride in strides[1:]),
        normalised_conv(width, channels),
    )


def make_injection(inputs: int, outputs: int, norm: str) -> nn.Module:
    """U: a 3x3 convolution whose output has variance one for a rectified input, and its normalisation.

    ``batch`` and ``group`` put the scale of ``U x`` into the hands of a normalisation, over the batch or over each
    sample. With either, the Lipschitz constant of the certificate is unknown, for a norm of U is.
    """
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=norm == "none")
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
        return conv
    return nn.Sequential(conv, nn.BatchNorm2d(outputs) if norm == "batch" else nn.GroupNorm(1, outputs))


class Head(nn.Module):
    """From the features of an equilibrium to class scores.

    Features are pictures, or a tuple with the pictures of every branch. Each is batch-normalised, rectified and
    averaged to ``pool x pool`` pixels; then branches are concatenated or averaged, a hidden layer follows where there
    is one, and a linear layer. Normalising every branch by itself puts coarse and fine ones on one scale.

    Args:
        channels: of each branch.
        num_classes: how many scores.
        options: ``readout``, ``head_width``, ``pool`` and ``dropout``.
    """

    def __init__(self, channels: Sequence[int], num_classes: int, options: ClassifierOptions) -> None:
        super().__init__()
        self.readout = options.readout
        if self.readout == "mean" and len(set(channels)) > 1:
            raise UserError(f"readout='mean' needs branches with the same number of channels; got {list(channels)}")
        self.norms = nn.ModuleList(nn.Sequential(nn.BatchNorm2d(count), nn.ReLU()) for count in channels)
        self.pool = nn.AdaptiveAvgPool2d(options.pool)
        width = (channels[0] if self.readout == "mean" else sum(channels)) * options.pool**2
        self.hidden = nn.Identity() if options.head_width is None else _hidden(width, options.head_width)
        self.dropout = nn.Dropout(options.dropout)
        self.linear = nn.Linear(options.head_width or width, num_classes)

    def embed(self, features: Tensor | tuple[Tensor, ...]) -> Tensor:
        """What the linear layer sees, ``(B, F)``."""
        branches = features if isinstance(features, tuple) else (features,)
        if len(branches) != len(self.norms):
            raise ValueError(f"this head reads {len(self.norms)} branches; the equilibrium gave {len(branches)}")
        pooled = [self.pool(norm(z)).flatten(1) for norm, z in zip(self.norms, branches, strict=True)]
        joined = torch.stack(pooled).mean(dim=0) if self.readout == "mean" else torch.cat(pooled, dim=1)
        embedded: Tensor = self.hidden(joined)
        return embedded

    def forward(self, features: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Scores, ``(B, num_classes)``."""
        scores: Tensor = self.linear(self.dropout(self.embed(features)))
        return scores


def _hidden(inputs: int, outputs: int) -> nn.Sequential:
    # Normalised over each sample: over the batch it would refuse a batch of one in training.
    return nn.Sequential(nn.Linear(inputs, outputs, bias=False), nn.LayerNorm(outputs), nn.ReLU())


def _check_downsample(downsample: int, convolutions: int) -> None:
    if downsample > convolutions:
        raise UserError(
            f"downsample={downsample} needs as many convolutions (or blocks) in the stem, which has {convolutions}; "
            "raise stem_depth"
        )
