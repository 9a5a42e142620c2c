"""The symbol of a convolution, and its largest norm over all frequencies, from above.

At the frequency ``theta``, a kernel ``K`` with taps ``t`` acts as the matrix
``K^(theta) = sum_t K[:, :, t] e^(-i t.theta)``, its symbol.

**From a grid to the supremum.** For fixed unit vectors, ``u* K^(theta) v`` is, along an axis with ``k`` taps and after
a change of phase, a trigonometric polynomial of degree ``d = (k - 1) / 2`` that is real where its modulus is largest.
By M. Riesz's inequality it falls from its maximum no faster than ``cos(d theta)`` does, and of ``N`` equispaced points
one is within ``pi / N``. Hence supremum <= grid maximum / cos(pi d / N), once per axis. A real kernel has
``|K^(-theta)| = |K^(theta)|``, so half of the grid is enough.

**At each frequency** the norm is bounded from the Gram matrix (:mod:`opteq.operators.spectral.gram`). The sweep over
frequencies runs without gradient. The bound at the frequency that attains the maximum is then computed again with
gradient: the derivative is that of the computed number, for the price of one frequency.

On a GPU nothing waits for the device, so all of it can be captured in a CUDA graph. That pays: a GPU computes these
small operations in less time than it takes to launch them one by one.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from opteq.common.dynamo import constant
from opteq.operators.spectral.gram import eigenvalue_bound, gram_form


class _Effort(NamedTuple):
    """How hard to work: grid points per degree and axis, and squarings at each of them."""

    points: int
    squarings: int


# In training, by the smaller side of the kernel up to which each holds. A step pays for the sweep with
# (points * degree)^2 / 2 * (squarings + 1) products of Gram matrices; benchmarks/bound_cost.py measures what share of
# the step that is. Narrow matrices need one squaring less, and wide ones, the most expensive, get fewer points.
_TRAINING = ((64, _Effort(16, 3)), (128, _Effort(16, 4)), (math.inf, _Effort(12, 4)))
# Within 0.5 % for up to 512 channels.
_FINE = _Effort(60, 7)

# How many numbers the symbols of one part of the sweep may hold: a processor works best inside its cache, a GPU when it
# is full (though its memory should not be).
_CHUNK_CPU = 2**18
_CHUNK_GPU = 2**24


def squared_supremum(taps: Tensor, size: tuple[int, int], fine: bool) -> Tensor:
    """An upper bound of ``sup |K^|^2``, over frequencies and groups.

    Args:
        taps: ``(k1 * k2, groups, n, m)`` with ``n <= m``, entries of order one.
        size: ``(k1, k2)``.
        fine: spend more to come closer.

    Returns:
        A scalar, differentiable with respect to ``taps``.
    """
    effort = _FINE if fine else next(effort for limit, effort in _TRAINING if taps.shape[2] <= limit)
    (n1, gap1), (n2, gap2) = _axis(size[0], effort.points), _axis(size[1], effort.points)
    return _largest_on_grid(taps, size, (n1, n2), effort.squarings) * (gap1 * gap2) ** 2


def _axis(k: int, points: int) -> tuple[int, float]:
    """The number of grid points along an axis with ``k`` taps, and the factor from their maximum to the supremum."""
    degree = (k - 1) / 2
    number = max(1, math.ceil(points * degree))
    return number, 1 / math.cos(math.pi * degree / number)


def _largest_on_grid(taps: Tensor, size: tuple[int, int], number: tuple[int, int], squarings: int) -> Tensor:
    groups, n, m = taps.shape[1:]
    table = _frequencies(*size, *number, taps.dtype, taps.device)
    with torch.no_grad():
        chunk = _CHUNK_CPU if taps.device.type == "cpu" else _CHUNK_GPU
        parts = torch.split(table, max(1, chunk // (groups * n * m)), dim=1)
        best, where = torch.cat([_squared_norms(taps, part, squarings) for part in parts]).max(dim=0, keepdim=True)
    if not torch.is_grad_enabled():
        return best.squeeze(0)
    return _squared_norms_at(taps, table, where // groups, where % groups, squarings).squeeze(0)


def may_wait(taps: Tensor) -> bool:
    """Whether the course of the computation may depend on its numbers: on a CPU, outside of transformations."""
    return (
        taps.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def _squared_norms(taps: Tensor, table: Tensor, squarings: int) -> Tensor:
    """``(frequencies * groups,)``: upper bounds of the squared norms at the frequencies of the table."""
    symbols = torch.tensordot(table, taps, dims=1).flatten(1, 2)
    return eigenvalue_bound(gram_form(*symbols), squarings)


def _squared_norms_at(taps: Tensor, table: Tensor, frequency: Tensor, group: Tensor, squarings: int) -> Tensor:
    """Upper bounds ``(places,)`` of the squared norms at pairs of a frequency of the table and a group."""
    chosen = table.index_select(1, frequency).transpose(0, 1)
    of_group = taps.index_select(1, group).transpose(0, 1).flatten(2) if taps.shape[1] > 1 else taps.flatten(1)
    symbols = (chosen @ of_group).reshape(len(frequency), 4, *taps.shape[2:]).transpose(0, 1)
    return eigenvalue_bound(gram_form(*symbols), squarings)


@constant
def _frequencies(k1: int, k2: int, n1: int, n2: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """:func:`_make_frequencies`, remembered; a constant to ``torch.compile``."""
    return _make_frequencies(k1, k2, n1, n2, dtype, device)


@lru_cache(maxsize=128)
def _make_frequencies(k1: int, k2: int, n1: int, n2: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Coefficients ``(4, frequencies, k1 * k2)`` that turn taps into cosine and sine parts, their difference and sum.

    Of two frequencies that mirror each other one is kept.
    """
    taps = [(i, j) for i in range(k1) for j in range(k2)]
    # An inference tensor could not take part in training later, and this one outlives the call.
    with torch.inference_mode(False):
        angle = half_grid(n1, n2) @ torch.tensor(taps, dtype=torch.float64, device="cpu").mT
        cos, sin = angle.cos(), angle.sin()
        return torch.stack([cos, sin, cos - sin, cos + sin]).to(device=device, dtype=dtype)


def half_grid(n1: int, n2: int) -> Tensor:
    """The frequencies ``(F, 2)`` of an ``n1 x n2`` grid, one of every two that mirror each other, in float64."""
    turns = [(i / n1, j / n2) for i in range(n1) for j in range(n2) if (i, j) <= (-i % n1, -j % n2)]
    return 2 * math.pi * torch.tensor(turns, dtype=torch.float64, device="cpu")
