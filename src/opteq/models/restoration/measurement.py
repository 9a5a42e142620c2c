"""Measurements of images in one form: operators of this library, and objects with ``A`` and ``A_adjoint``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from opteq.operators.base import LinearMap, Operator


class Measurement(ABC):
    """A linear measurement with what is known of its singular values."""

    least: float | Tensor = 0.0
    """A lower bound of the singular values."""

    most: float | Tensor
    """An upper bound of them."""

    @abstractmethod
    def __call__(self, y: Tensor) -> Tensor:
        """``A y``."""

    @abstractmethod
    def adjoint(self, u: Tensor) -> Tensor:
        """``A' u``."""


class PreparedMeasurement(Measurement):
    """An operator with prepared weights."""

    def __init__(self, linear: LinearMap, least: float | Tensor, most: float | Tensor) -> None:
        self.linear, self.least, self.most = linear, least, most

    def __call__(self, y: Tensor) -> Tensor:
        return self.linear(y)

    def adjoint(self, u: Tensor) -> Tensor:
        return self.linear.adjoint(u)


class PhysicsMeasurement(Measurement):
    """An object with ``A(y)`` and ``A_adjoint(u)``: deepinv's linear physics, for instance.

    Its norm is measured, by power iteration with a margin of 5 %.
    """

    def __init__(self, physics: Any, x: Tensor) -> None:
        self.physics = physics
        with torch.no_grad():
            v = torch.randn(
                physics.A_adjoint(x[:1]).shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype
            ).to(x.device)
            for _ in range(30):
                v = v / torch.linalg.vector_norm(v)
                v = physics.A_adjoint(physics.A(v))
            self.most = 1.05 * torch.linalg.vector_norm(v).sqrt()

    def __call__(self, y: Tensor) -> Tensor:
        image: Tensor = self.physics.A(y)
        return image

    def adjoint(self, u: Tensor) -> Tensor:
        image: Tensor = self.physics.A_adjoint(u)
        return image


def check_measurement(given: Any) -> Any:
    """``given`` if it can measure; otherwise an error that says what it should have."""
    if isinstance(given, Operator | None) or all(callable(getattr(given, name, None)) for name in ("A", "A_adjoint")):
        return given
    raise TypeError(
        f"a measurement should be an opteq.operators.Operator or have methods A(y) and A_adjoint(u); got {given!r}"
    )


def prepare_measurement(given: Any, x: Tensor) -> Measurement | None:
    """The measurement in one form, with prepared weights and a known norm; None without a measurement."""
    if given is None:
        return None
    if isinstance(given, Operator):
        least = getattr(given, "least_singular_value", None)
        return PreparedMeasurement(given.prepare(), 0.0 if least is None else least(), given.norm())
    return PhysicsMeasurement(given, x)
