"""The meanings of symbols in sentences about problems."""

from __future__ import annotations

import re

SYMBOLS = {
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


def symbols_in(text: str) -> dict[str, str]:
    """The symbols that occur in a text, with what they mean.

    >>> symbols_in("L |W|^2 / mu, the activation's slope")["mu"]
    'the number that divides the coupling'
    """
    used = set(re.findall(r"(?<!')\b[A-Za-z]+\b", text.replace('gamma="auto"', "")))
    return {symbol: meaning for symbol, meaning in SYMBOLS.items() if symbol in used}
