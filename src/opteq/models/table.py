"""The table of models: families, options, and the published results that they reproduce."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from opteq.models import segmenter
from opteq.models.blocks.parts import Parts
from opteq.models.classifier import Classifier
from opteq.models.comparators import feedforward, hrnet, inception, mdeq, mondeq, neural_ode, residual_networks
from opteq.models.families import extracted, geq, inhibition, mopteq, opteq
from opteq.models.families.redesigned import PYRAMIDS
from opteq.models.options import Options


@dataclass(frozen=True)
class Entry:
    """A model: how it is built, with which options, and what it reproduces.

    ``own``: registered by a user. Its function may compute with values, which tensors without memory do not have.
    """

    family: str
    build: Callable[[int, int, Any], Parts]
    options: Options
    summary: str
    reproduces: str = ""
    classes: int = 10
    make: type[Classifier] = Classifier
    own: bool = False


def _opteq(summary: str, reproduces: str = "", **options: Any) -> Entry:
    return Entry("opteq", opteq.build, opteq.OptEqOptions(**options), summary, reproduces)


def _extracted(summary: str, reproduces: str, classes: int, **options: Any) -> Entry:
    chosen = extracted.ExtractedClassifierOptions(**options)
    return Entry("opteq", extracted.build_classifier, chosen, summary, reproduces, classes)


def _segmenter(summary: str, reproduces: str, classes: int, **options: Any) -> Entry:
    chosen = segmenter.SegmenterOptions(**options)
    return Entry("opteq", segmenter.build_segmenter, chosen, summary, reproduces, classes, segmenter.Segmenter)


def _mopteq(summary: str, reproduces: str = "", classes: int = 10, **options: Any) -> Entry:
    return Entry("mopteq", mopteq.build_mopteq, mopteq.MOptEqOptions(**options), summary, reproduces, classes)


def _popteq(summary: str, reproduces: str = "", **options: Any) -> Entry:
    return Entry("popteq", mopteq.build_popteq, mopteq.POptEqOptions(**options), summary, reproduces)


def _geq(summary: str, reproduces: str = "", **options: Any) -> Entry:
    return Entry("geq", geq.build, geq.GEQOptions(**options), summary, reproduces)


def _inhibition(summary: str, **options: Any) -> Entry:
    return Entry("inhibition", inhibition.build, inhibition.InhibitionOptions(**options), summary)


def _baseline(
    build: Callable[[int, int, Any], Parts], options: Options, summary: str, reproduces: str = "", classes: int = 10
) -> Entry:
    return Entry("baseline", build, options, summary, reproduces, classes)


def _resnet(summary: str, reproduces: str = "", classes: int = 10, **options: Any) -> Entry:
    chosen = residual_networks.ResNetOptions(**options)
    return _baseline(residual_networks.build_resnet, chosen, summary, reproduces, classes)


def _mdeq(summary: str, reproduces: str, classes: int = 10, **options: Any) -> Entry:
    return Entry("comparator", mdeq.build, mdeq.MDEQOptions(**options), summary, reproduces, classes)


def _stem(of: str, **options: Any) -> Entry:
    chosen = feedforward.StemClassifierOptions(stem="pyramid", **options)
    summary = f"extractor and classifier: the stem of {of} with more channels, so that the size is the same, and a head"
    return _baseline(feedforward.build_stem, chosen, summary)


def _neural_ode(summary: str, reproduces: str, **options: Any) -> Entry:
    return Entry("comparator", neural_ode.build, neural_ode.NeuralODEOptions(**options), summary, reproduces)


def _mondeq(summary: str, reproduces: str, **options: Any) -> Entry:
    return Entry("comparator", mondeq.build, mondeq.MonDEQOptions(**options), summary, reproduces)


# Smoothing of the size of the products that D is made of: much more of it and D would hardly act.
_FOUR_SCALES: dict[str, Any] = {"scales": (1, 2, 4, 8), "stem_depth": 1, "diversity": 0.001, "smoothing": 0.01}
# One empty patch would make the paper's M, the least squared length of a patch, zero: the median of them is robust.
_SIX_SCALES: dict[str, Any] = {
    "scales": (1, 2, 4, 4, 8, 8), "bound": 1.2, "injection_norm": "batch", "fusion": "average", "gamma": "median",
}  # fmt: skip

MODELS: dict[str, Entry] = {
    "opteq-digits": _opteq(
        "one OptEq layer for 8x8 digits: small, convex, and quick on a CPU",
        channels=16, hidden=(32,), pool=4,
    ),
    "opteq-162k": _opteq(
        "Deep OptEq of five layers; the last three see the input",
        "OptEq paper, CIFAR-10, 162k parameters",
        channels=32, hidden=(16, 32, 64, 64, 128), injected=(2, 3, 4),
    ),
    "opteq-199k": _opteq(
        "Deep OptEq of five layers; the last three see the input",
        "OptEq paper, CIFAR-10, 199k parameters",
        channels=32, hidden=(16, 32, 64, 128, 128), injected=(2, 3, 4),
    ),
    "opteq-1.4m": _opteq(
        "Deep OptEq of five layers that all see the input",
        "OptEq paper, CIFAR-10, 1.4M parameters",
        channels=64, hidden=(64, 128, 256, 256, 512),
    ),
    "opteq-small-imagenet": _extracted(
        "Deep OptEq of five separable layers after three stages of ResNet-50; 17.2M parameters, of which 4.0M are "
        "OptEq's, where the paper prints 18M and 7M without a layout that has them",
        "OptEq paper, ImageNet, OptEq-small",
        classes=1000, hidden=(512,) * 5,
    ),
    "opteq-middle-imagenet": _extracted(
        "Deep OptEq of three separable layers after three stages of Wide-ResNet-50; 32.0M parameters, of which 2.5M "
        "are OptEq's, where the paper prints 40M and 13M without a layout that has them",
        "OptEq paper, ImageNet, OptEq-Mid.",
        classes=1000, hidden=(512,) * 3, widen=2, injection_kernel=5,
    ),
    "opteq-cityscapes": _segmenter(
        "Deep OptEq of three layers after two stages of ResNet-50, for segmentation",
        "OptEq paper, Cityscapes (of its layout only the layers' channels are printed)",
        classes=19, extractor_blocks=(3, 4), extractor_strides=(1, 2), channels=256, hidden=(256, 512, 512),
        separable=False, dropout=0.1,
    ),
    "mopteq-193k": _mopteq(
        "MOptEq of three branches of one size",
        "MOptEq paper, CIFAR-10, single view, 193k parameters (perturbation=0.1 for the row with it)",
        channels=32, hidden=(108, 112, 112), scales=(1, 1, 1), diversity=0.01, smoothing=1.0,
    ),
    "popteq-193k": _popteq(
        "three OptEq branches of one size without ties; fusion='conv' is the row with 276k parameters",
        "MOptEq paper, CIFAR-10, single view, POptEq rows",
        channels=32, hidden=(108, 112, 112), scales=(1, 1, 1),
    ),
    "mopteq-0.48m": _mopteq(
        "MOptEq of four scales, 128 channels",
        "MOptEq paper, CIFAR-10, multi-scale, 0.48M parameters",
        channels=128, hidden=(16, 32, 32, 64), bound=1.35, **_FOUR_SCALES,
    ),
    "mopteq-1.9m": _mopteq(
        "MOptEq of four scales, 256 channels",
        "MOptEq paper, CIFAR-10 and CIFAR-100, multi-scale, 1.9M parameters",
        channels=256, hidden=(32, 64, 64, 128), bound=1.25, **_FOUR_SCALES,
    ),
    "mopteq-8.1m": _mopteq(
        "MOptEq of four scales, 448 channels",
        "MOptEq paper, CIFAR-100, 8.1M parameters",
        channels=448, hidden=(112, 224, 224, 224), bound=1.2, **_FOUR_SCALES,
    ),
    "mopteq-10m-imagenette": _mopteq(
        "MOptEq of four scales for images of 256x256, downsampled twice by its stem",
        "MOptEq paper, ImageNette, 10M parameters",
        channels=448, hidden=(112, 224, 224, 224), bound=1.2, downsample=2, **(_FOUR_SCALES | {"stem_depth": 2}),
    ),
    "mopteq-13m-imagenet": _mopteq(
        "MOptEq of four scales for images of 256x256, downsampled twice by its stem",
        "MOptEq paper, ImageNet, 13M parameters",
        classes=1000, channels=512, hidden=(64, 128, 128, 256), bound=1.2, stem_kernel=7, downsample=2, readout="mean",
        **(_FOUR_SCALES | {"stem_depth": 3}),
    ),
    "geq-5m": _geq(
        "GEQ of six branches, 256 channels",
        "GEQ paper, CIFAR-10 and CIFAR-100, 5M parameters",
        channels=256, hidden=(64, 128, 128, 128, 256, 256), stem_depth=1, **_SIX_SCALES,
    ),
    "geq-8m": _geq(
        "GEQ of six branches, 320 channels",
        "GEQ paper, CIFAR-10 and CIFAR-100, 8M parameters",
        channels=320, hidden=(80, 160, 160, 160, 320, 320), stem_depth=1, **_SIX_SCALES,
    ),
    "geq-6m-imagenet": _geq(
        "GEQ of six branches for images of 256x256, downsampled twice by its stem",
        "GEQ paper, ImageNette and ImageNet-100, 6M parameters",
        channels=256, hidden=(32, 64, 128, 128, 256, 256), projection=128, stem_depth=3, stem_kernel=7, downsample=2,
        readout="mean", head_width=256, **_SIX_SCALES,
    ),
    "geq-13m-imagenet": _geq(
        "GEQ of six branches for images of 256x256, downsampled twice by its stem",
        "GEQ paper, ImageNette and ImageNet-100, 13M parameters",
        channels=384, hidden=(48, 96, 192, 192, 384, 384), projection=128, stem_depth=3, stem_kernel=7, downsample=2,
        readout="mean", head_width=384, **_SIX_SCALES,
    ),
    "inhibition-0.48m": _inhibition(
        "branches of four scales that inhibit each other, convex for every weight; one convolution as stem",
        channels=64, common=64, hidden=(32, 64, 136, 176), scales=(1, 2, 4, 8), injection_norm="batch", max_steps=60,
    ),
    "mdeq-10m": _mdeq(
        "MDEQ of four scales: a fixed point of residual blocks, without an objective",
        "MOptEq and GEQ papers, CIFAR-10, MDEQ with 10M parameters",
        hidden=(32, 64, 128, 256), max_steps=18, dropout=0.3,
    ),
    "mdeq-2.5m": _mdeq(
        "MDEQ of four scales with fewer channels; the paper prints their number of parameters alone",
        "MOptEq paper, CIFAR-10, MDEQ with 2.53M parameters",
        hidden=(16, 32, 64, 120), heads=(7, 14, 28, 56), last=584, max_steps=18, dropout=0.3,
    ),
    "mondeq-172k": _mondeq(
        "monDEQ of one circular convolution: a fixed point for every weight, without an objective",
        "OptEq paper, CIFAR-10, single-convolution monotone DEQ, 172k parameters",
        hidden=(81,),
    ),
    "mondeq-854k": _mondeq(
        "monDEQ of one circular convolution with more channels",
        "MOptEq paper, CIFAR-10, single-tier monDEQ, 854k parameters",
        hidden=(200,),
    ),
    "mondeq-1m": _mondeq(
        "monDEQ of three tiers, each half as large as the one before",
        "MOptEq paper, CIFAR-10, multi-tier monDEQ, 1M parameters",
        hidden=(64, 128, 128),
    ),
    "mdeq-18m-imagenet": _mdeq(
        "MDEQ of four scales for images of 224x224, halved twice by its stem",
        "OptEq paper, ImageNet, MDEQ-small, 18M parameters",
        classes=1000, hidden=(32, 64, 128, 256), heads=(28, 56, 112, 224), downsample=2, max_steps=24,
        last_norm_affine=True,
    ),
    "mdeq-single-18m-imagenet": _mdeq(
        "MDEQ of one scale for images of 224x224; the paper prints its number of parameters alone",
        "OptEq paper, ImageNet, MDEQ-single branch, 18M parameters",
        classes=1000, hidden=(400,), expansion=4, heads=(224,), last=2048, downsample=2, max_steps=24,
    ),
    "mdeq-63m-imagenet": _mdeq(
        "MDEQ of four scales with more channels for images of 224x224; the paper prints its number of parameters",
        "OptEq paper, ImageNet, MDEQ-large, 63M parameters",
        classes=1000, hidden=(72, 144, 288, 576), expansion=6, heads=(32, 64, 128, 256), last=1680, downsample=2,
        max_steps=24, last_norm_affine=True,
    ),
    "neural-ode-172k": _neural_ode(
        "neural ODE on the image itself, for images of 32x32",
        "OptEq and MOptEq papers, CIFAR-10, Neural ODE, 172k parameters",
    ),
    "augmented-neural-ode-172k": _neural_ode(
        "neural ODE with ten channels of zeros beside those of the image, for images of 32x32",
        "OptEq and MOptEq papers, CIFAR-10, Aug. Neural ODE, 172k parameters",
        filters=64, augment=10,
    ),
    "plain-199k": _baseline(
        feedforward.build_plain,
        feedforward.PlainOptions(channels=32, hidden=(16, 32, 64, 80, 80)),
        "feed-forward layers that see the input, between the stem and the head of opteq-199k; the paper prints their "
        "number of parameters alone",
        "OptEq paper, CIFAR-10, the network of its Eq. 1, 199k parameters",
    ),
    "resnet18-cifar": _resnet("ResNet-18 in its usual form for 32x32 images, 11.17M parameters"),
    "resnet50-cifar": _resnet(
        "ResNet-50 in its usual form for 32x32 images, 23.5M parameters", blocks=(3, 4, 6, 3), bottleneck=True
    ),
    "resnet18": _resnet(
        "ResNet-18 in its usual form for large images, 11.7M parameters where the paper prints 13M",
        "OptEq paper, ImageNet; GEQ paper, ImageNette and ImageNet-100", 1000, large=True,
    ),
    "resnet34": _resnet(
        "ResNet-34 in its usual form for large images", "OptEq paper, ImageNet", 1000, blocks=(3, 4, 6, 3), large=True
    ),
    "resnet50": _resnet(
        "ResNet-50 in its usual form for large images",
        "OptEq paper, ImageNet; GEQ paper, ImageNette and ImageNet-100", 1000,
        blocks=(3, 4, 6, 3), bottleneck=True, large=True,
    ),
    "resnet101": _resnet(
        "ResNet-101 in its usual form for large images, 44.5M parameters where the paper prints 52M",
        "OptEq paper, ImageNet", 1000, blocks=(3, 4, 23, 3), bottleneck=True, large=True,
    ),
    "wide-resnet50": _resnet(
        "Wide-ResNet-50-2 in its usual form for large images", "OptEq paper, ImageNet, W-ResNet-50", 1000,
        blocks=(3, 4, 6, 3), bottleneck=True, widen=2, large=True,
    ),
    "resnet-13m": _resnet(
        "ResNet of 18 layers for large images, with 68 channels where ResNet-18 has 64",
        "MOptEq paper, ImageNet, ResNet, 13M parameters", 1000, width=68, large=True,
    ),
    "inception-v2": _baseline(
        inception.build, inception.InceptionOptions(),
        "Inception-V2 (BN-Inception), 11.3M parameters where the paper prints 12M",
        "OptEq paper, ImageNet, Inception-V2", 1000,
    ),
    "hrnet-w18": _baseline(
        hrnet.build, hrnet.HRNetOptions(), "HRNet-W18 for large images", "OptEq paper, ImageNet, HRNet-W18", 1000
    ),
    "hrnet-13m": _baseline(
        hrnet.build,
        hrnet.HRNetOptions(hidden=(16, 32, 64, 128), modules=(1, 1, 1), depth=2, first_width=32, first_depth=1),
        "HRNet-W18-small-v1 for large images", "MOptEq paper, ImageNet, HR-Net, 13M parameters", 1000,
    ),
    "extractor-resnet50": _baseline(
        feedforward.build_extractor, feedforward.ExtractorClassifierOptions(head_widths=(512, 1024)),
        "the extractor of opteq-small-imagenet and a classification layer, half as wide so that the size is "
        "the printed one",
        "OptEq paper, ImageNet, Res-Extr. + Cls., 11M parameters", 1000,
    ),
    "extractor-wide-resnet50": _baseline(
        feedforward.build_extractor, feedforward.ExtractorClassifierOptions(head_widths=(512, 1024), widen=2),
        "the extractor of opteq-middle-imagenet and a classification layer, half as wide so that the size is the "
        "printed one",
        "OptEq paper, ImageNet, W-Res-Extr. + Cls., 27M parameters", 1000,
    ),
    "extractor-199k": _stem("opteq-199k-pyramid", stem_widths=(24, 36, 64), stem_depth=2, scales=(4,)),
    "extractor-0.48m": _stem(
        "mopteq-0.48m-pyramid",
        stem_widths=(40, 64, 96, 96), stem_depth=(1, 2, 3, 2), stem_block="inverted", scales=(1, 2, 4, 8),
    ),
    "extractor-5m": _stem(
        "geq-5m-pyramid",
        stem_widths=(88, 176, 272, 272), stem_depth=2, stem_block=("basic", "basic", "basic", "inverted"),
        scales=(2, 4, 8),
    ),
    "fcn-cityscapes": replace(
        _baseline(
            segmenter.build_fcn, segmenter.FCNOptions(dropout=0.1),
            "fully convolutional network: three stages of ResNet-50 and the head of opteq-cityscapes",
            "OptEq paper, Cityscapes, FCN (of its layout nothing is printed but a similar number of parameters)", 19,
        ),
        make=segmenter.Segmenter,
    ),
}  # fmt: skip


def _pyramid(base: Entry, options: Mapping[str, Any]) -> Entry:
    summary = f"redesigned: {base.summary}; behind a pyramid of residual blocks, where most of the parameters are"
    return replace(base, options=base.options.changed(options), summary=summary, reproduces="")


MODELS |= {name: _pyramid(MODELS[base], options) for name, (base, options) in PYRAMIDS.items()}
