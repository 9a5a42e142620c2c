"""The sigmoid kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opteq.kernels.inner_product import InnerProduct


class Sigmoid(InnerProduct):
    """``s(y) = 1/2 |W y|^2 + tanh <c, y>`` with ``c = U x + b`` in the state's space.

    tanh is bounded, so the objective has a minimiser wherever ``L |W|^2 < 1``, with L the largest slope of the
    activation. It is the only one for inputs that are not too large: the curvature of ``tanh <c, y>`` is at most
    ``4 / sqrt(27) |c|^2``, hence uniqueness for ``L (|W|^2 + 0.77 |c|^2) < 1``.

    Where it is not, solvers are damped by each sample's own ``|c|^2``.

    >>> Sigmoid().slope(torch.tensor([0.0]))
    tensor([1.])
    """

    growth = 1.0
    bends = (-4 / math.sqrt(27), 4 / math.sqrt(27))
    caveat = (
        "the curvature of tanh <c, y> grows with |c|^2, c = U x + b. With L the largest slope of the activation, the "
        "objective has a minimiser where L |W|^2 < 1 and may have none otherwise; it is unique, and a step contracts, "
        "for inputs with L (|W|^2 + 4 / sqrt(27) |c|^2) < 1"
    )

    def height(self, t: Tensor) -> Tensor:
        """``tanh t``."""
        return torch.tanh(t)

    def slope(self, t: Tensor) -> Tensor:
        """``1 - tanh^2 t``."""
        return 1 - torch.tanh(t).square()

    def bend(self, t: Tensor) -> Tensor:
        """``-2 tanh t (1 - tanh^2 t)``."""
        height = torch.tanh(t)
        return -2 * height * (1 - height.square())
