"""Penalties with smooth activations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from opteq.common import validate as _validate
from opteq.penalties.base import ElementwisePenalty


@dataclass(frozen=True)
class Tanh(ElementwisePenalty):
    """``sigma(t) = tanh t``; ``f(y) = ((1+y) ln(1+y) + (1-y) ln(1-y) - y^2)/2`` for ``|y| <= 1``.

    >>> Tanh().value(torch.tensor([0.5, 1.0, 1.5]))
    tensor([0.0058, 0.1931,    inf])
    """

    name = "tanh"
    lipschitz = 1.0
    bounded = True
    domain = (-1.0, 1.0)

    def prox(self, t: Tensor) -> Tensor:
        return torch.tanh(t)

    def derivative(self, t: Tensor) -> Tensor:
        # 1 - tanh^2 without the subtraction, which loses every digit for large t.
        return 4 * torch.sigmoid(2 * t) * torch.sigmoid(-2 * t)

    def _antiderivative(self, t: Tensor) -> Tensor:
        # ln cosh t
        size = _magnitude(t)
        return size + torch.log1p(torch.expm1(-2 * size) / 2)

    def _value(self, y: Tensor) -> Tensor:
        return (_negative_entropy(y) + _negative_entropy(-y) - y.square()) / 2


@dataclass(frozen=True)
class Sigmoid(ElementwisePenalty):
    """``sigma(t) = 1/(1 + e^-t)``; ``f(y) = y ln y + (1-y) ln(1-y) - y^2/2`` for 0 <= y <= 1.

    >>> Sigmoid().value(torch.tensor([0.5, 1.5]))
    tensor([-0.8181,     inf])
    """

    name = "sigmoid"
    lipschitz = 0.25
    bounded = True
    offset = -math.log(2)
    domain = (0.0, 1.0)

    def prox(self, t: Tensor) -> Tensor:
        return torch.sigmoid(t)

    def derivative(self, t: Tensor) -> Tensor:
        # sigma(t) (1 - sigma(t)) without the subtraction, which loses every digit for large t.
        return torch.sigmoid(t) * torch.sigmoid(-t)

    def _antiderivative(self, t: Tensor) -> Tensor:
        # softplus(t) - ln 2, without the error of ln 2 near 0
        return F.relu(t) + torch.log1p(torch.expm1(-_magnitude(t)) / 2)

    def _value(self, y: Tensor) -> Tensor:
        y_log_y = y * y.clamp(min=torch.finfo(y.dtype).tiny).log()
        return y_log_y + _negative_entropy(-y) - y.square() / 2


@dataclass(frozen=True)
class Softplus(ElementwisePenalty):
    """``sigma(t) = ln(1 + e^t)``; ``f(y) = Li2(e^-y)`` for y >= 0, with the dilogarithm Li2.

    >>> Softplus().value(torch.tensor([1.0], dtype=torch.float64))
    tensor([0.4088], dtype=torch.float64)
    """

    name = "softplus"
    lipschitz = 1.0
    offset = math.pi**2 / 12
    domain = (0.0, math.inf)

    def prox(self, t: Tensor) -> Tensor:
        # torch replaces softplus by t above a threshold. At its default of 20 that is a step down of 2e-9, which
        # float64 sees; at 40 it is below rounding.
        return F.softplus(t, threshold=40.0)

    def derivative(self, t: Tensor) -> Tensor:
        return torch.sigmoid(t)

    def _antiderivative(self, t: Tensor) -> Tensor:
        # -Li2(-e^t) - pi^2/12. For t > 0 its inversion formula, since e^t overflows.
        tail = math.pi**2 / 12 + dilogarithm(-torch.exp(-_magnitude(t)))
        return F.relu(t).square() / 2 + torch.where(t > 0, tail, -tail)

    def _value(self, y: Tensor) -> Tensor:
        return dilogarithm(torch.exp(-y), complement=-torch.expm1(-y))


@dataclass(frozen=True)
class ELU(ElementwisePenalty):
    """``sigma(t) = t (t > 0), a(e^t - 1) (t <= 0)``; ``f(y) = 0 (y >= 0), (a+y) ln(1+y/a) - y - y^2/2 (y < 0)``.

    The domain is y >= -a. With alpha = a = 1, the default, sigma has no kink; above 1 its slope nears a below 0.

    >>> ELU(alpha=0.7).value(torch.tensor([-0.3])), ELU(alpha=2.0).lipschitz
    (tensor([0.0312]), 2.0)
    """

    alpha: float = 1.0

    name = "elu"

    def __post_init__(self) -> None:
        _validate.positive(self, "alpha")

    @property
    def lipschitz(self) -> float:  # type: ignore[override]  # computed, and never assigned
        return max(1.0, float(self.alpha))

    @property
    def domain(self) -> tuple[float, float]:  # type: ignore[override]
        return -self.alpha, math.inf

    def prox(self, t: Tensor) -> Tensor:
        return F.elu(t, self.alpha)

    def derivative(self, t: Tensor) -> Tensor:
        return torch.where(t > 0, 1.0, self.alpha * torch.exp(t.clamp(max=0)))

    def _antiderivative(self, t: Tensor) -> Tensor:
        below = t.clamp(max=0)
        return F.relu(t).square() / 2 + self.alpha * (torch.expm1(below) - below)

    def _value(self, y: Tensor) -> Tensor:
        below = y.clamp(max=0)
        return self.alpha * _negative_entropy(below / self.alpha) - below - below.square() / 2


@dataclass(frozen=True)
class Softsign(ElementwisePenalty):
    """``sigma(t) = t/(1 + |t|)``; ``f(y) = -|y| - ln(1 - |y|) - y^2/2`` for ``|y| < 1``.

    >>> Softsign().prox(torch.tensor([-1.0, 3.0]))
    tensor([-0.5000,  0.7500])
    """

    name = "softsign"
    lipschitz = 1.0
    bounded = True
    domain = (-1.0, 1.0)

    def prox(self, t: Tensor) -> Tensor:
        # f is infinite at 1, which the quotient reaches by rounding: a saturated unit stays one float below.
        edge = 1 - torch.finfo(t.dtype).eps / 2
        y = F.softsign(t)
        return y - (y - y.clamp(-edge, edge)).detach()  # the derivative of a clamp would be 0 also for a NaN

    def derivative(self, t: Tensor) -> Tensor:
        return (1 + t.abs()).reciprocal().square()

    def _antiderivative(self, t: Tensor) -> Tensor:
        size = _magnitude(t)
        return size - torch.log1p(size)

    def _value(self, y: Tensor) -> Tensor:
        size = _magnitude(y)
        return -size - torch.log1p(-size) - y.square() / 2

    def _outside(self, y: Tensor) -> Tensor:
        return y.abs() >= 1

    def project(self, y: Tensor) -> Tensor:
        """Just inside the open interval: f is infinite at its ends."""
        edge = 1 - torch.finfo(y.dtype).eps / 2
        return y.clamp(-edge, edge)


def _magnitude(t: Tensor) -> Tensor:
    """``|t|`` with derivative -1 at 0. torch's is 0 there, and second derivatives of even functions vanish with it."""
    return torch.where(t > 0, t, -t)


def _negative_entropy(u: Tensor) -> Tensor:
    """``(1+u) ln(1+u)`` for u >= -1, with 0 ln 0 = 0; the logarithm at -1 is that of the next float above."""
    logarithm = torch.log1p(u.clamp(min=torch.finfo(u.dtype).eps / 2 - 1))
    return (1 + u).clamp(min=0) * logarithm


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
