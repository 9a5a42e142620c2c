"""Stems, injections and heads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from opteq.common.errors import UserError
from opteq.models.blocks.pyramid import Pyramid
from opteq.models.blocks.residual import BLOCKS, normalised_conv
from opteq.models.options import ClassifierOptions, SolvingOptions


class Parts(NamedTuple):
    """The three parts of a classifier, in the order of the forward pass."""

    stem: nn.Module
    equilibrium: nn.Module
    head: nn.Module


class Stem(NamedTuple):
    """A stem, and the number of channels of each branch's input (one entry without branches)."""

    module: nn.Module
    channels: tuple[int, ...]


def make_stem(in_channels: int, options: ClassifierOptions, scales: Sequence[int] | None = None) -> Stem:
    """From images to the input of the equilibrium, ``(B, in_channels, h, w) -> (B, channels, h', w')``.

    Every convolution is followed by batch normalisation and ReLU, the last one too: the branches' injections are
    linear, so without it two linear maps would follow each other. Levels of a pyramid that are made of inverted blocks
    are the exception: their output is not rectified.

    ``plain`` is a convolution to ``channels`` and ``stem_depth`` more. ``residual`` is one to ``stem_width``,
    ``stem_depth`` residual blocks and a convolution to ``channels``: deeper for the same number of parameters.
    ``pyramid`` is a :class:`~opteq.models.blocks.pyramid.Pyramid`, whose levels go to the branches of their ``scales``.
    """
    if options.stem_kernel % 2 == 0:
        raise UserError(f"stem_kernel should be odd, so that an image keeps its size; got {options.stem_kernel}")
    _check_blocks(options)
    if options.stem == "pyramid":
        return _pyramid(in_channels, options, scales)
    if options.stem_widths is not None:
        raise UserError(f"stem_widths has no effect with stem={options.stem!r}; it belongs to stem='pyramid'")
    return Stem(_one_size(in_channels, options), (options.channels,) * (1 if scales is None else len(scales)))


def _pyramid(in_channels: int, options: ClassifierOptions, scales: Sequence[int] | None) -> Stem:
    widths = options.stem_widths
    if widths is None:
        raise UserError("stem='pyramid' needs stem_widths, the channels of its levels, such as stem_widths=(32, 64)")
    if options.stem_width is not None or options.downsample:
        raise UserError(
            "stem='pyramid' halves the image from level to level, with the channels of stem_widths; stem_width and "
            "downsample have no effect with it"
        )
    factors = [2**level for level in range(len(widths))]
    for scale in scales or ():
        if scale not in factors:
            raise UserError(f"a pyramid of {len(widths)} levels has the scales {factors}; got a branch with {scale}")
    levels = None if scales is None else tuple(factors.index(scale) for scale in scales)
    if levels is not None and max(levels) + 1 < len(widths):
        raise UserError(
            f"no branch uses the last of {len(widths)} levels of the pyramid; the "
            f"coarsest branch has scale {max(scales or ())}, so stem_widths should have {max(levels) + 1} numbers"
        )
    for name in ("stem_depth", "stem_block"):
        given = getattr(options, name)
        if isinstance(given, tuple) and len(given) != len(widths):
            raise UserError(
                f"{name} should be one value, or a list with one for each of {len(widths)} levels; got {list(given)}"
            )
    module = Pyramid(
        in_channels,
        widths,
        options.stem_depth,
        options.stem_kernel,
        levels,
        options.stem_attention,
        options.stem_block,
    )
    return Stem(module, (widths[-1],) if levels is None else tuple(widths[level] for level in levels))


def _one_size(in_channels: int, options: ClassifierOptions) -> nn.Sequential:
    channels, depth, block = options.channels, options.stem_depth, options.stem_block
    if isinstance(depth, tuple) or isinstance(block, tuple):
        raise UserError(
            "stem_depth and stem_block may be lists, with one value per level, with stem='pyramid' only; "
            f"got stem_depth={depth!r} and stem_block={block!r} with stem={options.stem!r}"
        )
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
        *(BLOCKS[block](width, width, stride, options.stem_attention) for stride in strides[1:]),
        normalised_conv(width, channels),
    )


def make_injection(inputs: int, outputs: int, options: SolvingOptions) -> nn.Module:
    """U: a convolution whose output has variance one for a rectified input, and its normalisation.

    ``batch`` and ``group`` normalise ``U x`` over the batch or over each sample. With either, the norm of U and so the
    Lipschitz constant of the certificate are unknown.
    """
    norm, kernel = options.injection_norm, options.injection_kernel
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=norm == "none")
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
        return conv
    return nn.Sequential(conv, nn.BatchNorm2d(outputs) if norm == "batch" else nn.GroupNorm(1, outputs))


class Head(nn.Module):
    """From the features of an equilibrium to logits.

    Features are images, or a tuple with the images of every branch. Each is batch-normalised, rectified and
    averaged to ``pool x pool`` pixels; then branches are concatenated or averaged, a hidden layer follows where there
    is one, and a linear layer. Normalising every branch by itself puts coarse and fine ones on one scale.

    Args:
        channels: of each branch.
        num_classes: number of logits.
        options: ``readout``, ``head_width``, ``pool`` and ``dropout``.
        fuse: makes one image of those of all branches, first; None leaves them apart.
    """

    def __init__(
        self,
        channels: Sequence[int],
        num_classes: int,
        options: ClassifierOptions,
        fuse: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.fuse = fuse
        self.readout = options.readout
        if self.readout == "mean" and len(set(channels)) > 1:
            raise UserError(f"readout='mean' needs branches with the same number of channels; got {list(channels)}")
        self.norms = nn.ModuleList(nn.Sequential(nn.BatchNorm2d(count), nn.ReLU()) for count in channels)
        self.pool = nn.AdaptiveAvgPool2d(options.pool)
        width = (channels[0] if self.readout == "mean" else sum(channels)) * options.pool**2
        self.hidden = nn.Identity() if options.head_width is None else _hidden(width, options.head_width)
        self.dropout = nn.Dropout(options.dropout)
        self.linear = last_layer(options.head_width or width, num_classes)

    def embed(self, features: Tensor | tuple[Tensor, ...]) -> Tensor:
        """The input of the linear layer, ``(B, F)``."""
        if self.fuse is not None:
            features = self.fuse(features)
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


class NoClassifier(nn.Identity):
    """In the place of the last layer of a model without classes: the features pass as they are.

    Args:
        in_features: their number, for a layer that takes this place later.
        pixels: whether they are those of every pixel.
    """

    def __init__(self, in_features: int, pixels: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.pixels = pixels

    def extra_repr(self) -> str:
        """The number of features."""
        return str(self.in_features)


def last_layer(in_features: int, num_classes: int, pixels: bool = False) -> nn.Module:
    """The linear layer from features to logits, for every pixel a 1x1 convolution; none for no classes."""
    if num_classes == 0:
        return NoClassifier(in_features, pixels)
    return nn.Conv2d(in_features, num_classes, 1) if pixels else nn.Linear(in_features, num_classes)


def _hidden(inputs: int, outputs: int) -> nn.Sequential:
    # LayerNorm: BatchNorm does not accept a batch of one in training.
    return nn.Sequential(nn.Linear(inputs, outputs, bias=False), nn.LayerNorm(outputs), nn.ReLU())


def _check_blocks(options: ClassifierOptions) -> None:
    """Raise for options of residual blocks where there are none."""
    depth = options.stem_depth
    if options.stem != "plain" and (depth if isinstance(depth, int) else any(depth)):
        return
    without = "stem='plain'" if options.stem == "plain" else "stem_depth=0"
    for name, usual in (("stem_attention", False), ("stem_block", "basic")):
        if getattr(options, name) != usual:
            raise UserError(f"{name} has no effect with {without}, a stem without residual blocks")


def _check_downsample(downsample: int, convolutions: int) -> None:
    if downsample > convolutions:
        raise UserError(
            f"downsample={downsample} needs as many convolutions (or blocks) in the stem, which has {convolutions}; "
            "raise stem_depth"
        )
