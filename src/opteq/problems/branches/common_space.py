"""Operators that lead from one common space to the states of several branches, each at its own size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from opteq.operators import LinearMap, Operator, resample
from opteq.problems.base import check_unhooked
from opteq.solvers.linear.lanczos import largest_curvature
from opteq.states import State, blocks, map_state

Sizes = tuple[tuple[int, int], ...]

_MARGIN = 1.1
"""By how much ``|A|^2`` in a step length exceeds what Lanczos steps find."""
OVERESTIMATE = 1.12
"""A measured ``|A|^2`` is at most that times the true one: Lanczos steps find at most 1 % too much."""


class CommonSpaceMap:
    """``A v = (A_1 S_1 v, ..., A_L S_L v)`` and ``A' y = S_1' A_1' y_1 + ... + S_L' A_L' y_L``.

    The common space has the size of the largest state. ``S_i`` brings it to the size of branch i: the mean over squares
    of ``k x k`` pixels times k, which has norm 1 and ``S S' = I``. So no branch counts less for being smaller.
    ``sizes`` are the heights and widths of the states, none for vectors; ``single`` where the state is one tensor.
    """

    def __init__(self, maps: Sequence[LinearMap], sizes: Sizes, single: bool) -> None:
        self.maps = list(maps)
        self.sizes = sizes
        self.single = single
        self.size = max(sizes) if sizes else None
        self.factors = tuple(self.size[0] / size[0] for size in sizes) if self.size else (1.0,) * len(self.maps)

    def __call__(self, v: Tensor) -> State:
        """``A v``."""
        parts = tuple(A(self._smaller(v, index)) for index, A in enumerate(self.maps))
        return parts[0] if self.single else parts

    def adjoint(self, y: State) -> Tensor:
        """``A' y``."""
        pairs = zip(self.maps, blocks(y), strict=True)
        return reduce(torch.add, (self._larger(A.adjoint(part), index) for index, (A, part) in enumerate(pairs)))

    def _smaller(self, v: Tensor, index: int) -> Tensor:
        factor = self.factors[index]
        return v if factor == 1 else resample(v, self.sizes[index]) * factor

    def _larger(self, u: Tensor, index: int) -> Tensor:
        factor = self.factors[index]
        return u if self.size is None or factor == 1 else resample(u * factor, self.size)


def prepare_common(operators: Sequence[Operator], injections: State) -> CommonSpaceMap:
    """The map for states that are shaped like ``injections``, with the weights settled."""
    parts = blocks(injections)
    sizes = tuple((c.shape[2], c.shape[3]) for c in parts) if all(c.ndim == 4 for c in parts) else ()
    largest = max(sizes) if sizes else (1, 1)
    for size in sizes:
        if any(there % here for here, there in zip(size, largest, strict=True)) or (
            largest[0] * size[1] != largest[1] * size[0]
        ):
            raise ValueError(f"the states of all branches should divide the largest one, {largest}; got {list(sizes)}")
    maps = [check_unhooked(A, "A").prepare() for A in operators]
    return CommonSpaceMap(maps, sizes, not isinstance(injections, tuple))


@torch.no_grad()
def measured_square(A: CommonSpaceMap, state: State) -> Tensor:
    """``|A|^2`` for states like ``state``, a scalar, from Lanczos steps on one image: 10 % above what they find.

    That is closer than any bound by the parts' norms, whose sum is up to L times too large. A proximal gradient step
    contracts for lengths below ``2 / (m + |A|^2)``, so an estimate that is a little too small does no harm.
    """
    one = map_state(lambda part: part.new_zeros(1, *part.shape[1:]), state)
    return _MARGIN * largest_curvature(lambda y: A(A.adjoint(y)), one)[0]
