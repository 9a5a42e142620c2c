"""The mean size of features at equilibrium, which priors in a layer are to change (OptEq paper, Table 3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from opteq.models import equilibria
from opteq.states import blocks
from opteq.training.devices import Accelerator


class FeatureSize:
    """The means of ``|z|`` and of ``z^2`` over all entries of the features of all equilibrium layers, and all samples.

    Args:
        model: with equilibrium layers; without one there are no means.
        device: where it is.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.layers = [layer for _, layer in equilibria(model)]
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, every forward pass of the model is counted."""
        hooks = [layer.register_forward_hook(self._count) for layer in self.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def means(self, accelerator: Accelerator) -> dict[str, float]:
        """``feature_abs`` and ``feature_square`` over all processes."""
        sums = self.sums if accelerator.num_processes == 1 else accelerator.reduce(self.sums, "sum")
        size, square, count = sums.tolist()
        return {"feature_abs": size / count, "feature_square": square / count} if count else {}

    @torch.no_grad()
    def _count(self, _: nn.Module, __: Any, features: Tensor | tuple[Tensor, ...]) -> None:
        for part in blocks(features):
            wide = part.double()
            self.sums += torch.stack([wide.abs().sum(), wide.square().sum(), torch.full_like(wide.sum(), wide.numel())])
