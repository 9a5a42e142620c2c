"""The share of samples whose equilibrium has a certificate: from the weights, or at the point."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from opteq.diagnostics.strict import certified_minima
from opteq.equilibrium import Equilibrium
from opteq.models import equilibria
from opteq.problems.hidden import BoundMap
from opteq.states import State
from opteq.training.devices import Accelerator


class CertifiedShare:
    """Counts samples that converged to an equilibrium which is certified, over all equilibrium layers of a model.

    Where a problem's own certificate says that the equilibrium exists and is unique, every sample that converged has
    one. Elsewhere it is :func:`~opteq.analysis.local_certificate`'s ``strict_minimum``, each with probability 0.999. A
    layer whose Jacobian has no symmetric form has neither: the share is then unknown.

    Args:
        model: with equilibrium layers.
        device: where it is.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.layers = [layer for _, layer in equilibria(model)]
        self.counts = torch.zeros(2, dtype=torch.float64, device=device)
        self.known = bool(self.layers)
        self.unique = [bool(layer.problem.certificate().unique) for layer in self.layers]
        self.states: dict[int, State] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, every forward pass of the model is counted."""
        hooks = []
        for index, layer in enumerate(self.layers):
            hooks.append(layer.register_forward_hook(self._counter(index)))
            if not self.unique[index]:
                hooks.append(layer.register_observer(self._observer(index)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def share(self, accelerator: Accelerator) -> float | None:
        """The share over all processes; None where it is not known."""
        counts = self.counts if accelerator.num_processes == 1 else accelerator.reduce(self.counts, "sum")
        certified, total = counts.tolist()
        return certified / total if self.known and total else None

    def _observer(self, index: int) -> Any:
        def see(_: BoundMap, state: State) -> None:
            self.states[index] = state

        return see

    def _counter(self, index: int) -> Any:
        def count(layer: nn.Module, given: tuple[Any, ...], _: Any) -> None:
            assert isinstance(layer, Equilibrium)
            assert layer.last is not None
            good = layer.last[0].converged
            if not self.unique[index]:
                strict = certified_minima(layer.problem, given[0], self.states.pop(index), good)
                if strict is None:
                    self.known = False
                    return
                good = strict
            self.counts += torch.stack([good.sum(), torch.full_like(good.sum(), good.numel())]).double()

        return count
