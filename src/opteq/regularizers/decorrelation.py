"""Uncorrelated features: the squared cosines between all pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from opteq.common.validate import not_negative
from opteq.regularizers.base import Regularizer, batch_shares, working_copy
from opteq.states import Autocast


@dataclass(frozen=True)
class Decorrelation(Regularizer):
    """``R(Z) = 1/2 |D Z Z' D - I|_F^2 = 1/2 sum_{i != j} cos^2(z_i, z_j)``: features at right angles.

    ``Z`` has one row ``z_i`` per feature (dimension 1 of ``z``), which runs over the batch and, for images
    ``(B, C, h, w)``, over the pixels; ``D`` divides each row by its length. With ``Zh = D Z``,
    ``K = Zh Zh' - I`` and ``Q = 2 K Zh``::

        grad R = D (Q - rowsum(Q * Zh) Zh)

    which is at right angles to each row, because R does not see how long a row is. (Table 2 of OptEq prints
    ``I + Proj_i`` for ``I - Proj_i`` and drops the factor 2 and the weight.)

    A feature that is zero throughout, such as a dead ReLU, has no direction: it adds nothing to R, not even
    to the diagonal, and its gradient is zero. R is not convex.

    Args:
        eps: A row is divided by ``sqrt(|z_i|^2 + eps)``. R jumps where a row vanishes, and the gradient grows
            like ``1 / |z_i|`` next to it; any ``eps > 0`` removes both, at the price of a scale (that of
            ``|z_i|^2``, a sum over the whole batch) below which features are let alone. The default 0 is the
            prior as defined, free of scale.

    >>> z = torch.tensor([[1.0, 2.0, 1.0], [2.0, -1.0, 1.0]])  # two samples of three features
    >>> Decorrelation().value(z)  # only the third is not at right angles to the others; R is the sum, 1
    tensor([0.5000, 0.5000])
    """

    eps: float = 0.0

    name: ClassVar[str] = "decorrelation"
    convex: ClassVar[bool] = False
    smooth: ClassVar[bool] = True  # with eps = 0, wherever no feature is exactly zero throughout
    couples_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        not_negative(self, "eps")

    def value(self, z: Tensor) -> Tensor:
        with Autocast.current(z.device).off():
            unit, _ = self._unit_rows(_rows(z))
            return batch_shares(_cosines(unit).square().sum() / 2, z)

    def gradient(self, z: Tensor) -> Tensor:
        with Autocast.current(z.device).off():
            unit, inverse_length = self._unit_rows(_rows(z))
            pull = 2 * _cosines(unit) @ unit
            slope = inverse_length * (pull - (pull * unit).sum(1, keepdim=True) * unit)
            return slope.reshape(z.transpose(0, 1).shape).transpose(0, 1).to(z.dtype)

    def _unit_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The rows over their lengths, and one over the lengths, ``(m, 1)``; zeros for a row that vanishes."""
        square = rows.square().sum(1, keepdim=True) + self.eps
        alive = square > 0
        # The inner `where` keeps infinity out of the branch not taken: its derivative would be NaN there.
        inverse_length = torch.where(alive, torch.where(alive, square, 1).rsqrt(), 0)
        return inverse_length * rows, inverse_length


def _rows(z: Tensor) -> Tensor:
    """``(B, m, ...)`` as ``(m, B * ...)``."""
    return working_copy(z, least_dims=2).transpose(0, 1).flatten(1)


def _cosines(unit: Tensor) -> Tensor:
    # The diagonal is 1 for a living row and 0 for a dead one; either way it is not a correlation.
    products = unit @ unit.mT
    return products - torch.diag_embed(products.diagonal())
