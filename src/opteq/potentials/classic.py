"""Potentials of robust statistics, each with ``psi''(0) = 1`` and a known range of curvature."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opteq.potentials.base import Curve, Potential

_LEAST_OF_GAUSSIAN = -2 * math.exp(-1.5)


class _Classic(Potential):
    """A potential without parameters other than its scale."""

    _curve: Curve
    _range: tuple[float, float]

    def prepare(self) -> Curve:
        return self._curve

    def curvature(self) -> tuple[Tensor, Tensor]:
        low, high = self._range
        return self.log_scale.new_tensor(low), self.log_scale.new_tensor(high)

    @property
    def convex(self) -> bool:
        return self._range[0] >= 0


class HuberCurve(Curve):
    """``u^2/2`` where ``|u| <= 1``, ``|u| - 1/2`` outside."""

    def value(self, u: Tensor) -> Tensor:
        inside = u.clamp(-1, 1)
        return inside * (u - inside / 2)

    def derivative(self, u: Tensor) -> Tensor:
        return u.clamp(-1, 1)

    def second(self, u: Tensor) -> Tensor:
        return torch.where(u.isnan(), u, (u.abs() < 1).to(u.dtype))


class GaussianCurve(Curve):
    """``1 - exp(-u^2/2)``."""

    def value(self, u: Tensor) -> Tensor:
        return -torch.expm1(-u.square() / 2)

    def derivative(self, u: Tensor) -> Tensor:
        return u * torch.exp(-u.square() / 2)

    def second(self, u: Tensor) -> Tensor:
        square = u.square()
        return (1 - square) * torch.exp(-square / 2)


class StudentCurve(Curve):
    """``log(1 + u^2) / 2``."""

    def value(self, u: Tensor) -> Tensor:
        return torch.log1p(u.square()) / 2

    def derivative(self, u: Tensor) -> Tensor:
        return u / (1 + u.square())

    def second(self, u: Tensor) -> Tensor:
        near = 1 / (1 + u.square())
        return near * (2 * near - 1)


class GemanMcClureCurve(Curve):
    """``u^2 / (2 (1 + u^2))``."""

    def value(self, u: Tensor) -> Tensor:
        square = u.square().clamp_max(torch.finfo(u.dtype).max / 4)
        return square / (1 + square) / 2  # precise where u is small

    def derivative(self, u: Tensor) -> Tensor:
        return u / (1 + u.square()).square()

    def second(self, u: Tensor) -> Tensor:
        near = 1 / (1 + u.square())
        return near.square() * (4 * near - 3)


class Huber(_Classic):
    """``t^2/2`` inside s, linear outside; convex, ``psi''`` in ``[0, 1]``.

    >>> Huber(scale=2.0)(torch.tensor([1.0, 4.0]))
    tensor([0.5000, 6.0000])
    """

    _curve = HuberCurve()
    _range = (0.0, 1.0)


class Gaussian(_Classic):
    """``s^2 (1 - exp(-t^2 / 2 s^2))``, also known as Welsch's; ``psi''`` in ``[-2 exp(-3/2), 1]``.

    It is bounded: far outliers cost ``s^2`` and have no gradient.

    >>> [round(float(end), 4) for end in Gaussian().curvature()]
    [-0.4463, 1.0]
    """

    _curve = GaussianCurve()
    _range = (_LEAST_OF_GAUSSIAN, 1.0)


class Student(_Classic):
    """``s^2/2 log(1 + t^2/s^2)``, also known as Cauchy's or the Lorentzian; ``psi''`` in ``[-1/8, 1]``.

    >>> [float(end) for end in Student().curvature()]
    [-0.125, 1.0]
    """

    _curve = StudentCurve()
    _range = (-1 / 8, 1.0)


class GemanMcClure(_Classic):
    """``t^2 / (2 (1 + t^2/s^2))``; ``psi''`` in ``[-1/4, 1]``.

    >>> [float(end) for end in GemanMcClure().curvature()]
    [-0.25, 1.0]
    """

    _curve = GemanMcClureCurve()
    _range = (-1 / 4, 1.0)
