"""Who makes what of a batch: the samples that one process needs, and their random numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opteq.data.augmentation.options import Draws
from opteq.data.prefetch import to_device


@dataclass(frozen=True)
class Plan:
    """One process's part of one batch.

    ``start`` is the batch's place in the epoch's order, ``own`` this process's places in the batch, ``partners`` the
    places of samples that are only mixed into its own ones (None where all partners are among its own), and ``draws``
    the random numbers for the whole batch.
    """

    start: int
    own: range
    partners: npt.NDArray[np.generic] | None
    draws: Draws

    def rows(self, order: Tensor) -> Tensor:
        """The rows of the split that are needed: the own ones, then the partners'."""
        own = order[self.start + self.own.start : self.start + self.own.stop]
        if self.partners is None:
            return own
        partners = to_device(torch.from_numpy(self.start + self.partners), order.device)
        return torch.cat((own, order[partners]))

    def part(self, name: str) -> npt.NDArray[np.generic]:
        """The random numbers ``name`` for :meth:`rows`."""
        own = self.draws[name][self.own.start : self.own.stop]
        return own if self.partners is None else np.concatenate((own, self.draws[name][self.partners]))
