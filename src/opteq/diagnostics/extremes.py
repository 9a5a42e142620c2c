"""Extreme eigenvalues of symmetric operators per sample, with the probability that a bound on them fails."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.solvers.linear.base import RowProduct
from opteq.solvers.linear.lanczos import Lanczos, tridiagonal
from opteq.states import Autocast

_SMALL = 256
"""Vectors of up to that length get an orthogonal basis."""


@dataclass(frozen=True)
class Extremes:
    """The ends of the spectrum of a symmetric operator, one pair per row.

    Ritz values lie inside the spectrum, so they bound its ends from one side only. The bounds from outside hold for
    each row with the stated probability over the random start.

    Attributes:
        smallest, largest: the extreme Ritz values ``(R,)``: the smallest eigenvalue is at most ``smallest``.
        lower, upper: all eigenvalues of a row lie in ``[lower, upper]``, with probability at least ``1 - failure``.
        direction: unit vectors ``(R, N)`` with Rayleigh quotient ``smallest``, where they were asked for.
    """

    smallest: Tensor
    largest: Tensor
    lower: Tensor
    upper: Tensor
    failure: float
    direction: Tensor | None


@torch.no_grad()
def extreme_eigenvalues(
    product: RowProduct, like: Tensor, steps: int = 30, failure: float = 1e-3, direction: bool = False
) -> Extremes:
    """The extreme eigenvalues of a symmetric operator by Lanczos steps.

    After k steps from a random start in dimension n the largest eigenvalue of a positive semidefinite matrix is
    underestimated by a relative e with probability at most ``1.648 sqrt(n) exp(-sqrt(e) (2k - 1))`` (Kuczynski and
    Wozniakowski 1992). Here the operator is shifted by its ends, and e follows from ``failure``.

    The basis is kept orthogonal where it is small, or as many steps as dimensions are to find all eigenvalues.
    Elsewhere Ritz values are, in rounding, those of exact steps on a matrix with the same eigenvalues, some of them
    several times (Greenbaum 1989).

    Args:
        product: applies the operator to ``(R, N)``, every row by itself.
        like: a tensor ``(R, N)`` that gives shape, dtype and device.
        steps: products; at most N are made.
        failure: probability over the random start that a bound fails for a row. The start is the same for all rows: a
            batch equals its samples one by one.
        direction: whether to keep the basis for the direction of the smallest one.

    >>> matrix = torch.diag(torch.tensor([-1.0, 2.0, 5.0]))
    >>> found = extreme_eigenvalues(lambda rows: rows @ matrix, torch.zeros(1, 3))
    >>> round(float(found.smallest), 4), round(float(found.largest), 4)
    (-1.0, 5.0)
    """
    width = like.shape[1]
    count = max(1, min(steps, width))
    lanczos = Lanczos(like, kept=count if direction or width <= max(_SMALL, steps) else 0)
    small, mark = tridiagonal(*lanczos.run(product, count))
    values, vectors = torch.linalg.eigh(small)
    smallest, largest = values[:, 0] + mark, values[:, -1] + mark
    with Autocast.current(like.device).off():
        least = (vectors[:, :, 0].to(like.dtype)[:, None] @ lanczos.basis)[:, 0] if direction else None
    return Extremes(smallest, largest, *outer_bounds(smallest, largest, width, count, failure), failure, least)


def outer_bounds(smallest: Tensor, largest: Tensor, width: int, steps: int, failure: float) -> tuple[Tensor, Tensor]:
    """Bounds on all eigenvalues from the extreme Ritz values after k steps, but for a probability."""
    share = missing_share(width, steps, failure / 2)
    spread = (largest - smallest) / (1 - 2 * share) if share < 0.5 else torch.full_like(largest, torch.inf)
    return smallest - share * spread, largest + share * spread


def missing_share(width: int, steps: int, failure: float) -> float:
    """The relative e by which k Lanczos steps underestimate the largest eigenvalue, but for a probability."""
    if steps >= width:
        return 0.0
    return (math.log(1.648 * math.sqrt(width) / failure) / (2 * steps - 1)) ** 2
