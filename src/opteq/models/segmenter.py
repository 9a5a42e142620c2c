"""Semantic segmentation: OptEq after an extractor, with logits upsampled to the size of the image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opteq.models.blocks.parts import Parts, last_layer
from opteq.models.blocks.residual import normalised_conv
from opteq.models.checks import option, whole
from opteq.models.classifier import Classifier
from opteq.models.families.extracted import (
    ExtractedOptions,
    ExtractorOptions,
    extracted_problem,
    make_extractor,
)


class Segmenter(Classifier):
    """``head(equilibrium(stem(x)))``, upsampled: from images to the logits of every pixel.

    Parts and files are those of a :class:`Classifier`. The head returns logits ``(B, num_classes, h', w')``;
    bilinear interpolation brings them to the size of the image, which may be any.

    >>> import torch, opteq.models
    >>> small = {"extractor_width": 4, "extractor_blocks": [1, 1], "channels": 8, "hidden": [8, 8], "head_width": 8}
    >>> model = opteq.models.create("opteq-cityscapes", num_classes=19, **small)
    >>> model(torch.rand(1, 3, 32, 48)).shape
    torch.Size([1, 19, 32, 48])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Scores ``(B, num_classes, h, w)`` of images ``(B, in_channels, h, w)``."""
        return F.interpolate(super().forward(x), size=x.shape[2:], mode="bilinear", align_corners=False)

    def features(self, x: Tensor) -> Tensor:
        """The input of the last convolution, ``(B, F, h', w')``."""
        return super().features(x)

    @torch.no_grad()
    def predict(self, image: Any) -> Any:
        """The class of every pixel of an image, int64 ``(h, w)``; a list of such for a list of images.

        Images are prepared as for a :class:`Classifier`, and keep their size.
        """
        from opteq.models.prediction import Preprocessing

        if isinstance(image, list | tuple):
            return [self.predict(one) for one in image]
        preprocessing = replace(Preprocessing.of(self.config), size=None)
        weight = next(self.parameters())
        pixels = preprocessing.pixels(image)[None].to(weight.device)
        logits, *_ = self._solved(preprocessing.normalised(pixels).to(weight.dtype))
        return logits[0].argmax(dim=0)


@dataclass(frozen=True, kw_only=True)
class FCNOptions(ExtractorOptions):
    """Options of a segmenter that is an extractor and a head."""

    head_width: int = option(256, whole(), "channels of the 3x3 convolution before the last layer")


@dataclass(frozen=True, kw_only=True)
class SegmenterOptions(FCNOptions, ExtractedOptions):
    """Options of a segmenter with OptEq behind an extractor."""


class PixelHead(nn.Module):
    """A 3x3 convolution, normalised and rectified, then scores by a 1x1 convolution: the head of an FCN."""

    def __init__(self, channels: int, num_classes: int, width: int, dropout: float) -> None:
        super().__init__()
        self.convolution = normalised_conv(channels, width)
        self.dropout = nn.Dropout2d(dropout)
        self.scores = last_layer(width, num_classes, pixels=True)

    def embed(self, features: Tensor) -> Tensor:
        """The input of the last layer, ``(B, F, h', w')``."""
        embedded: Tensor = self.convolution(features)
        return embedded

    def forward(self, features: Tensor) -> Tensor:
        """Scores, ``(B, num_classes, h', w')``."""
        scores: Tensor = self.scores(self.dropout(self.embed(features)))
        return scores


def build_segmenter(in_channels: int, num_classes: int, options: SegmenterOptions) -> Parts:
    """Extractor, Deep OptEq and head of a segmenter."""
    extractor = make_extractor(in_channels, options)
    layer = options.layer(extracted_problem(options))
    return Parts(extractor, layer, PixelHead(options.channels, num_classes, options.head_width, options.dropout))


def build_fcn(in_channels: int, num_classes: int, options: FCNOptions) -> Parts:
    """A fully convolutional network: the extractor's stages and the same head, without an equilibrium."""
    first, *stages = make_extractor(in_channels, options).children()
    head = PixelHead(options.extractor_channels, num_classes, options.head_width, options.dropout)
    return Parts(first, nn.Sequential(*stages), head)
