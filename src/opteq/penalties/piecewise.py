"""Penalties with piecewise linear activations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from opteq.common import validate as _validate
from opteq.penalties.base import ElementwisePenalty, Linearised


@dataclass(frozen=True)
class Identity(ElementwisePenalty):
    """``sigma(t) = t``; ``f(y) = 0``. No penalty at all: a linear layer.

    >>> Identity().prox(torch.tensor([-1.0, 2.0]))
    tensor([-1.,  2.])
    """

    name = "identity"
    lipschitz = 1.0
    degree = 0
    kinks = ()

    def prox(self, t: Tensor) -> Tensor:
        return t

    def derivative(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def _antiderivative(self, t: Tensor) -> Tensor:
        return t.square() / 2

    def _value(self, y: Tensor) -> Tensor:
        return _zero(y)


@dataclass(frozen=True)
class ReLU(ElementwisePenalty):
    """``sigma(t) = max(t, 0)``; ``f(y) = 0`` for y >= 0: the constraint that a state is not negative.

    >>> ReLU().value(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([inf, 0., 0.])
    """

    name = "relu"
    lipschitz = 1.0
    degree = 0
    kinks = (0.0,)
    domain = (0.0, math.inf)

    def prox(self, t: Tensor) -> Tensor:
        return F.relu(t)

    def derivative(self, t: Tensor) -> Tensor:
        return (t > 0).to(t.dtype)

    def linearise(self, t: Tensor) -> Linearised:
        if type(self) is not ReLU:  # its slopes may be others
            return super().linearise(t)
        slope = self.derivative(t)

        def scale(v: Tensor) -> Tensor:
            return slope * v

        return Linearised(scale, scale, scale)  # 0 and 1 are their own roots

    def _antiderivative(self, t: Tensor) -> Tensor:
        return F.relu(t).square() / 2

    def _value(self, y: Tensor) -> Tensor:
        return _zero(y)


@dataclass(frozen=True)
class LeakyReLU(ElementwisePenalty):
    """``sigma(t) = t (t > 0), slope t (t <= 0)``; ``f(y) = 0 (y >= 0), (1/slope - 1) y^2/2 (y < 0)``.

    The softened constraint of :class:`ReLU`. The default slope, 0.01, is that of torch.

    >>> LeakyReLU(slope=0.1).value(torch.tensor([-2.0, 1.0]))
    tensor([18.,  0.])
    """

    slope: float = 0.01

    name = "leaky_relu"
    lipschitz = 1.0

    def __post_init__(self) -> None:
        _validate.share(self, "slope")

    kinks = (0.0,)

    def prox(self, t: Tensor) -> Tensor:
        return F.leaky_relu(t, self.slope)

    def derivative(self, t: Tensor) -> Tensor:
        return torch.where(t > 0, torch.ones_like(t), self.slope)

    def _antiderivative(self, t: Tensor) -> Tensor:
        return t * self.prox(t) / 2

    def _value(self, y: Tensor) -> Tensor:
        return (1 / self.slope - 1) / 2 * y.clamp(max=0).square()


@dataclass(frozen=True)
class SoftThreshold(ElementwisePenalty):
    """``sigma(t) = sign(t) max(|t| - threshold, 0)``; ``f(y) = threshold |y|``: a sparse state.

    The default, 0.1, sets a unit to zero if its pre-activation is below a tenth of the usual scale of 1. A threshold of
    0 is the identity.

    >>> SoftThreshold(threshold=1.0).prox(torch.tensor([-3.0, 0.5]))
    tensor([-2.,  0.])
    """

    threshold: float = 0.1

    name = "soft_threshold"
    lipschitz = 1.0
    degree = 1

    def __post_init__(self) -> None:
        _validate.not_negative(self, "threshold")

    @property
    def kinks(self) -> tuple[float, ...]:  # type: ignore[override]
        return (-self.threshold, self.threshold) if self.threshold else ()

    def prox(self, t: Tensor) -> Tensor:
        # Not F.softshrink: on Apple's devices it turned a NaN into 0 until 2026 (pytorch pull request 183710).
        return t - t.clamp(-self.threshold, self.threshold) if self.threshold else t

    def derivative(self, t: Tensor) -> Tensor:
        return (t.abs() > self.threshold).to(t.dtype) if self.threshold else torch.ones_like(t)

    def _antiderivative(self, t: Tensor) -> Tensor:
        return self.prox(t).square() / 2

    def _value(self, y: Tensor) -> Tensor:
        return self.threshold * y.abs() if self.threshold else _zero(y)


@dataclass(frozen=True)
class HardTanh(ElementwisePenalty):
    """``sigma(t) = min(max(t, -1), 1)``; ``f(y) = 0`` for ``|y| <= 1``: the constraint to a box.

    >>> HardTanh().prox(torch.tensor([-3.0, 0.5]))
    tensor([-1.0000,  0.5000])
    """

    name = "hardtanh"
    lipschitz = 1.0
    degree = 0
    bounded = True
    kinks = (-1.0, 1.0)
    domain = (-1.0, 1.0)

    def prox(self, t: Tensor) -> Tensor:
        return F.hardtanh(t)

    def derivative(self, t: Tensor) -> Tensor:
        return (t.abs() < 1).to(t.dtype)

    def _antiderivative(self, t: Tensor) -> Tensor:
        clipped = F.hardtanh(t)
        return clipped * (t - clipped / 2)

    def _value(self, y: Tensor) -> Tensor:
        return _zero(y)


def _zero(y: Tensor) -> Tensor:
    """0 with y in its graph, so that the derivative of a constant can be asked for; a NaN stays one."""
    return torch.where(y.isnan(), y, 0.0)
