"""Kernels that look at the input through one number, its inner product with the state."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from opteq.kernels.base import Kernel, Product, Similarity
from opteq.operators import LinearMap
from opteq.states import inner


class InnerProduct(Kernel):
    """``s(y) = 1/2 |W y|^2 + k(<c, y>)`` for a function k of one number.

    A kernel of this kind is k with its first two derivatives; each takes and returns one value per sample.

    Attributes:
        bends: an interval that holds all values of ``k''``, or None where there is none.
        growth: set it to 1 where ``k(t)`` grows no faster than ``|t|``; ``1/2 |W y|^2`` then decides.
    """

    bends: ClassVar[tuple[float, float] | None] = None

    @abstractmethod
    def height(self, t: Tensor) -> Tensor:
        """``k(t)``."""

    @abstractmethod
    def slope(self, t: Tensor) -> Tensor:
        """``k'(t)``."""

    @abstractmethod
    def bend(self, t: Tensor) -> Tensor:
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
        return {"coupling": inner(image, image) / 2, "input": self.kernel.height(inner(self.c, y))}

    def gradient(self, y: Tensor) -> Tensor:
        """``W'W y + k'(<c, y>) c``."""
        return self.W.adjoint(self.W(y)) + self._times_c(self.kernel.slope(inner(self.c, y)))

    def curvature_at(self, y: Tensor) -> Product:
        """``v -> W'W v + k''(<c, y>) c <c, v>``."""
        bend = self.kernel.bend(inner(self.c, y))
        return lambda v: self.W.adjoint(self.W(v)) + self._times_c(bend * inner(self.c, v))

    def curvature_interval(self, square: float) -> tuple[Tensor, Tensor] | None:
        """``W'W`` lies in ``[0, |W|^2]``, and ``k'' cc'`` between zero and ``k'' |c|^2``."""
        if self.kernel.bends is None:
            return None
        low, high = self.kernel.bends
        with torch.no_grad():
            size = inner(self.c, self.c)
            return min(low, 0.0) * size, square + max(high, 0.0) * size

    def _times_c(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.c.dtype).reshape(-1, *[1] * (self.c.ndim - 1)) * self.c
