"""The bounds of a module's operators, computed once for all the steps of a solve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from opteq.operators.base import Operator
from opteq.operators.norms import Known, known_scales, scale_job


@dataclass(frozen=True)
class Settled:
    """Factors of the bounded weights inside a module, by the names of their operators: tensors and no more."""

    scales: dict[str, Tensor]

    @contextmanager
    def in_force(self, module: nn.Module) -> Iterator[None]:
        """While this is in force, operators inside ``module`` multiply their weights by the factors kept here."""
        if not self.scales:
            yield
            return
        known = {}
        for name, scale in self.scales.items():
            bounded = module.get_submodule(name).bounded_by()  # type: ignore[operator]
            known[id(bounded[0])] = Known(bounded[0], scale, None)
        token = known_scales.set({**(known_scales.get() or {}), **known})
        try:
            yield
        finally:
            known_scales.reset(token)


def settle(module: nn.Module) -> Settled:
    """The factors as the weights are now; they carry the gradient of the bounds."""
    bounded = {
        name: found
        for name, part in module.named_modules()
        if isinstance(part, Operator) and (found := part.bounded_by()) is not None
    }
    already = known_scales.get() or {}
    scales = {}
    for name, found in bounded.items():
        known, job = already.get(id(found[0])), scale_job(*found)
        scales[name] = job.function(*job.inputs) if known is None else known.settled()
    return Settled(scales)
