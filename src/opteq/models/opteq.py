"""The OptEq family: one OptEq layer, or several in a row as Deep OptEq."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from opteq._errors import UserError
from opteq.models.checks import flag, number, option, optional, wholes
from opteq.models.options import EquilibriumOptions
from opteq.models.parts import Head, Parts, make_injection, make_stem
from opteq.operators import Conv2d
from opteq.problems import DeepOptEq, OptEq, Splitting
from opteq.problems.base import Problem
from opteq.regularizers import Envelope


@dataclass(frozen=True, kw_only=True)
class OptEqOptions(EquilibriumOptions):
    """Options of the OptEq family. ``hidden`` has one number a layer; with one layer it is a plain OptEq."""

    injected: tuple[int, ...] | None = option(None, optional(wholes(0)), "layers that see the input, from 0; none: all")
    alpha: float = option(0.8, number(0, 1), "weight of a layer's new value against its skip connection; deep only")
    learn_alpha: bool = option(False, flag(), "learn one alpha a layer; deep only")
    exact_prior: bool = option(False, flag(), "l1 and ridge as they are, by splitting, not by their envelope")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.injected is not None and max(self.injected) >= len(self.hidden):
            raise UserError(f"injected should name layers 0 to {len(self.hidden) - 1}; got {list(self.injected)}")


def build(in_channels: int, num_classes: int, options: OptEqOptions) -> Parts:
    """Stem, equilibrium and head of an OptEq or a Deep OptEq."""
    return Parts(
        make_stem(in_channels, options),
        options.layer(_problem(options)),
        Head([options.channels], num_classes, options),
    )


def _problem(options: OptEqOptions) -> Problem:
    channels, count = options.channels, len(options.hidden)
    injected = range(count) if options.injected is None else options.injected
    layers: list[tuple[Conv2d, nn.Module | None]] = [
        (
            Conv2d(channels, size, 3, bound=options.bound),
            make_injection(channels, size, options.injection_norm) if index in injected else None,
        )
        for index, size in enumerate(options.hidden)
    ]
    prior = options.prior_in_objective(takes_one=True)
    weight = options.regularizer_weight
    if count > 1:
        if options.exact_prior:
            raise UserError("exact_prior belongs to models with one layer; Deep OptEq has no joint objective to add to")
        smooth, gamma = (prior, weight) if prior is None or prior.smooth else (Envelope(prior, weight), 1.0)
        return DeepOptEq(
            layers,
            options.alpha,
            options.activation,
            learn_alpha=options.learn_alpha,
            regularizer=smooth,
            gamma=gamma,
        )
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
