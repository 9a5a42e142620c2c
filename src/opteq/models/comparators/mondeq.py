"""monDEQ of one tier or several (Winston and Kolter 2020): a fixed point, average pooling, a linear layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from opteq.models.blocks.parts import Parts, last_layer
from opteq.models.checks import number, one_of, option, whole
from opteq.models.comparators.monotone import SPLITTINGS, MonDEQ
from opteq.models.comparators.monotone_tiers import TieredMonDEQ
from opteq.models.options import SolvingOptions


@dataclass(frozen=True, kw_only=True)
class MonDEQOptions(SolvingOptions):
    """Options of monDEQ; ``hidden`` are the channels of its tiers, each half as large as the one before."""

    m: float = option(0.1, number(0, 1), "strong monotonicity")
    splitting: str = option("peaceman-rachford", one_of(SPLITTINGS), "how the fixed point is found")
    alpha: float = option(1.0, number(), "step length of the splitting")
    cells: int = option(8, whole(), "height and width to which features are averaged before the linear layer")

    def idle(self) -> dict[str, str]:
        fixed = "activation", "bound", "injection_norm"
        return super().idle() | dict.fromkeys(fixed, "on monDEQ, whose steps are as published")


class CellHead(nn.Module):
    """Means over ``cells x cells`` parts of the image, and a linear layer."""

    def __init__(self, channels: int, cells: int, num_classes: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(cells)
        self.linear = last_layer(channels * cells**2, num_classes)

    def embed(self, features: Tensor) -> Tensor:
        """The input of the linear layer."""
        means: Tensor = self.pool(features)
        return means.flatten(1)

    def forward(self, features: Tensor) -> Tensor:
        """Scores, ``(B, num_classes)``."""
        scores: Tensor = self.linear(self.embed(features))
        return scores


def build(in_channels: int, num_classes: int, options: MonDEQOptions) -> Parts:
    """The image itself is the input of the equilibrium: there is no stem. The head sees the last tier."""
    options.prior_in_objective(takes_one=False)
    channels, kernel = options.hidden, options.injection_kernel
    injection = nn.Conv2d(in_channels, channels[0], kernel, padding=kernel // 2)
    rest = injection, options.weight_kernel, options.m, options.splitting, options.alpha
    problem = MonDEQ(channels[0], *rest) if len(channels) == 1 else TieredMonDEQ(channels, *rest)
    return Parts(nn.Identity(), options.layer(problem), CellHead(channels[-1], options.cells, num_classes))
