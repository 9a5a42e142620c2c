"""Models whose branches, on one scale or several, inhibit each other in one common space."""

from __future__ import annotations

from dataclasses import dataclass

from opteq.models.blocks.parts import Head, Parts, make_injection, make_stem
from opteq.models.checks import number, option, optional, whole
from opteq.models.options import BranchOptions
from opteq.operators import Conv2d
from opteq.problems import Branch, Inhibition


@dataclass(frozen=True, kw_only=True)
class InhibitionOptions(BranchOptions):
    """Options of Inhibition. ``hidden`` are the channels of the states, which are the features, too."""

    m: float = option(0.1, number(0, 1), "strong convexity of the objective")
    common: int = option(64, whole(), "channels of the space in which all branches inhibit each other")
    # Strong convexity needs no bound, and one that is far above |A| would make steps too short.
    bound: float | None = option(None, optional(number()), "largest norm of every A; none lets it grow")


def build(in_channels: int, num_classes: int, options: InhibitionOptions) -> Parts:
    """Stem, equilibrium and head of an Inhibition with branches."""
    options.prior_in_objective(takes_one=False)
    stem = make_stem(in_channels, options, options.scales)
    branches = [
        Branch(
            Conv2d(options.common, size, options.weight_kernel, bound=options.bound),
            make_injection(channels, size, options),
            scale,
        )
        for size, channels, scale in zip(options.hidden, stem.channels, options.scales, strict=True)
    ]
    problem = Inhibition(branches, m=options.m, activation=options.activation)
    return Parts(stem.module, options.layer(problem), Head(options.hidden, num_classes, options))
