"""MDEQ (Bai, Koltun and Kolter 2020): a fixed point of residual blocks on several scales that are mixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opteq.common.errors import UserError
from opteq.models.blocks.parts import Parts, last_layer
from opteq.models.blocks.residual import normalised_conv
from opteq.models.checks import flag, number, option, whole, wholes
from opteq.models.comparators.residual_networks import Bottleneck
from opteq.models.options import SolvingOptions
from opteq.operators.resample import repeat_pixels
from opteq.problems.fixed_point import FixedPoint
from opteq.states import blocks, is_channels_last


@dataclass(frozen=True, kw_only=True)
class MDEQOptions(SolvingOptions):
    """Options of MDEQ; ``hidden`` are the channels of its scales, each half as large as the one before."""

    expansion: int = option(5, whole(most=64), "channels between the two convolutions of a block, as a multiple")
    groups: int = option(8, whole(), "groups of the normalisations; the last one of a step has half as many")
    heads: tuple[int, ...] = option((14, 28, 56, 112), wholes(), "a fourth of the output channels of each scale")
    last: int = option(1680, whole(), "channels before the linear layer")
    dropout: float = option(
        0.0, number(0, 0.99, open_below=False), "share of channels dropped inside a step, by one draw a solve"
    )
    downsample: int = option(0, whole(0, most=8), "how many convolutions halve the image before the equilibrium")
    last_norm_affine: bool = option(False, flag(), "whether the last norm of a step has weights, as for ImageNet")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.heads) != len(self.hidden):
            raise UserError(f"heads and hidden should have one value per scale; got {self.heads} and {self.hidden}")
        for channels in self.hidden:
            if channels % self.groups:
                raise UserError(f"groups should divide the channels of every scale; got {self.groups} and {channels}")

    def idle(self) -> dict[str, str]:
        fixed = "activation", "bound", "weight_kernel", "injection_kernel", "injection_norm"
        return super().idle() | dict.fromkeys(fixed, "on MDEQ, whose steps are as published")


class UnitConv2d(nn.Module):
    """A convolution without bias whose filters have a learned length and a learned direction (weight normalisation)."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.empty(outputs, inputs, kernel_size, kernel_size))
        # The lengths that torch's first weights of a convolution have. Beside the input, which is added to what such a
        # convolution gives, they say how much of a step hangs on the state.
        self.length = nn.Parameter(torch.full((outputs, 1, 1, 1), 3**-0.5))
        nn.init.kaiming_uniform_(self.direction)

    def forward(self, z: Tensor) -> Tensor:
        """``(B, inputs, h, w) -> (B, outputs, h, w)``."""
        weight = self.length * self.direction / self.direction.square().sum(dim=(1, 2, 3), keepdim=True).sqrt()
        return F.conv2d(z, weight, padding=weight.shape[-1] // 2)


class ScaleBlock(nn.Module):
    """A residual block of one scale: two weight-normalised convolutions, and the input added before the second norm."""

    def __init__(self, channels: int, expansion: int, groups: int) -> None:
        super().__init__()
        wide = expansion * channels
        self.widen = UnitConv2d(channels, wide, 3)
        self.narrow = UnitConv2d(wide, channels, 3)
        self.first, self.second, self.third = (nn.GroupNorm(groups, size) for size in (wide, channels, channels))

    def forward(self, z: Tensor, given: Tensor | None, kept: Tensor | None) -> Tensor:
        """``given`` is the input at this scale, ``kept`` the factors of its channels; None for none."""
        inner = self.narrow(torch.relu(self.first(self.widen(z))))
        inner = inner if kept is None else inner * kept
        inner = inner if given is None else inner + given
        out: Tensor = self.third(torch.relu(self.second(inner) + z))
        return out


class Resized(nn.Module):
    """From one scale to another: strided convolutions downwards, a 1x1 convolution and repeated pixels upwards."""

    def __init__(self, inputs: int, outputs: int, levels: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.factor = 2 ** max(0, -levels)
        if levels < 0:
            self.net = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), norm(outputs))
            return
        parts: list[nn.Module] = []
        for level in range(levels):
            size = outputs if level == levels - 1 else inputs
            parts += [nn.Conv2d(inputs, size, 3, 2, 1, bias=False), norm(size), nn.ReLU()]
        self.net = nn.Sequential(*parts[:-1])

    def forward(self, z: Tensor) -> Tensor:
        """Up for a negative number of levels, down for a positive one."""
        image: Tensor = self.net(z)
        return image if self.factor == 1 else repeat_pixels(image, self.factor, self.factor)


def all_paths(channels: Sequence[int], norm: Callable[[int], nn.Module]) -> nn.ModuleDict:
    """From every scale to every other one."""
    return nn.ModuleDict({
        f"{source}-{target}": Resized(inputs, outputs, target - source, norm)
        for target, outputs in enumerate(channels)
        for source, inputs in enumerate(channels)
        if source != target
    })  # fmt: skip


def exchange_scales(scales: Sequence[Tensor], paths: nn.ModuleDict) -> list[Tensor]:
    """Every scale as the rectified sum of all of them."""
    totals = []
    for target, total in enumerate(scales):
        for source, part in enumerate(scales):
            if source != target:
                total = total + paths[f"{source}-{target}"](part)
        totals.append(torch.relu(total))
    return totals


class ChannelDropout(nn.Module):
    """Draws which channels of every scale are dropped, once a solve: they are a part of the equilibrium's input."""

    def __init__(self, channels: Sequence[int], share: float) -> None:
        super().__init__()
        self.channels, self.share = channels, share

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """``x``, in training beside a factor for every channel of each scale, ``(B, channels, 1, 1)``."""
        if not self.training or self.share == 0:
            return x
        ones = (x.new_ones(len(x), size, 1, 1) for size in self.channels)
        return x, *(F.dropout(one, self.share) for one in ones)


class MultiscaleStep(nn.Module):
    """``f(z, x)``: a block per scale, then every scale is the sum of all of them, mixed and normalised.

    With a single scale it is the block alone.
    """

    def __init__(self, channels: tuple[int, ...], expansion: int, groups: int, affine: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ScaleBlock(size, expansion, groups) for size in channels)
        several = channels if len(channels) > 1 else ()
        self.paths = all_paths(several, partial(nn.GroupNorm, groups))
        self.mixed = nn.ModuleList(UnitConv2d(size, size, 1) for size in several)
        self.norms = nn.ModuleList(nn.GroupNorm(max(1, groups // 2), size, affine=affine) for size in several)

    def forward(self, z: tuple[Tensor, ...] | Tensor, x: tuple[Tensor, ...] | Tensor) -> tuple[Tensor, ...] | Tensor:
        """The finest scale alone sees x, or its first part; others are the factors of :class:`ChannelDropout`."""
        first, *factors = blocks(x)
        kept: Sequence[Tensor | None] = factors or [None] * len(self.blocks)
        if not isinstance(z, tuple):
            alone: Tensor = self.blocks[0](z, first, kept[0])
            return alone
        inputs: list[Tensor | None] = [first, *[None] * (len(z) - 1)]
        outputs = [block(*each) for block, *each in zip(self.blocks, z, inputs, kept, strict=True)]
        totals = exchange_scales(outputs, self.paths)
        return tuple(norm(mix(total)) for norm, mix, total in zip(self.norms, self.mixed, totals, strict=True))


class Zeros:
    """The first state: zeros, each scale half as large as the one before."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        self.channels = channels

    def __call__(self, given: tuple[Tensor, ...] | Tensor) -> tuple[Tensor, ...] | Tensor:
        """For an input ``(B, c, h, w)``, or one that begins with it."""
        x = blocks(given)[0]
        height, width = x.shape[2:]
        factor = 2 ** (len(self.channels) - 1)
        if height % factor or width % factor:
            raise ValueError(f"{len(self.channels)} scales need sides that {factor} divides; got {height} x {width}")
        layout = torch.channels_last if is_channels_last(x) else torch.contiguous_format
        parts = [
            x.new_zeros(len(x), size, height >> level, width >> level).contiguous(memory_format=layout)
            for level, size in enumerate(self.channels)
        ]
        return tuple(parts) if len(parts) > 1 else parts[0]


class MultiscaleHead(nn.Module):
    """A bottleneck block per scale, summed from fine to coarse, a 1x1 convolution, the mean, a linear layer."""

    def __init__(
        self, channels: Sequence[int], heads: Sequence[int], last: int, dropout: float, num_classes: int
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Bottleneck(size, width, 1) for size, width in zip(channels, heads, strict=True))
        self.down = nn.ModuleList(normalised_conv(4 * fine, 4 * coarse, stride=2) for fine, coarse in pairwise(heads))
        self.mixed = normalised_conv(4 * heads[-1], last, 1)
        self.dropout = nn.Dropout(dropout)
        self.linear = last_layer(last, num_classes)

    def embed(self, features: tuple[Tensor, ...] | Tensor) -> Tensor:
        """The input of the linear layer."""
        parts = features if isinstance(features, tuple) else (features,)
        outputs = [block(part) for block, part in zip(self.blocks, parts, strict=True)]
        total = outputs[0]
        for step, coarser in zip(self.down, outputs[1:], strict=True):
            total = coarser + step(total)
        mixed: Tensor = self.mixed(total)
        return mixed.mean(dim=(2, 3))

    def forward(self, features: tuple[Tensor, ...] | Tensor) -> Tensor:
        """Scores, ``(B, num_classes)``."""
        scores: Tensor = self.linear(self.dropout(self.embed(features)))
        return scores


def build(in_channels: int, num_classes: int, options: MDEQOptions) -> Parts:
    """Two convolutions or more, the equilibrium, and a head that reads all scales."""
    options.prior_in_objective(takes_one=False)
    width, halved = options.hidden[0], options.downsample
    stem: list[nn.Module] = [
        normalised_conv(width if level else in_channels, width, stride=2 if level < halved else 1)
        for level in range(max(2, halved))
    ]
    if halved or len(options.hidden) > 2:
        stem.append(normalised_conv(width, width, 1))
    stem.append(ChannelDropout(options.hidden, options.dropout))
    step = MultiscaleStep(options.hidden, options.expansion, options.groups, options.last_norm_affine)
    layer = options.layer(FixedPoint(step, Zeros(options.hidden)))
    head = MultiscaleHead(options.hidden, options.heads, options.last, 0.0, num_classes)
    return Parts(nn.Sequential(*stem), layer, head)
