"""The largest eigenvalue of a positive semidefinite matrix, from above, by matrix products alone.

Plain Gram iteration squares ``A`` again and again and reads ``|A^(2^t)|_F^(1/2^t) >= lambda_max``. It is safe at every
step, but the many eigenvalues below the largest fade slowly. Squaring after a shift makes them fade twice as fast, as
Chebyshev polynomials do compared with monomials, and stays as safe:

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
``benchmarks/worst_spectra.py`` searches for the worst spectrum and finds that ``sqrt(lambda_max)`` is overestimated by

    ====  =======  =======  =======  =======  =======
     T     n = 8    n = 64  n = 128  n = 256  n = 512
    ====  =======  =======  =======  =======  =======
     3     0.7 %    2.4 %    3.3 %    4.2 %    5.3 %
     4     0.2 %    0.8 %    1.1 %    1.5 %    1.9 %
     7    0.01 %   0.03 %   0.04 %   0.08 %    0.1 %
    ====  =======  =======  =======  =======  =======

Hermitian matrices are kept in a *real form*. ``A = S + iT``, with ``S`` symmetric and ``T`` antisymmetric, is stored as
the real matrix ``X = S + T``. Nothing is lost, trace and Frobenius norm are those of ``A``, and the square of ``A`` is
stored as ``S X + T X' = X X - 2 T T``: half the arithmetic of a complex product.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gram_form(real: Tensor, imag: Tensor, difference: Tensor, total: Tensor) -> Tensor:
    """The real form of ``K K*`` for ``K = real + i imag``, given also ``real - imag`` and ``real + imag``.

    All of shape ``(batch, n, m)``; the result is ``(batch, n, n)``. The caller has the two combinations at no cost,
    from the same transform that makes ``real`` and ``imag``.
    """
    return torch.baddbmm(torch.bmm(real, difference.mT), imag, total.mT)


def eigenvalue_bound(form: Tensor, squarings: int, symmetric: bool = False) -> Tensor:
    """Upper bounds of the largest eigenvalues of positive semidefinite matrices.

    Args:
        form: ``(batch, n, n)``, the matrices in real form.
        squarings: number of products ``T`` of the iteration, at least 1; it fixes how tight the bound is.
        symmetric: the matrices are real, so their square is the plain product (half the work).

    Returns:
        ``(batch,)``, differentiable as often as wanted. A zero matrix gives (nearly) zero, with a finite gradient.
    """
    n = form.shape[-1]
    identity = torch.eye(n, dtype=form.dtype, device=form.device)
    x, inverse = _shifted(form, identity)
    norms: list[Tensor] = []
    for step in range(squarings):
        squared = torch.bmm(x, x) if symmetric else _squared(x)
        norms.append(torch.linalg.vector_norm(squared, dim=(-2, -1)))
        if step + 1 < squarings:
            x = torch.addcmul(identity, squared, norms[-1].pow(-2)[:, None, None], value=-2 * n)
    return _read(norms, inverse, n)


def _squared(x: Tensor) -> Tensor:
    """``S X + T X' = X X - 2 T T`` with ``2 T = X - X'``: one transposition to pay for, not three."""
    twice = x - x.mT
    return torch.baddbmm(torch.bmm(x, x), twice, twice, alpha=-0.5)


def _shifted(form: Tensor, identity: Tensor) -> tuple[Tensor, Tensor]:
    """``X_0 = 1 - A / h`` and ``1 / (2 h)``."""
    # Any positive h is valid. The floor keeps it positive for a zero matrix; and tr A >= |A|_F, which rounding can
    # break where a symbol vanishes, keeps it below |A|_F / 2. (Few operations: on a GPU each costs its launch.)
    size = torch.linalg.vector_norm(form, dim=(-2, -1)).clamp_min(torch.finfo(form.dtype).tiny ** 0.5)
    inverse = torch.maximum(form.diagonal(dim1=-2, dim2=-1).sum(-1), size) / size / size
    return torch.addcmul(identity, form, inverse[:, None, None], value=-2), inverse


def _read(norms: list[Tensor], inverse: Tensor, n: int) -> Tensor:
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
