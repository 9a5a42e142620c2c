"""Extreme eigenvalues of symmetric operators per sample, with the probability that a bound on them fails."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.solvers.linear.base import Product
from opteq.states import row_norms


@dataclass(frozen=True)
class Extremes:
    """The ends of the spectrum of a symmetric operator, one pair per row.

    Ritz values lie inside the spectrum, so they bound its ends from one side only. The bounds from outside hold for
    each row with the stated probability over the random start.

    Attributes:
        smallest, largest: the extreme Ritz values ``(R,)``: the smallest eigenvalue is at most ``smallest``.
        lower, upper: all eigenvalues of a row lie in ``[lower, upper]``, with probability at least ``1 - failure``.
        direction: unit vectors ``(R, N)`` with Rayleigh quotient ``smallest``.
    """

    smallest: Tensor
    largest: Tensor
    lower: Tensor
    upper: Tensor
    failure: float
    direction: Tensor


@torch.no_grad()
def extreme_eigenvalues(
    product: Product, like: Tensor, steps: int = 30, failure: float = 1e-3, seed: int = 0
) -> Extremes:
    """The extreme eigenvalues of a symmetric operator by Lanczos steps with full orthogonalisation.

    After k steps from a random start in dimension n the largest eigenvalue of a positive semidefinite matrix is
    underestimated by a relative e with probability at most ``1.648 sqrt(n) exp(-sqrt(e) (2k - 1))`` (Kuczynski and
    Wozniakowski 1992). Here the operator is shifted by its ends, and e follows from ``failure``.

    Args:
        product: applies the operator to ``(R, N)``, every row by itself.
        like: a tensor ``(R, N)`` that gives shape, dtype and device.
        steps: products; at most N are made.
        failure: probability that a bound may fail for a row.
        seed: of the random start, which is the same for all rows: a batch equals its samples one by one.

    >>> matrix = torch.diag(torch.tensor([-1.0, 2.0, 5.0]))
    >>> found = extreme_eigenvalues(lambda rows: rows @ matrix, torch.zeros(1, 3))
    >>> round(float(found.smallest), 4), round(float(found.largest), 4)
    (-1.0, 5.0)
    """
    width = like.shape[1]
    count = max(1, min(steps, width))
    diagonal, beside, basis = tridiagonal(product, like, count, seed, orthogonal=True)
    small = torch.diag_embed(diagonal) + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    # A row that is not finite gets NaN for an answer; LAPACK would raise for all of them.
    sound = torch.isfinite(small).all(dim=2).all(dim=1)
    values, vectors = torch.linalg.eigh(torch.where(sound[:, None, None], small, 0.0))
    values = torch.where(sound[:, None], values, torch.nan)
    smallest, largest = values[:, 0], values[:, -1]
    direction = (vectors[:, :, 0].to(basis.dtype)[:, None] @ basis)[:, 0]
    share = missing_share(width, count, failure / 2)
    spread = (largest - smallest) / (1 - 2 * share) if share < 0.5 else torch.full_like(largest, torch.inf)
    return Extremes(smallest, largest, smallest - share * spread, largest + share * spread, failure, direction)


def missing_share(width: int, steps: int, failure: float) -> float:
    """The relative e by which k Lanczos steps underestimate the largest eigenvalue, but for a probability."""
    if steps >= width:
        return 0.0
    return (math.log(1.648 * math.sqrt(width) / failure) / (2 * steps - 1)) ** 2


@torch.no_grad()
def largest_magnitude(product: Product, like: Tensor, steps: int = 8, seed: int = 0) -> Tensor:
    """An estimate of the largest magnitude of an eigenvalue, one per row, from a few Lanczos steps.

    It lies below the truth but for 1 %. Nothing here waits for a device: the eigenvalue of the small tridiagonal matrix
    comes from the trace of a high power of it.
    """
    diagonal, beside, _ = tridiagonal(product, like, max(1, min(steps, like.shape[1])), seed)
    power = torch.diag_embed(diagonal) + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    scale = power.new_zeros(power.shape[0])
    exponent = 1.0
    for _ in range(8):  # to the power of 256; the trace is at most k times the largest eigenvalue of that
        size = torch.linalg.matrix_norm(power).clamp_min(torch.finfo(power.dtype).tiny)
        scale = scale + size.log() / exponent
        power = power / size[:, None, None]
        power = power @ power
        exponent *= 2
    trace = power.diagonal(dim1=1, dim2=2).sum(dim=1).clamp_min(torch.finfo(power.dtype).tiny)
    return (scale + trace.log() / exponent).exp()


def tridiagonal(
    product: Product, like: Tensor, count: int, seed: int = 0, orthogonal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Diagonal ``(R, k)`` and off-diagonal ``(R, k - 1)`` in float64, and the basis ``(R, k, N)`` where it was kept."""
    wide = torch.float32 if like.device.type == "mps" else torch.float64
    first = random_start(like, seed)
    current = (first / torch.linalg.vector_norm(first).clamp_min(torch.finfo(first.dtype).tiny)).expand_as(like)
    basis = like.new_zeros(like.shape[0], count if orthogonal else 0, like.shape[1])
    before, size = torch.zeros_like(current), torch.zeros(like.shape[0], dtype=wide, device=like.device)
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    ended = torch.zeros_like(size, dtype=torch.bool)
    scale = torch.zeros_like(size)
    for step in range(count):
        if orthogonal:
            basis[:, step] = current
        image = product(current)
        quotient = (image * current).sum(dim=1, dtype=wide)
        # An invariant subspace has been found: what follows is filled with a value from inside the spectrum.
        diagonal.append(torch.where(ended, diagonal[0], quotient) if diagonal else quotient)
        rest = image - quotient.to(image.dtype)[:, None] * current - size.to(image.dtype)[:, None] * before
        for _ in range(2 if orthogonal else 0):
            shares = (basis[:, : step + 1] @ rest[:, :, None])[:, :, 0]
            rest = rest - (shares[:, None] @ basis[:, : step + 1])[:, 0]
        size = row_norms(rest).to(wide)
        scale = torch.maximum(scale, torch.maximum(quotient.abs(), size))
        ended = ended | (size <= 32 * torch.finfo(like.dtype).eps * scale)
        size = torch.where(ended, 0.0, size)
        if step + 1 < count:
            beside.append(size)
        before = current
        current = torch.where(ended[:, None], 0.0, rest / torch.where(ended, 1.0, size).to(rest.dtype)[:, None])
    off = torch.stack(beside, dim=1) if beside else size.new_zeros(size.shape[0], 0)
    return torch.stack(diagonal, dim=1), off, basis


def random_start(like: Tensor, seed: int = 0) -> Tensor:
    """Normal numbers ``(N,)`` of a seed, the same inside of torch.func, whose vmap refuses to draw any."""
    with torch._C._DisableFuncTorch():
        generator = torch.Generator(device=like.device).manual_seed(seed)
        return torch.randn(like.shape[1], generator=generator, device=like.device, dtype=like.dtype)
