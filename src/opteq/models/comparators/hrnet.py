"""HRNet (Wang et al. 2019): branches at several resolutions that exchange their features again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from opteq.common.errors import UserError
from opteq.models.blocks.parts import Parts
from opteq.models.blocks.residual import ResidualBlock, normalised_conv
from opteq.models.checks import number, option, whole, wholes
from opteq.models.comparators.mdeq import MultiscaleHead, all_paths, exchange_scales
from opteq.models.comparators.residual_networks import Bottleneck
from opteq.models.options import Options


@dataclass(frozen=True, kw_only=True)
class HRNetOptions(Options):
    """Options of HRNet; ``hidden`` are the channels of its resolutions, each half as large as the one before."""

    hidden: tuple[int, ...] = option((18, 36, 72, 144), wholes(longest=8), "channels of each resolution")
    modules: tuple[int, ...] = option((1, 4, 3), wholes(longest=8), "exchanges of the stages with 2, 3, ... branches")
    depth: int = option(4, whole(most=256), "residual blocks of each branch before an exchange")
    first_width: int = option(64, whole(), "a fourth of the channels of the bottleneck blocks before any branch")
    first_depth: int = option(4, whole(most=256), "how many of them")
    heads: tuple[int, ...] = option((32, 64, 128, 256), wholes(), "a fourth of the output channels of each branch")
    last: int = option(2048, whole(), "channels before the linear layer")
    dropout: float = option(0.0, number(0, 0.99, open_below=False), "share of features dropped before the last layer")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.heads) != len(self.hidden):
            raise UserError(f"heads and hidden should have one value per branch; got {self.heads} and {self.hidden}")
        if len(self.modules) != len(self.hidden) - 1:
            raise UserError(
                f"modules should have one value for each of {len(self.hidden) - 1} stages with two branches or more; "
                f"got {list(self.modules)}"
            )


class Exchange(nn.Module):
    """Residual blocks on every branch, then every branch becomes the rectified sum of all of them."""

    def __init__(self, channels: Sequence[int], depth: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(size, size) for _ in range(depth))) for size in channels
        )
        self.paths = all_paths(channels, nn.BatchNorm2d)

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        """One image per branch."""
        return exchange_scales(
            [branch(part) for branch, part in zip(self.branches, features, strict=True)], self.paths
        )  # fmt: skip


class HighResolution(nn.Module):
    """Bottleneck blocks, and stages with two branches, three, and so on; a stage begins a branch half as large."""

    def __init__(self, inputs: int, options: HRNetOptions) -> None:
        super().__init__()
        wide = 4 * options.first_width
        blocks = [Bottleneck(inputs, options.first_width, 1)]
        blocks += [Bottleneck(wide, options.first_width, 1) for _ in range(options.first_depth - 1)]
        self.first = nn.Sequential(*blocks)
        self.finest = normalised_conv(wide, options.hidden[0])
        coarser = [wide, *options.hidden[1:-1]]
        self.begin = nn.ModuleList(
            normalised_conv(a, b, stride=2) for a, b in zip(coarser, options.hidden[1:], strict=True)
        )
        self.stages = nn.ModuleList(
            nn.ModuleList(Exchange(options.hidden[: 2 + stage], options.depth) for _ in range(count))
            for stage, count in enumerate(options.modules)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """``(B, inputs, h, w)`` to one image per branch, the first with h and w."""
        wide = self.first(x)
        features = [self.finest(wide)]
        for stage, (begin, exchanges) in enumerate(zip(self.begin, self.stages, strict=True)):
            features = [*features, begin(wide if stage == 0 else features[-1])]
            for exchange in exchanges:  # type: ignore[attr-defined]
                features = exchange(features)
        return tuple(features)


def build(in_channels: int, num_classes: int, options: HRNetOptions) -> Parts:
    """Two convolutions that halve, the branches, and a head that reads all of them."""
    stem = nn.Sequential(normalised_conv(in_channels, 64, stride=2), normalised_conv(64, 64, stride=2))
    head = MultiscaleHead(options.hidden, options.heads, options.last, options.dropout, num_classes)
    return Parts(stem, HighResolution(64, options), head)
