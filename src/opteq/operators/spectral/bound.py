"""Weights within a bound: a certified upper bound of a norm, and what brings it down.

At the frequency ``theta``, a kernel ``K`` with taps ``t`` acts as the matrix
``K^(theta) = sum_t K[:, :, t] e^(-i t.theta)``, its symbol.

**From a grid to the supremum.** For fixed unit vectors, ``u* K^(theta) v`` is, along an axis with ``k`` taps and after
a change of phase, a trigonometric polynomial of degree ``d = (k - 1) / 2`` that is real where its modulus is largest.
By M. Riesz's inequality it falls from its maximum no faster than ``cos(d theta)`` does, and of ``N`` equispaced points
one is within ``pi / N``. Hence supremum <= grid maximum / cos(pi d / N), once per axis. A real kernel has
``|K^(-theta)| = |K^(theta)|``, so half of the grid is enough.

**At each frequency** the norm is bounded from the Gram matrix. The sweep over frequencies runs without gradient; the
bound at the frequency that attains the maximum is then computed again with gradient. Nothing waits for a device.

**The largest eigenvalue** of a Gram matrix ``A``, from above, by matrix products alone. Plain Gram iteration squares
``A`` again and again and reads ``|A^(2^t)|_F^(1/2^t) >= lambda_max``. It is safe at every step, but the many
eigenvalues below the largest fade slowly. Squaring after a shift makes them fade twice as fast and stays as safe:

    X_0     = 1 - A / h,                h   = |A|_F^2 / (2 tr A)
    X_{t+1} = 1 - 2 X_t^2 / k_t,        k_t = |X_t^2|_F^2 / n

*Safe.* Let ``x_t`` be what becomes of one eigenvalue of ``A``. If ``-x_{t+1} <= u_{t+1}`` then
``|x_t| <= u_t = sqrt(k_t (1 + u_{t+1}) / 2)``, whatever the positive number ``k_t``; so a bound for the last matrix
gives one for the first, and ``lambda_max <= h (1 + u_0)``. The bound for the last is mean plus deviation: ``n`` real
numbers with mean ``m`` and variance ``v`` do not exceed ``m + sqrt((n - 1) v)``.

*Tight.* The shift is half of ``tr X^4 / tr X^2 <= x_max^2``, that is at most half of the largest square, so the largest
eigenvalue stays the largest in magnitude and its relative error at least halves with every squaring: never worse than
plain Gram iteration, ``n^(1 / 2^(T+2))`` on the norm after ``T`` squarings. With this choice every ``X_t`` has mean
square 1: nothing overflows, and mean and variance of the last matrix follow from ``k`` alone, so it is never formed.
By ``benchmarks/worst_spectra.py``, ``sqrt(lambda_max)`` is overestimated by at most 0.8, 1.1, 1.5 and 1.9 % with T = 4
and n = 64, 128, 256 and 512; by 2.4 % with T = 3 and n = 64, and by 0.1 % with T = 7.

Hermitian matrices are kept in a *real form*. ``A = S + iT``, with ``S`` symmetric and ``T`` antisymmetric, is stored as
the real matrix ``X = S + T``. Nothing is lost, trace and Frobenius norm are those of ``A``, and the square of ``A`` is
stored as ``S X + T X' = X X - 2 T T``: half the arithmetic of a complex product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from opteq.common.dynamo import constant
from opteq.states import Autocast

# Enough to come within 0.1 %; a single matrix is cheap.
_MATRIX_SQUARINGS = 7


def bounded(weight: Tensor, bound: float | None, *before: Tensor) -> Tensor:
    """``weight * min(1, bound / s)``: the weight itself, bit for bit, where its norm is within the bound.

    ``s`` is a norm of ``weight`` from above, or, with ``before``, of the product of ``weight`` and those factors,
    which broadcast against it (the norm then bounded is that of the product). Differentiable with respect to them all.

    >>> bounded(torch.tensor([[3.0, 0.0], [0.0, 0.1]]), 1.0)[0, 0] <= 1
    tensor(True)
    """
    if bound is None:
        return weight
    known = (known_scales.get() or {}).get(id(weight))
    scale = scale_for(bound, weight, *before) if known is None else known
    return (weight.to(scale.dtype) * scale).to(weight.dtype)


known_scales: ContextVar[dict[int, Tensor] | None] = ContextVar("known_scales", default=None)
"""Scales of :func:`bounded` that were computed already, by the identity of the weight."""


def scale_for(bound: float, weight: Tensor, *before: Tensor) -> Tensor:
    """The factor of :func:`bounded`: ``min(1, bound / s)``, exactly 1 where the norm is within the bound."""
    kernel, magnitude = normalise(weight, *before)
    norm, allowed = unit_norm(kernel), bound / magnitude
    # Of every entry: what is added has a norm of at most growth |abs K|.
    if growth := low_precision_rounding(weight.dtype):
        norm = norm + growth * unit_norm(kernel.abs().reshape(*kernel.shape[:2], -1).sum(dim=2))
    limits = torch.finfo(allowed.dtype)
    allowed = allowed.clamp_max(limits.max / 2)
    return allowed / torch.maximum(norm, allowed).clamp_min(limits.tiny)


def low_precision_rounding(dtype: torch.dtype) -> float:
    """The largest relative change of an entry when the bounded weight is rounded to a 16-bit format."""
    return torch.finfo(dtype).eps / 2 if torch.finfo(dtype).bits < 32 else 0.0


def normalise(weight: Tensor, *factors: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` in computing precision, divided by its largest magnitude, and that magnitude.

    With ``factors``, of the product of them all, in which every part is divided by its own magnitude first. The
    magnitude carries no gradient: norms are homogeneous, so derivatives come out right for any constant divisor.
    """
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    magnitude = torch.linalg.vector_norm(weight.detach(), math.inf).clamp_min(torch.finfo(weight.dtype).tiny ** 0.75)
    weight = weight / magnitude
    for factor in factors:
        unit, size = normalise(factor)
        weight, rest = normalise(weight * unit)
        magnitude = magnitude * rest * size
    return weight, magnitude


def unit_norm(kernel: Tensor, groups: int = 1, supremum: Callable[..., Tensor] | None = None) -> Tensor:
    """The norm, from above, of a kernel in computing precision whose entries are of order one.

    ``supremum`` bounds ``sup |K^|^2`` of taps and their size; it is :func:`squared_supremum` by default.
    """
    with Autocast.current(kernel.device).off():
        outputs, inputs, *size = kernel.shape
        taps = kernel.reshape(groups, outputs // groups, inputs, -1).movedim(-1, 0)
        if outputs // groups > inputs:  # A and A' have the same norm; the Gram matrix is on the smaller side
            taps = taps.mT
        taps = taps.contiguous()
        if taps.shape[0] == 1:
            squared = eigenvalue_bound(torch.bmm(taps[0], taps[0].mT), _MATRIX_SQUARINGS, symmetric=True).amax()
        else:
            squared = (supremum or squared_supremum)(taps, (size[0], size[1]))
        slack = 2**-11 if kernel.dtype == torch.float32 else 1e-9
        return squared.sqrt() * (1 + slack)


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


def squared_supremum(taps: Tensor, size: tuple[int, int], fine: bool = False) -> Tensor:
    """An upper bound of ``sup |K^|^2``, over frequencies and groups, differentiable; ``fine`` comes closer.

    ``taps`` are ``(k1 * k2, groups, n, m)`` with ``n <= m`` and entries of order one; ``size`` is ``(k1, k2)``.
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


def gram_form(real: Tensor, imag: Tensor, difference: Tensor, total: Tensor) -> Tensor:
    """The real form of ``K K*`` for ``K = real + i imag``, given also ``real - imag`` and ``real + imag``.

    All of shape ``(batch, n, m)``; the result is ``(batch, n, n)``. The caller has the two combinations at no cost,
    from the same transform that makes ``real`` and ``imag``.
    """
    return torch.baddbmm(torch.bmm(real, difference.mT), imag, total.mT)


def eigenvalue_bound(form: Tensor, squarings: int, symmetric: bool = False) -> Tensor:
    """Upper bounds ``(batch,)`` of the largest eigenvalues of positive semidefinite matrices, differentiable.

    ``form (batch, n, n)`` is their real form; ``squarings`` is T, at least 1. Where the matrices are ``symmetric``, and
    so real, their square is the plain product. A zero matrix gives (nearly) zero, with a finite gradient.
    """
    n = form.shape[-1]
    identity = torch.eye(n, dtype=form.dtype, device=form.device)
    x, inverse = _shift(form, identity)
    norms: list[Tensor] = []
    for step in range(squarings):
        squared = torch.bmm(x, x) if symmetric else _square(x)
        norms.append(torch.linalg.vector_norm(squared, dim=(-2, -1)))
        if step + 1 < squarings:
            x = torch.addcmul(identity, squared, norms[-1].pow(-2)[:, None, None], value=-2 * n)
    return _bound_from_norms(norms, inverse, n)


def _square(x: Tensor) -> Tensor:
    """``S X + T X' = X X - 2 T T`` with ``2 T = X - X'``: one transposition to pay for, not three."""
    twice = x - x.mT
    return torch.baddbmm(torch.bmm(x, x), twice, twice, alpha=-0.5)


def _shift(form: Tensor, identity: Tensor) -> tuple[Tensor, Tensor]:
    """``X_0 = 1 - A / h`` and ``1 / (2 h)``."""
    # Any positive h is valid. The floor keeps it positive for a zero matrix; and tr A >= |A|_F, which rounding can
    # break where a symbol vanishes, keeps it below |A|_F / 2. (Few operations: on a GPU each costs its launch.)
    size = torch.linalg.vector_norm(form, dim=(-2, -1)).clamp_min(torch.finfo(form.dtype).tiny ** 0.5)
    inverse = torch.maximum(form.diagonal(dim1=-2, dim2=-1).sum(-1), size) / size / size
    return torch.addcmul(identity, form, inverse[:, None, None], value=-2), inverse


def _bound_from_norms(norms: list[Tensor], inverse: Tensor, n: int) -> Tensor:
    """The bound of the largest eigenvalue after as many squarings as there are norms ``|X_t^2|_F``."""
    # The last matrix has mean 1 - 2/k and variance 4 (k - 1) / k^2, so u_{T-1}^2 = 1 + sqrt((n - 1) (k - 1)). Equal
    # eigenvalues give k = 1, where the root has no derivative and rounding may hide a small variance: hence the floor,
    # which a matrix of one entry needs as well.
    *halves, last = torch.stack(norms).square().mul(0.5 / n)
    top = ((2 * last - 1).clamp_min(torch.finfo(last.dtype).eps) * max(n - 1, 1)).sqrt().add(1).sqrt()
    for half in reversed(halves):
        top = torch.addcmul(half, half, top).sqrt()
    bound: Tensor = (1 + top) / (2 * inverse)
    return bound
