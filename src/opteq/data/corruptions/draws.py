"""Random numbers of corruptions, from seed, corruption and the image's place in its data set alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Drawn = npt.NDArray[np.float32]


class Draws:
    """One generator for each image of a batch. All severities draw the same numbers, so that they can be compared.

    Args:
        seed: of the whole evaluation.
        name: of the corruption.
        places: of the images in their data set.
        device: where the numbers are wanted.
    """

    def __init__(self, seed: int, name: str, places: Sequence[int], device: torch.device) -> None:
        purpose = zlib.crc32(name.encode())
        seeds = (np.random.SeedSequence((seed, purpose, place)) for place in places)
        self._generators = [np.random.Generator(np.random.Philox(one)) for one in seeds]
        self._device = device

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """``(B, *shape)``, uniform between ``low`` and ``high``."""
        return low + (high - low) * self._stacked(lambda one: one.random(shape, dtype=np.float32))

    def normal(self, *shape: int) -> Tensor:
        """``(B, *shape)``, standard normal."""
        return self._stacked(lambda one: one.standard_normal(shape, dtype=np.float32))

    def poisson(self, rate: Tensor) -> Tensor:
        """Counts with the expectation ``rate``, ``(B, ...)``."""
        rates = iter(rate.double().cpu().numpy())
        return self._stacked(lambda one: one.poisson(next(rates)).astype(np.float32))

    def whole(self, most: int, *shape: int) -> Tensor:
        """``(B, *shape)``, whole numbers from ``-most`` to ``most``, int64."""
        return self.uniform(*shape, low=-most - 0.5, high=most + 0.5).round().clamp(-most, most).long()

    def _stacked(self, draw: Callable[[np.random.Generator], Drawn]) -> Tensor:
        return torch.from_numpy(np.stack([draw(one) for one in self._generators])).to(self._device)


class Setting(NamedTuple):
    """The parameters of a corruption.

    Attributes:
        level: the numbers of its severity.
        draws: its random numbers.
        scale: factor of lengths in pixels.
    """

    level: Sequence[float]
    draws: Draws
    scale: float


def plasma(draws: Draws, height: int, width: int, decay: float) -> Tensor:
    """Clouds ``(B, height, width)`` in [0, 1]: noise of every scale, each finer one ``decay`` times weaker."""
    side, total, weight = 2, torch.zeros(()), 1.0
    while True:
        layer = torch.nn.functional.interpolate(
            draws.uniform(1, side + 1, side + 1), size=(height, width), mode="bilinear", align_corners=True
        )
        total = total.to(layer.device) + weight * layer[:, 0]
        if side >= max(height, width):
            break
        side, weight = 2 * side, weight / decay
    low, high = (f(total.flatten(1), dim=1)[:, None, None] for f in (torch.amin, torch.amax))
    return (total - low) / (high - low).clamp_min(1e-6)
