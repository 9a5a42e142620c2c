"""Bounds on weights that grow over the first epochs: training begins where steps contract, and leaves it slowly."""

from __future__ import annotations

from torch import nn

from opteq.common.errors import UserError
from opteq.models import equilibria
from opteq.operators import Operator
from opteq.training.recipe.sections import TrainSection


class GrowingBounds:
    """Sets the bounds of all operators of a model's equilibria, epoch by epoch.

    In epoch e, from 0, a bound b is ``s + (b - s) min(1, e / n)``: it grows from ``s = bound_start`` to what the model
    says within ``n = bound_epochs`` epochs. It is a function of the epoch alone, so that a resumed run has the same.

    Args:
        model: whose operators have bounds of at least ``bound_start``.
        options: the recipe's ``[train]``.
    """

    def __init__(self, model: nn.Module, options: TrainSection) -> None:
        self.start, self.epochs = options.bound_start, options.bound_epochs
        self.final: list[tuple[Operator, float]] = []
        if self.start is None:
            return
        parts = [part for _, layer in equilibria(model) for part in layer.modules() if isinstance(part, Operator)]
        self.final = [(part, part.bound) for part in parts if part.bound is not None]
        least = min((bound for _, bound in self.final), default=0.0)
        if least < self.start:
            raise UserError(
                f"train.bound_start = {self.start:g} should be at most the bound of the model's operators, which is "
                f"{least:g}" + ("" if self.final else ", for none has one")
            )

    def set(self, epoch: int) -> None:
        """The bounds for ``epoch``, from 0."""
        if self.start is None or self.epochs is None:
            return
        share = min(1.0, epoch / self.epochs)
        for part, bound in self.final:
            part.bound = bound if share == 1 else self.start + (bound - self.start) * share
