"""The linear kernel: OptEq written for its activations."""

from __future__ import annotations

from torch import Tensor

from opteq.kernels.base import Kernel, Product, Similarity
from opteq.operators import LinearMap
from opteq.states import inner


class Linear(Kernel):
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

    def bind(self, W: LinearMap, c: Tensor) -> LinearSimilarity:
        return LinearSimilarity(W, c)

    def input_gain(self, norm: float, slope: float) -> tuple[float | None, str]:
        """``L / (1 - L |W|^2)``, from ``(I - D W'W)^-1 D``."""
        rest = 1 - slope * norm**2
        if rest <= 0:
            return None, "needs a contraction"
        return slope / rest, "|U| L / (1 - L |W|^2), from (I - D W'W)^-1 D U"


class LinearSimilarity(Similarity):
    """The linear kernel with its input bound."""

    def value(self, y: Tensor) -> Tensor:
        coupling, given = self.terms(y).values()
        return coupling + given

    def terms(self, y: Tensor) -> dict[str, Tensor]:
        image = self.W(y)
        return {"coupling": inner(image, image) / 2, "input": inner(self.c, y)}

    def gradient(self, y: Tensor) -> Tensor:
        return self.W.adjoint(self.W(y)) + self.c

    def curvature_at(self, y: Tensor) -> Product:  # noqa: ARG002 - it is the same everywhere
        return lambda v: self.W.adjoint(self.W(v))
