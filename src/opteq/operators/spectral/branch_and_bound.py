"""The supremum of a symbol's norm over all frequencies, closely: frequencies are cut into cells, and cells excluded.

A cell is a diamond, ``|d1 (theta1 - c1)| + |d2 (theta2 - c2)| <= r`` for a kernel of degrees ``d = (k - 1) / 2``. If
the supremum is attained in it, then at its centre the norm is at least ``supremum * cos(r)``: along the line from the
one place to the other, ``u* K^ v`` is, after a change of phase, a function of exponential type ``r`` that is real where
its modulus is largest, and such functions fall from their maximum no faster than the cosine does (Duffin and Schaeffer;
M. Riesz for polynomials). The centre is reached in one go, so the two axes share one cosine. (A cosine each would do
only for the largest value on a whole grid, not for a cell: the symbol ``cos(theta1 + theta2)`` falls faster.)

So a cell is excluded for a level ``s`` if ``|K^(centre)| <= s cos(r)``: the supremum lies elsewhere, or below ``s``.
A Cholesky factor of ``s^2 cos(r)^2 - K^ K^*`` proves it if it exists, for a fifth of the arithmetic of one
squaring of the matrix. Cells that cannot be excluded are quartered. Of the smallest cells that are left, if any, the
norm is bounded as in training.

The level is set just above a lower bound of the supremum, the largest norm at the centres of the first cells; how far
it lies from the highest peak costs time, never safety. For a CPU, and not differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from opteq.operators.spectral.bound import eigenvalue_bound

# Centres per degree and axis at first, and how often cells are halved. At last r = 2 pi / 88, whose cosine costs
# 0.26 %; the level lies a little more than that above the lower bound, so that the smallest cells can be excluded.
_FIRST, _HALVINGS, _MARGIN = 22, 2, 1.003
_SQUARINGS = 7
# Frequencies whose eigenvalues are computed, and the power steps at all of them that choose these.
_BEST, _POWER_STEPS = 8, 12
_CHUNK = 2**18


@torch.no_grad()
def close_supremum(taps: Tensor, size: tuple[int, int]) -> Tensor:
    """An upper bound of ``sup |K^|^2``, over frequencies and groups, within 0.6 % (0.3 % on the norm).

    ``taps`` are ``(k1 * k2, groups, n, m)`` with ``n <= m``, finite, of order one; ``size`` is ``(k1, k2)``.
    """
    gram = Autocorrelation(taps, size)
    degrees = [(k - 1) / 2 for k in size]
    numbers = [2 * math.ceil(_FIRST * d / 2) for d in degrees]
    # Half diagonals of the cells, and their centres: every other point of a grid, one of two that mirror each other.
    reach = torch.tensor([2 * math.pi / n if n else 0.0 for n in numbers], dtype=torch.float64)
    n1, n2 = (max(1, n) for n in numbers)
    points = [(i, j) for i in range(n1) for j in range(i % 2, n2, 2) if (i, j) <= (-i % n1, -j % n2)]
    centres = torch.tensor(points, dtype=torch.float64) * reach
    corners = [(0.5 * sign, 0.0) for sign in (-1, 1) if degrees[0]] + [
        (0.0, 0.5 * sign) for sign in (-1, 1) if degrees[1]
    ]
    quarters = torch.tensor(corners, dtype=torch.float64)

    level = (_largest_at(gram, centres) * _MARGIN**2).clamp_min(torch.finfo(taps.dtype).tiny ** 0.5)
    for halving in range(_HALVINGS + 1):
        if halving:
            centres = (centres[:, None] + quarters * reach).flatten(0, 1)
            reach = reach / 2
        gap = math.cos(max(d * float(r) for d, r in zip(degrees, reach, strict=True))) ** 2
        centres = centres[~_excluded(gram, centres, level * gap)]
        if len(centres) == 0:
            return level
    best = level * gap
    for S, T in _matrices(gram, centres):
        best = torch.maximum(best, eigenvalue_bound(S.add_(T), _SQUARINGS).max())
    return best / gap


def _matrices(gram: Autocorrelation, frequencies: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The Gram matrices, some at a time."""
    for part in torch.split(frequencies, max(1, _CHUNK // (gram.groups * gram.n**2))):
        yield gram.at(gram.waves(part))


def _excluded(gram: Autocorrelation, frequencies: Tensor, level: Tensor) -> Tensor:
    """Whether all groups' Gram matrices are below ``level`` times the identity: ``(F,)``."""
    identity = level * torch.eye(gram.n, dtype=gram.even.dtype)
    failures = []
    for S, T in _matrices(gram, frequencies):
        rest = torch.complex(identity - S, T)  # the conjugate of what it should be, which has the same eigenvalues
        failures.append(torch.linalg.cholesky_ex(rest).info.reshape(-1, gram.groups))
    return (torch.cat(failures) == 0).all(dim=1)


def _largest_at(gram: Autocorrelation, frequencies: Tensor) -> Tensor:
    """A lower bound of the supremum: the largest eigenvalue at those frequencies where power steps find most."""
    n, dtype = gram.n, gram.even.dtype
    # Quadratic phases: a vector with no regularity that an eigenvector could be orthogonal to by symmetry.
    start = torch.polar(torch.ones(n, dtype=dtype), torch.arange(n).square().to(dtype))[:, None]
    sizes = torch.cat([_power_estimate(torch.complex(S, T), start) for S, T in _matrices(gram, frequencies)])
    best = sizes.topk(min(_BEST, len(sizes))).indices
    parts = (part.reshape(-1, gram.groups, n, n) for part in gram.at(gram.waves(frequencies[best // gram.groups])))
    S, T = (part[torch.arange(len(best)), best % gram.groups] for part in parts)
    largest: Tensor = torch.linalg.eigvalsh(torch.complex(S, T)).max()
    return largest


def _power_estimate(A: Tensor, u: Tensor) -> Tensor:
    """The length of ``A^k u`` with all but the last product normalised: an estimate of the largest eigenvalue."""
    for _ in range(_POWER_STEPS):
        u = A @ (u / torch.linalg.vector_norm(u, dim=-2, keepdim=True).clamp_min(torch.finfo(A.real.dtype).tiny))
    lengths: Tensor = torch.linalg.vector_norm(u, dim=(1, 2))
    return lengths


class Autocorrelation:
    """The Gram matrices of a convolution at many frequencies, from few matrix products.

    ``K^(theta) K^(theta)* = sum over s of C_s e^(i s.theta)``, where ``C_s`` sums ``K_t K_{t+s}'`` over the taps ``t``
    for which ``t + s`` is a tap too: the kernel's autocorrelation. As ``C_{-s} = C_s'``, half of the shifts are enough.
    At a frequency the real part is ``C_0 + sum over s of cos(s.theta) (C_s + C_s')`` and the imaginary one
    ``sum over s of sin(s.theta) (C_s - C_s')``.
    """

    def __init__(self, taps: Tensor, size: tuple[int, int]) -> None:
        k1, k2 = size
        _, self.groups, self.n, m = taps.shape
        rows = taps.reshape(k1, k2, self.groups, self.n, m).permute(2, 3, 0, 1, 4)
        even, odd = [], []
        self.shifts = [(a, b) for a in range(k1) for b in range(0 if a == 0 else 1 - k2, k2)]
        for a, b in self.shifts:
            here, there = rows[:, :, : k1 - a, max(-b, 0) : k2 - max(b, 0)], rows[:, :, a:, max(b, 0) : k2 + min(b, 0)]
            product = torch.einsum("gnijm,gkijm->gnk", here, there)
            if (a, b) == (0, 0):
                even.append(product)
            else:
                mirrored = product.mT.contiguous()
                even.append(product + mirrored)
                odd.append(product - mirrored)
        self.even = torch.stack(even).flatten(1)
        self.odd = torch.stack(odd).flatten(1)

    def waves(self, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``(F, shifts)`` for frequencies ``(F, 2)`` in float64; what the other methods take."""
        angles = frequencies @ torch.tensor(self.shifts, dtype=torch.float64, device=frequencies.device).mT
        return angles.cos().to(self.even), angles[:, 1:].sin().to(self.even)

    def at(self, waves: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Real and imaginary part of the Gram matrices, each ``(F * groups, n, n)``."""
        shape = (len(waves[0]) * self.groups, self.n, self.n)
        return (waves[0] @ self.even).reshape(shape), (waves[1] @ self.odd).reshape(shape)
