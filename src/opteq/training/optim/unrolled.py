"""First epochs that differentiate through a few plain steps, as published trainings of equilibrium networks begin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from opteq.gradients import Unrolled
from opteq.solvers import Picard
from opteq.training.optim.jacobian import solved_layers
from opteq.training.recipe.sections import TrainSection


class UnrolledEpochs:
    """Trains a model as a network of ``unrolled_steps`` equal layers in its first ``unrolled_epochs`` epochs.

    At their first weights such models can be far from an equilibrium after the steps that they may take, and then
    implicit and phantom gradients mean little. Tests solve for the equilibrium in every epoch.

    Args:
        model: whose equilibria are unrolled.
        options: the recipe's ``[train]``.
    """

    def __init__(self, model: nn.Module, options: TrainSection) -> None:
        self.epochs, self.steps = options.unrolled_epochs, options.unrolled_steps
        self.layers = solved_layers(model, "train.unrolled_epochs") if self.epochs else []

    @contextmanager
    def training(self, epoch: int) -> Iterator[None]:
        """Around the training steps of ``epoch``, from 0."""
        if epoch >= self.epochs:
            yield
            return
        before = [(layer.solver, layer.gradient) for layer in self.layers]
        for layer in self.layers:
            layer.solver, layer.gradient = Picard(tol=0.0), Unrolled(steps=self.steps)
        try:
            yield
        finally:
            for layer, (solver, gradient) in zip(self.layers, before, strict=True):
                layer.solver, layer.gradient = solver, gradient
