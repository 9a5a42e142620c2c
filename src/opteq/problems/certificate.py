"""Guarantees about an equilibrium, with the statements that justify them."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)
FIELDS = ("exists", "unique", "contraction", "lipschitz")

_SYMBOLS = {
    "L": "the largest slope of the activation",
    "W": "the linear map of the features",
    "U": "the map of the input",
    "A": "the linear map of the problem",
    "P": "the projection of the kernel",
    "R": "the prior on the features",
    "T": "a step",
    "I": "the identity",
    "D": "the slopes of the activation",
    "C": "the number of channels",
    "k": "a bound of the slope of a step",
    "m": "the strong convexity",
    "s": "the similarity that the objective subtracts",
    "x": "the input",
    "b": "the bias of U",
    "y": "the state",
    "mu": "the number that divides the coupling",
    "sigma": "the activation",
    "alpha": "the weight of a new value",
    "gamma": "the weight of the prior",
    "phi": "what the features minimise without the prior",
    "zeta": "the largest norm of the branches' W",
    "lambda": "the weight of the diversity",
    "rho": "a bound of what resampling between branches stretches",
    "tau": "the smoothing of the diversity",
}
"""Symbols that need a definition; a sentence explains others itself."""


@dataclass(frozen=True)
class SmoothPart:
    """What norms of operators tell of the smooth part g of a problem, and of what is around it.

    Attributes:
        low, high: the Hessian of g lies in ``[low, high]``.
        features: the norm of the map from the state to the features.
        injection: the module from the input to the state, or branches with one each.
    """

    low: float
    high: float
    features: float
    injection: Any


@dataclass(frozen=True)
class Certificate:
    """Guarantees computed from the weights as they are now. ``None`` means unknown, never "no".

    Attributes:
        exists: an equilibrium exists for every input.
        unique: it is the only one, for every input.
        contraction: a bound on the Lipschitz constant of one step; below 1 plain iteration converges at that rate.
        lipschitz: a bound on the Lipschitz constant from the input to the features.
        reasons: for each of the above, the statement that justifies it, or why it is unknown.
    """

    exists: bool | None = None
    unique: bool | None = None
    contraction: float | None = None
    lipschitz: float | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        def line(name: str) -> str:
            value = getattr(self, name)
            shown = "unknown" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
            return f"{name:<12} {shown:<8} {self.reasons.get(name, '')}".rstrip()

        lines = [line(name) for name in FIELDS]
        where = "; ".join(f"{symbol}: {meaning}" for symbol, meaning in self.symbols().items())
        return "\n".join([*lines, f"where {where}"] if where else lines)

    def symbols(self) -> dict[str, str]:
        """The meanings of the symbols in the reasons, but for those that a sentence explains itself."""
        text = " ".join(self.reasons.values()).replace('gamma="auto"', "")
        used = set(re.findall(r"(?<!')\b[A-Za-z]+\b", text))
        return {symbol: meaning for symbol, meaning in _SYMBOLS.items() if symbol in used}


def unknown(why: str) -> Certificate:
    """The certificate that says nothing, and why."""
    return Certificate(reasons=dict.fromkeys(FIELDS, why))


def for_finite_weights(certify: Callable[[M], Certificate]) -> Callable[[M], Certificate]:
    """A ``certificate`` method that says nothing of weights that are not finite, and gives no bound that overflowed.

    Bounds compare numbers, and a NaN compares as if it were small.
    """

    @functools.wraps(certify)
    def certificate(problem: M) -> Certificate:
        for name, weight in itertools.chain(problem.named_parameters(), problem.named_buffers()):
            dense = weight.layout == torch.strided and weight.is_floating_point()  # nothing is claimed of sparse ones
            if dense and not weight.is_meta and not bool(weight.detach().isfinite().all()):
                return unknown(f"{name} has entries that are not finite")
        overflow = "the weights are so large that bounds of what they do overflow"
        try:
            result = certify(problem)
        except ArithmeticError:  # a square that overflows, a division by one that vanishes
            return unknown(overflow)
        if any(math.isnan(bound or 0.0) for bound in (result.contraction, result.lipschitz)):
            return unknown(overflow)
        for name in ("contraction", "lipschitz"):
            if not math.isfinite(getattr(result, name) or 0.0):
                result = replace(result, **{name: None}, reasons={**result.reasons, name: overflow})
        return result

    return certificate


BANACH = "a contraction of a complete space has exactly one fixed point (Banach)"
BROUWER = "a continuous map of a compact convex set into itself has a fixed point (Brouwer): the activation is bounded"


def existence(
    contraction: float | None, bounded: bool, no_brouwer: str = "the activation is unbounded"
) -> tuple[bool | None, bool | None, dict[str, str]]:
    """Existence and uniqueness from a contraction factor and whether the activation's range is bounded.

    ``no_brouwer`` is the reason to give where a continuous map into a compact set is not at hand.
    """
    if contraction is not None and contraction < 1:
        return True, True, {"exists": BANACH, "unique": BANACH}
    shown = "unknown" if contraction is None else f"bounded only by {contraction:.4g}, not below 1"
    no_banach = f"the Lipschitz constant of a step is {shown}"
    if bounded:
        return True, None, {"exists": BROUWER, "unique": no_banach}
    return None, None, {"exists": f"{no_banach}, and {no_brouwer}", "unique": no_banach}
