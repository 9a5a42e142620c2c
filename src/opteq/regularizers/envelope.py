"""The Moreau envelope of a regulariser, which is what a proximal layer minimises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from opteq.common.validate import check_kind, check_not_negative, positive
from opteq.regularizers.base import Regularizer, batch_shares, working_copy
from opteq.states import sum_over_sample


@dataclass(frozen=True)
class Envelope(Regularizer):
    """The Moreau envelope ``M(z) = min_p w R(p) + 1/2 |p - z|^2`` of a convex regulariser R with weight w.

    The minimum is at ``p = prox_{w R}(z)``, and ``grad M(z) = z - p``. Hence ``prox_{w R} = I - grad M``: the
    layer ``T(prox_{w R}(z))`` is the gradient layer of M with weight 1, and its fixed points minimise
    ``phi + M``, not ``phi + w R`` as Table 2 of OptEq has it. How much that differs:

    - ridge: M is ``w / (1 + w)`` times ``1/2 |z|^2``, so the effective weight is never more than 1;
    - l1: M is the Huber function, ``z^2 / 2`` up to ``|z| = w`` and ``w |z| - w^2 / 2`` beyond. It has no
      kink at zero, so that layer by itself does not make features exactly zero.

    M has the minimisers of R. Since w is part of it, it is to be used with weight 1.

    >>> import torch
    >>> from opteq.regularizers import Ridge
    >>> Envelope(Ridge(), weight=1.0).value(torch.tensor([[3.0, 4.0]]))  # half the value of Ridge
    tensor([6.2500])
    """

    regularizer: Regularizer
    weight: float

    name: ClassVar[str] = "envelope"
    convex: ClassVar[bool] = True
    smooth: ClassVar[bool] = True
    couples_batch: ClassVar[bool] = False  # an instance has the value of its regulariser

    def __post_init__(self) -> None:
        R = self.regularizer
        check_kind("Envelope: regularizer", R, Regularizer, "a Regularizer, such as L1()")
        if not R.convex:
            raise ValueError(f"Envelope: regularizer should be convex, such as Ridge() or L1(); got {R!r}")
        if type(R).prox is Regularizer.prox:
            raise ValueError(f"Envelope: regularizer should have a prox; {R!r} has none")
        positive(self, "weight")
        object.__setattr__(self, "couples_batch", R.couples_batch)

    def value(self, z: Tensor) -> Tensor:
        features = working_copy(z)
        nearest = self.regularizer.prox(features, self.weight)
        entries = self.weight * self.regularizer.value(nearest) + sum_over_sample((nearest - features).square()) / 2
        return batch_shares(entries.sum(), z) if self.couples_batch else entries

    def gradient(self, z: Tensor) -> Tensor:
        features = working_copy(z)
        return (features - self.regularizer.prox(features, self.weight)).to(z.dtype)

    def prox(self, z: Tensor, weight: float) -> Tensor:
        """A step from ``z`` towards the prox of R with the larger weight ``(1 + weight) w``; exact."""
        check_not_negative("Envelope.weight", weight)
        features = working_copy(z)
        target = self.regularizer.prox(features, (1 + weight) * self.weight)
        return (features + weight / (1 + weight) * (target - features)).to(z.dtype)

    @property
    def gradient_lipschitz(self) -> float:
        """1 for every R: ``I - prox`` is nonexpansive."""
        return 1.0
