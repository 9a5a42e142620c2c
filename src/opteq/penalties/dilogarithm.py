"""The dilogarithm, which the penalty of softplus is made of."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
_SERIES = tuple(b / math.factorial(2 * k + 3) for k, b in enumerate(_BERNOULLI))


def dilogarithm(x: Tensor, complement: Tensor | None = None) -> Tensor:
    """``Li2(x) = sum_k x^k / k^2`` for x in [-1, 1]; ``complement`` is 1 - x, where it is known to more digits than x.

    With ``u = -ln(1-x)``, ``Li2(x) = u - u^2/4 + sum_k B_2k u^(2k+1)/(2k+1)!``, whose terms fall by a factor
    (u/2 pi)^2: eight of them reach float64 rounding for x in [-1, 1/2], where |u| <= ln 2. Above 1/2 the reflection
    ``Li2(x) = pi^2/6 - ln(x) ln(1-x) - Li2(1-x)`` leads there. Near x = 1 the derivative is -ln(1-x), which needs
    1 - x and not x.
    """
    rest = 1 - x if complement is None else complement
    reflected = x > 0.5
    u = -torch.log1p(-torch.where(reflected, rest, x))
    squared = u.square()
    series = torch.zeros_like(u)
    for coefficient in reversed(_SERIES):
        series = (series + coefficient) * squared
    small = u * (1 + series) - squared / 4
    # In the reflection u is -ln(x).
    return torch.where(reflected, math.pi**2 / 6 + u * rest.clamp(min=torch.finfo(x.dtype).tiny).log() - small, small)
