"""A pass over batches without training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from opteq.data import Batches
from opteq.equilibrium import Equilibrium
from opteq.models import equilibria
from opteq.models.comparators.neural_ode import NeuralODE
from opteq.solution import Report
from opteq.training.adversary import Adversary, Attack
from opteq.training.metrics import RunningMetrics
from opteq.training.optim.losses import cross_entropy
from opteq.training.run import rng

Layers = list[tuple[str, Equilibrium | NeuralODE]]
"""The layers of a model that report how they were solved, with their names."""

Change = Callable[[Tensor, Batches, int], Tensor]
"""From the images of this process's share of a batch, the batches and the batch's index to changed images."""


def solve_reports(layers: Layers) -> list[Report]:
    """The report of the latest solve of every layer."""
    return [layer.last[0] for _, layer in layers if layer.last is not None]


@contextmanager
def without_warnings(model: nn.Module) -> Iterator[Layers]:
    """Yield the layers of ``model`` that are solved; inside the block no equilibrium warns or raises.

    A warning needs the result on the host, so that a GPU waits at every step; a run checks its metrics instead.
    """
    layers = equilibria(model)
    before = [layer.on_failure for _, layer in layers]
    for _, layer in layers:
        layer.on_failure = "ignore"
    try:
        yield [*layers, *((name, part) for name, part in model.named_modules() if isinstance(part, NeuralODE))]
    finally:
        for (_, layer), setting in zip(layers, before, strict=True):
            layer.on_failure = setting


@torch.no_grad()
def validate(
    model: nn.Module,
    batches: Batches,
    metrics: RunningMetrics,
    should_stop: Callable[[], bool] = lambda: False,
    attack: Attack | None = None,
    change: Change | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> bool:
    """Update ``metrics`` with loss, accuracy and solves over all ``batches``, in evaluation mode.

    The loss is the plain cross-entropy. Images are changed by ``change`` first, then attacked: the metrics are those of
    the images that result, and solves inside an attack are not counted. ``advance(1)`` is called after each batch.
    Random state and the model's mode stay unchanged. Returns False if ``should_stop`` ended it early.
    """
    was_training = model.training
    model.eval()
    adversary = None if attack is None else Adversary(attack, batches)
    try:
        with rng.preserve_rng(), without_warnings(model) as layers:
            for index, (images, labels) in enumerate(batches.epoch(0)):
                if should_stop():
                    return False
                # A process may have an empty share of the last batch.
                if len(labels):
                    if change is not None:
                        images = change(images, batches, index)
                    if adversary is not None:
                        images = adversary(model, images, labels, adversary.start(0, index))
                    logits = model(images)
                    loss = cross_entropy(logits, labels)
                    metrics.update(loss, logits, labels, solve_reports(layers))
                advance(1)
    finally:
        model.train(was_training)
    return True
