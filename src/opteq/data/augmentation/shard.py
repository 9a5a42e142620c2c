"""The samples of a batch that one process needs, and their random numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opteq.data.augmentation.options import Draws
from opteq.data.prefetch import to_device


@dataclass(frozen=True)
class Shard:
    """One process's part of one batch.

    Attributes:
        start: index of the batch's first sample in the epoch's order.
        own: positions in the batch of this process's samples.
        partners: positions of samples of other processes that are mixed into them; None if there are none.
        draws: random numbers of the whole batch.
    """

    start: int
    own: range
    partners: npt.NDArray[np.generic] | None
    draws: Draws

    def rows(self, order: Tensor) -> Tensor:
        """The rows of the split that are needed: own samples, then partners."""
        own = order[self.start + self.own.start : self.start + self.own.stop]
        if self.partners is None:
            return own
        partners = to_device(torch.from_numpy(self.start + self.partners), order.device)
        return torch.cat((own, order[partners]))

    def part(self, name: str) -> npt.NDArray[np.generic]:
        """The random numbers ``name`` for :meth:`rows`."""
        own = self.draws[name][self.own.start : self.own.stop]
        return own if self.partners is None else np.concatenate((own, self.draws[name][self.partners]))
