"""An attack on the pictures of a run: how to attack, in whose colours, and from which random starts."""

from __future__ import annotations

from torch import Tensor, nn

from opteq.analysis import PGD
from opteq.data import Batches


class Adversary:
    """Attacks the pictures that some batches hand out.

    Starts come from the batches' own random numbers, so they depend on seed, epoch and batch alone: a run that is
    resumed, or that several processes share, meets the same attacks. See :class:`~opteq.analysis.PGD` for what happens
    to the model meanwhile, which is nothing that lasts.

    Args:
        attack: how.
        batches: whose pictures.
    """

    def __init__(self, attack: PGD, batches: Batches) -> None:
        self.attack = attack
        self.batches = batches

    def start(self, epoch: int, index: int) -> Tensor | None:
        """Where the attack on this process's share of a batch begins; None for at the pictures themselves."""
        return self.batches.noise(epoch, index) if self.attack.random_start else None

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, start: Tensor | None) -> Tensor:
        """The attacked pictures, which ``model`` gets more often wrong."""
        return self.attack(model, images, labels, self.batches.mean, self.batches.std, noise=start)
