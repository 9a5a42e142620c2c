"""The base class of penalties: a function f and its activation sigma = prox_f, as one object."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from opteq.common.options import NamedOptions
from opteq.states import sum_over_sample, working_dtype


@dataclass(frozen=True)
class Linearised:
    """The derivative ``D = F F'`` of a prox at one point: a factor ``F``, its adjoint, and D itself.

    A Jacobian ``D M`` with symmetric M has the spectrum of the symmetric ``F' M F``, so conjugate gradients can solve
    the backward system; for this the factor is kept and not only D.
    """

    factor: Callable[[Tensor], Tensor]
    factor_adjoint: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


def multiplication(slope: Tensor) -> Linearised:
    """The derivative of a prox that acts on each entry alone: multiplication by its slopes."""
    # The square root has no derivative at a slope that underflowed to 0, and no value at one rounded below 0.
    positive = slope > 0
    root = torch.where(positive, torch.where(positive, slope, 1.0).sqrt(), 0.0)

    def scale(v: Tensor) -> Tensor:
        return root * v

    return Linearised(factor=scale, factor_adjoint=scale, derivative=lambda v: slope * v)


def of_its_prox(penalty: Penalty, name: str) -> Any:
    """An attribute that describes sigma; None where it is one of a base class, whose sigma is another one."""
    holder, prox = (next(kind for kind in type(penalty).__mro__ if one in vars(kind)) for one in (name, "prox"))
    return getattr(penalty, name) if name in vars(penalty) or issubclass(holder, prox) else None


class Penalty(metaclass=NamedOptions):
    """A penalty f together with its activation ``sigma = prox_f``. Tensors have the batch first: ``(B, ...)``.

    Attributes:
        name: how the penalty is called in :func:`get` and in reports.
        lipschitz: the largest slope of sigma; above 1, f is only weakly convex (``f + y^2/2`` always is convex).
        bounded: whether sigma has a bounded range, in which case Brouwer's theorem gives an equilibrium.
        offset: the k in ``sigma~*(y) = f(y) + y^2/2 - k``, which ties f to the conjugate of the antiderivative
            sigma~; it is ``f(sigma(0)) + sigma(0)^2/2``, one per unit, and matters when values are compared.
        degree: 0 where f is a constraint (0 or infinite), 1 where it grows like a norm (``f(t y) = t f(y)`` for t > 0),
            None otherwise. It gives the prox of ``t f``, which an :class:`~opteq.Objective` needs for every step length
            t, without a search. A penalty that mixes entries has to declare it there.
        has_total: whether :meth:`total` can be computed; otherwise solvers do not use the objective.
        has_potential: whether :meth:`potential` can be computed.
    """

    name: str
    lipschitz: float
    bounded: bool = False
    offset: float
    degree: int | None = None
    has_total: bool = True
    has_potential: bool = True

    @abstractmethod
    def prox(self, t: Tensor) -> Tensor:
        """``sigma(t)``, in the shape and dtype of t."""

    @abstractmethod
    def total(self, y: Tensor) -> Tensor:
        """The penalty of each sample, ``(B,)``, +inf outside the domain; in float32 or better for every dtype."""

    def potential(self, t: Tensor) -> Tensor:
        """The function whose gradient is sigma and that is 0 at 0, one value per sample; in float32 or better."""
        raise NotImplementedError(f"penalty {self.name!r} defines no potential(t); set has_potential = False")

    @abstractmethod
    def linearise(self, t: Tensor) -> Linearised:
        """The derivative of the prox at t, computed once for many products."""

    def project(self, y: Tensor) -> Tensor:
        """The nearest point at which the penalty is finite; y itself where it is finite everywhere."""
        return self.prox(y) if of_its_prox(self, "degree") == 0 else y

    def distance_to_kink(self, t: Tensor) -> Tensor | None:  # noqa: ARG002
        """How far each entry is from a kink of a piecewise linear sigma; None where sigma is not piecewise linear."""
        return None


class ElementwisePenalty(Penalty):
    """A penalty that is a sum over entries, ``sum_i f(y_i)``: its activation acts on each entry alone.

    Low precision: ``prox`` and ``derivative`` keep the dtype; ``value`` and ``antiderivative`` return float32 for
    bfloat16 and float16, whose squares and logarithms would overflow or vanish.

    To write one: ``prox``, ``derivative``, ``_antiderivative`` and ``_value``, the attributes of :class:`Penalty`, and
    ``domain`` where f is infinite somewhere. For an activation without these formulas, see :class:`FromActivation`.
    """

    offset = 0.0  # as for most activations

    kinks: tuple[float, ...] | None = None
    """Where a piecewise linear sigma changes its slope; None where sigma is not piecewise linear."""

    domain: tuple[float, float] = (-math.inf, math.inf)
    """The ends of the interval on which f is finite."""

    def distance_to_kink(self, t: Tensor) -> Tensor | None:
        """The distance of each entry to the nearest of the :attr:`kinks`, infinite where there is none."""
        kinks = of_its_prox(self, "kinks")
        if kinks is None:
            return None
        nearest = torch.full_like(t, math.inf)
        for kink in kinks:
            nearest = torch.minimum(nearest, (t - kink).abs())
        return nearest

    @abstractmethod
    def derivative(self, t: Tensor) -> Tensor:
        """``sigma'(t)``; at a kink, what torch returns (0 for relu at 0)."""

    def antiderivative(self, t: Tensor) -> Tensor:
        """``sigma~(t)``, the integral of sigma from 0 to t, entry by entry."""
        return self._antiderivative(t.to(working_dtype(t.dtype)))

    def value(self, y: Tensor) -> Tensor:
        """``f(y)`` entry by entry, +inf outside the domain."""
        outside = self._outside(y)
        if outside is None:
            return self._value(y.to(working_dtype(y.dtype)))
        # 0 lies in every domain here: the formula is never evaluated, nor differentiated, where it is not real.
        inside = torch.where(outside, 0.0, y).to(working_dtype(y.dtype))
        return torch.where(outside, math.inf, self._value(inside))

    def total(self, y: Tensor) -> Tensor:
        return sum_over_sample(self.value(y))

    def potential(self, t: Tensor) -> Tensor:
        return sum_over_sample(self.antiderivative(t))

    def project(self, y: Tensor) -> Tensor:
        """Y clamped to the domain, which is an interval."""
        low, high = self.domain
        if math.isinf(low) and math.isinf(high):
            return y
        return y.clamp(None if math.isinf(low) else low, None if math.isinf(high) else high)

    def linearise(self, t: Tensor) -> Linearised:
        """Multiplication by ``sqrt(sigma'(t))``, which is its own adjoint."""
        return multiplication(self.derivative(t))

    @abstractmethod
    def _antiderivative(self, t: Tensor) -> Tensor:
        """``sigma~(t)`` for t in float32 or float64."""

    @abstractmethod
    def _value(self, y: Tensor) -> Tensor:
        """``f(y)`` for y of the domain, in float32 or float64."""

    def _outside(self, y: Tensor) -> Tensor | None:
        """Where y is outside the domain of f; None where f is finite everywhere. A NaN is not outside."""
        low, high = self.domain
        # The ends as rounded in y's own dtype, for that is what sigma(-inf) gives: -0.8 is -0.80078 in bfloat16.
        sides = [] if math.isinf(low) else [y < y.new_full((), low)]
        sides += [] if math.isinf(high) else [y > y.new_full((), high)]
        return reduce(torch.logical_or, sides) if sides else None
