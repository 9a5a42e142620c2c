"""Kernels of the inner product of input and state: linear, polynomial, sigmoid."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from opteq.common.validate import check_whole
from opteq.kernels.base import HessianProduct, Kernel, Similarity
from opteq.operators import LinearMap
from opteq.states import inner, per_row


class InnerProduct(Kernel):
    """``s(y) = 1/2 |W y|^2 + k(<c, y>)`` for a function k of one number.

    A kernel of this kind is k with its first two derivatives; each takes and returns one value per sample.

    Attributes:
        second_range: an interval that contains all values of ``k''``; None where ``k''`` is unbounded.
        growth: set it to 1 where ``k(t)`` grows no faster than ``|t|``; ``1/2 |W y|^2`` then decides.
    """

    second_range: ClassVar[tuple[float, float] | None] = None

    @abstractmethod
    def value(self, t: Tensor) -> Tensor:
        """``k(t)``."""

    @abstractmethod
    def derivative(self, t: Tensor) -> Tensor:
        """``k'(t)``."""

    @abstractmethod
    def second(self, t: Tensor) -> Tensor:
        """``k''(t)``."""

    def bind(self, W: LinearMap, c: Tensor) -> InnerProductSimilarity:
        return InnerProductSimilarity(self, W, c)


class InnerProductSimilarity(Similarity):
    """A kernel of an inner product with its input bound."""

    def __init__(self, kernel: InnerProduct, W: LinearMap, c: Tensor) -> None:
        super().__init__(W, c)
        self.kernel = kernel

    def value(self, y: Tensor) -> Tensor:
        coupling, given = self.terms(y).values()
        return coupling + given

    def terms(self, y: Tensor) -> dict[str, Tensor]:
        image = self.W(y)
        return {"coupling": inner(image, image) / 2, "input": self.kernel.value(inner(self.c, y))}

    def gradient(self, y: Tensor) -> Tensor:
        """``W'W y + k'(<c, y>) c``."""
        return self.W.adjoint(self.W(y)) + self._times_c(self.kernel.derivative(inner(self.c, y)))

    def hessian_at(self, y: Tensor) -> HessianProduct:
        """``v -> W'W v + k''(<c, y>) c <c, v>``."""
        second = self.kernel.second(inner(self.c, y))
        return lambda v: self.W.adjoint(self.W(v)) + self._times_c(second * inner(self.c, v))

    def curvature_interval(self, square: float | Tensor) -> tuple[Tensor, Tensor] | None:
        """``W'W`` lies in ``[0, |W|^2]``, and ``k'' cc'`` between zero and ``k'' |c|^2``."""
        if self.kernel.second_range is None:
            return None
        low, high = self.kernel.second_range
        with torch.no_grad():
            size = inner(self.c, self.c)
            return min(low, 0.0) * size, square + max(high, 0.0) * size

    def _times_c(self, numbers: Tensor) -> Tensor:
        return per_row(numbers, self.c) * self.c


class Linear(InnerProduct):
    """``s(y) = 1/2 |W y|^2 + <c, y>`` with ``c = U x + b`` in the state's space.

    The step is ``y <- sigma(W'W y + c)``, that of OptEq with the adjoint of W in place of W.

    >>> import torch
    >>> from opteq.operators import Dense
    >>> s = Linear().bind(Dense(3, 2).prepare(), torch.ones(1, 3))
    >>> s.gradient(torch.zeros(1, 3)).detach()
    tensor([[1., 1., 1.]])
    """

    curvature = (0.0, 1.0)
    growth = 1.0
    second_range = (0.0, 0.0)

    def value(self, t: Tensor) -> Tensor:
        return t

    def derivative(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def second(self, t: Tensor) -> Tensor:
        return torch.zeros_like(t)

    def input_gain(self, norm: float, slope: float) -> tuple[float | None, str]:
        """``L / (1 - L |W|^2)``, from ``(I - D W'W)^-1 D``."""
        rest = 1 - slope * norm**2
        if rest <= 0:
            return None, "needs a contraction"
        return slope / rest, "|U| L / (1 - L |W|^2), from (I - D W'W)^-1 D U"


class Polynomial(InnerProduct):
    """``s(y) = 1/2 |W y|^2 + <c, y>^degree`` with ``c = U x + b`` in the state's space.

    The power outgrows ``1/2 |y|^2``, so with an unbounded activation the objective may have no minimiser: over
    ``y >= 0`` it is unbounded below for degree 3 and more as soon as c has a positive entry, and for degree 2 if
    ``2 |c+|^2 + |W c+|^2 / |c+|^2 > 1``, where c+ is the positive part of c. Iteration may then blow up. With a
    bounded activation, tanh for instance, there is an equilibrium for every input.

    Solvers start at c and not at zero: where ``sigma(0) = 0``, zero is a trivial equilibrium for every input.

    Args:
        degree: a whole number of at least 2; degree 1 is :class:`~opteq.kernels.inner_product.Linear`.

    >>> import torch
    >>> Polynomial(3).derivative(torch.tensor([2.0]))
    tensor([12.])
    """

    caveat = (
        "the objective of a polynomial kernel may have no minimiser: over y >= 0 it is unbounded below for degree 3 "
        "and more if c = U x + b has a positive entry, and for degree 2 if 2 |c+|^2 + |W c+|^2 / |c+|^2 > 1. "
        "Zero is a fixed point where sigma(0) = 0, but not one that depends on the input"
    )

    def __init__(self, degree: int) -> None:
        super().__init__()
        self.degree = check_whole("Polynomial.degree (1 is opteq.kernels.Linear())", degree, 2)

    def start(self, W: LinearMap, c: Tensor) -> Tensor:
        return self.state_like(W, c)

    def value(self, t: Tensor) -> Tensor:
        return t**self.degree

    def derivative(self, t: Tensor) -> Tensor:
        return self.degree * t ** (self.degree - 1)

    def second(self, t: Tensor) -> Tensor:
        return self.degree * (self.degree - 1) * t ** (self.degree - 2)

    def extra_repr(self) -> str:
        return f"degree={self.degree}"


class Sigmoid(InnerProduct):
    """``s(y) = 1/2 |W y|^2 + tanh <c, y>`` with ``c = U x + b`` in the state's space.

    tanh is bounded, so the objective has a minimiser wherever ``L |W|^2 < 1``, with L the largest slope of the
    activation. It is the only one for inputs that are not too large: the curvature of ``tanh <c, y>`` is at most
    ``4 / sqrt(27) |c|^2``, hence uniqueness for ``L (|W|^2 + 0.77 |c|^2) < 1``.

    Where it is not, solvers are damped by each sample's own ``|c|^2``.

    >>> Sigmoid().derivative(torch.tensor([0.0]))
    tensor([1.])
    """

    growth = 1.0
    second_range = (-4 / math.sqrt(27), 4 / math.sqrt(27))
    caveat = (
        "the curvature of tanh <c, y> grows with |c|^2, c = U x + b. With L the largest slope of the activation, the "
        "objective has a minimiser where L |W|^2 < 1 and may have none otherwise; it is unique, and a step contracts, "
        "for inputs with L (|W|^2 + 4 / sqrt(27) |c|^2) < 1"
    )

    def value(self, t: Tensor) -> Tensor:
        return torch.tanh(t)

    def derivative(self, t: Tensor) -> Tensor:
        return 1 - torch.tanh(t).square()

    def second(self, t: Tensor) -> Tensor:
        height = torch.tanh(t)
        return -2 * height * (1 - height.square())
