"""An attack on the images of a run, with the normalisation and the random starts of its batches."""

from __future__ import annotations

from torch import Tensor, nn

from opteq.analysis import APGD, PGD
from opteq.data import Batches

Attack = PGD | APGD


class Adversary:
    """Attacks the images of some batches.

    Random starts depend only on seed, epoch and batch: a resumed run, or one with several processes, computes the same
    attacks. :class:`~opteq.analysis.PGD` leaves the model as it was.

    Args:
        attack: the attack.
        batches: the batches whose images are attacked.
    """

    def __init__(self, attack: Attack, batches: Batches) -> None:
        self.attack = attack
        self.batches = batches

    def start(self, epoch: int, index: int) -> Tensor | None:
        """Noise of the random start for this process's share of a batch; None to start at the images."""
        return self.batches.noise(epoch, index) if self.attack.random_start else None

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, start: Tensor | None) -> Tensor:
        """The attacked images."""
        return self.attack(model, images, labels, self.batches.mean, self.batches.std, noise=start)
