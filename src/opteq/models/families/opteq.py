"""The OptEq family: one OptEq layer, or several in a row as Deep OptEq."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from opteq.common.errors import UserError
from opteq.models.blocks.parts import Head, Parts, make_injection, make_stem
from opteq.models.checks import flag, number, one_of, option, optional, wholes
from opteq.models.options import EquilibriumOptions, SolvingOptions
from opteq.operators import Conv2d, Operator
from opteq.problems import DeepOptEq, OptEq, Splitting
from opteq.problems.base import Problem
from opteq.regularizers import Envelope


@dataclass(frozen=True, kw_only=True)
class LayerOptions(SolvingOptions):
    """OptEq layers in a row. ``hidden`` has one value per layer; with one layer it is a plain OptEq."""

    injected: tuple[int, ...] | None = option(
        None, optional(wholes(0, longest=256)), "layers that see the input, from 0; none: all"
    )
    alpha: float = option(0.8, number(0, 1), "weight of a layer's new value against its skip connection; deep only")
    learn_alpha: bool = option(False, flag(), "learn one alpha per layer; deep only")
    start: str = option(
        "zeros", one_of(("zeros", "input")), "where the solver begins: at zeros, or at the stem's output; deep only"
    )
    exact_prior: bool = option(False, flag(), "l1 and ridge as they are, by splitting, not by their envelope")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.injected is not None and max(self.injected) >= len(self.hidden):
            raise UserError(f"injected should name layers 0 to {len(self.hidden) - 1}; got {list(self.injected)}")

    def idle(self) -> dict[str, str]:
        unused = super().idle()
        if len(self.hidden) == 1:
            unused |= dict.fromkeys(("alpha", "learn_alpha"), "on a single layer, which has no skip connection")
            if self.regularizer == "none" or self.solver == "sam":
                unused["exact_prior"] = "without a regularizer in the objective"
        return unused

    def sees_input(self, index: int) -> bool:
        """Whether layer ``index`` has a U."""
        return self.injected is None or index in self.injected


@dataclass(frozen=True, kw_only=True)
class OptEqOptions(LayerOptions, EquilibriumOptions):
    """Options of the OptEq family."""


def build(in_channels: int, num_classes: int, options: OptEqOptions) -> Parts:
    """Stem, equilibrium and head of an OptEq or a Deep OptEq."""
    channels = options.channels
    stem = make_stem(in_channels, options)
    layers = [
        (
            Conv2d(channels, size, options.weight_kernel, bound=options.bound),
            make_injection(stem.channels[0], size, options) if options.sees_input(index) else None,
        )
        for index, size in enumerate(options.hidden)
    ]
    return Parts(stem.module, options.layer(make_problem(layers, options)), Head([channels], num_classes, options))


def make_problem(layers: Sequence[tuple[Operator, nn.Module | None]], options: LayerOptions) -> Problem:
    """OptEq for one layer ``(W, U)``, Deep OptEq for several, with the prior that the options ask for."""
    prior = options.prior_in_objective(takes_one=True)
    weight = options.regularizer_weight
    if len(layers) > 1:
        if options.exact_prior:
            raise UserError("exact_prior belongs to models with one layer; Deep OptEq has no joint objective to add to")
        smooth, gamma = (prior, weight) if prior is not None and prior.smooth else (None, 1.0)
        if prior is not None and not prior.smooth:
            smooth = Envelope(prior, weight)
        return DeepOptEq(
            layers,
            options.alpha,
            options.activation,
            learn_alpha=options.learn_alpha,
            regularizer=smooth,
            gamma=gamma,
            start=options.start,
        )
    if options.start != "zeros":
        raise UserError("start='input' belongs to models with several layers, whose state is that of the features")
    W, U = layers[0]
    if U is None:
        raise UserError("injected should hold 0: the only layer needs the input")
    if prior is None:
        return OptEq(W, U, options.activation)
    if options.exact_prior:
        return Splitting(OptEq(W, U, options.activation), prior, weight)
    if prior.smooth:
        return OptEq(W, U, options.activation, regularizer=prior, gamma=weight)
    return OptEq(W, U, options.activation, regularizer=Envelope(prior, weight))
