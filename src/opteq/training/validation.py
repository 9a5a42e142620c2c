"""A pass over pictures without learning from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from opteq.analysis import PGD
from opteq.data import Batches
from opteq.equilibrium import Equilibrium
from opteq.models import equilibria
from opteq.solution import Report
from opteq.training.adversary import Adversary
from opteq.training.metrics import Tally
from opteq.training.optim.losses import cross_entropy
from opteq.training.run import rng


def reports(layers: list[tuple[str, Equilibrium]]) -> list[Report]:
    """How the latest solve of every equilibrium layer went."""
    return [layer.last[0] for _, layer in layers if layer.last is not None]


@contextmanager
def quiet(model: nn.Module) -> Iterator[list[tuple[str, Equilibrium]]]:
    """The equilibrium layers of ``model``, judged by the caller: inside, none of them warns or raises.

    To warn, a layer has to look at its result, which makes a GPU wait at every step; a run looks once in a while.
    """
    layers = equilibria(model)
    before = [layer.on_failure for _, layer in layers]
    for _, layer in layers:
        layer.on_failure = "ignore"
    try:
        yield layers
    finally:
        for (_, layer), setting in zip(layers, before, strict=True):
            layer.on_failure = setting


@torch.no_grad()
def measure(
    model: nn.Module,
    batches: Batches,
    tally: Tally,
    should_stop: Callable[[], bool] = lambda: False,
    attack: PGD | None = None,
) -> bool:
    """Count loss, accuracy and solves over all ``batches``, in evaluation mode; plain cross-entropy, no extras.

    With an ``attack``, of the pictures that it makes; what is solved on the way to them is not counted. Random numbers
    and the model's mode are afterwards as they were. Returns whether it came to the end.
    """
    was_training = model.training
    model.eval()
    adversary = None if attack is None else Adversary(attack, batches)
    try:
        with rng.preserved(), quiet(model) as layers:
            for index, (images, labels) in enumerate(batches.epoch(0)):
                if should_stop():
                    return False
                # The share of a process in the last batch may be empty.
                if len(labels):
                    if adversary is not None:
                        images = adversary(model, images, labels, adversary.start(0, index))
                    logits = model(images)
                    loss = cross_entropy(logits, labels)
                    tally.add(loss, logits, labels, reports(layers))
    finally:
        model.train(was_training)
    return True
