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

*The derivative* is in closed form too. All the matrices are polynomials of ``A`` and commute, so what a tape would
multiply from both sides is multiplied from one: if ``G`` is the derivative by ``X_{t+1}``, that by ``X_t`` is
``2 X_t H`` with ``H = (derivative by |X_t^2|_F) X_t^2 / |X_t^2|_F - 2 G / k_t``, one product for every squaring.
"""

from __future__ import annotations

from typing import Any

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
    taped = torch.is_grad_enabled() and form.requires_grad
    if taped and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
        bound: Tensor = _Bound.apply(form, squarings, symmetric)  # type: ignore[no-untyped-call]
        return bound
    return _read(*_squarings(form, squarings, symmetric))


class _Bound(torch.autograd.Function):
    """The bound with its derivative in closed form, which takes a third of the products of a tape."""

    @staticmethod
    def forward(ctx: Any, form: Tensor, squarings: int, symmetric: bool) -> Tensor:
        powers: list[tuple[Tensor, ...]] = []
        norms, inverse, n = _squarings(form, squarings, symmetric, powers)
        ctx.save_for_backward(form, inverse, *norms, *(matrix for power in powers for matrix in power))
        ctx.squarings, ctx.symmetric = squarings, symmetric
        return _read(norms, inverse, n)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        form, inverse, *rest = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative may follow: give it the operations themselves
            value = _read(*_squarings(form, ctx.squarings, ctx.symmetric))
            return torch.autograd.grad(value, form, gradient, create_graph=True)[0], None, None
        norms, matrices = rest[: ctx.squarings], rest[ctx.squarings :]
        size = len(matrices) // ctx.squarings
        powers = [matrices[size * t : size * (t + 1)] for t in range(ctx.squarings)]
        return _slope(form, inverse, norms, powers, gradient), None, None


def _squarings(
    form: Tensor, squarings: int, symmetric: bool, powers: list[tuple[Tensor, ...]] | None = None
) -> tuple[list[Tensor], Tensor, int]:
    """What :func:`_read` takes; ``powers`` receives ``2 X``, or its two parts ``2 S`` and ``2 T``, and ``X^2``."""
    n = form.shape[-1]
    identity = torch.eye(n, dtype=form.dtype, device=form.device)
    x, inverse = _shifted(form, identity)
    norms: list[Tensor] = []
    for step in range(squarings):
        if symmetric:
            squared, twice = torch.bmm(x, x), x
        else:
            # S X + T X' = X X - 2 T T, and 2 T = X - X': one transposition to pay for, not three.
            twice = x - x.mT
            squared = torch.baddbmm(torch.bmm(x, x), twice, twice, alpha=-0.5)
        if powers is not None:
            powers.append((2 * x, squared) if symmetric else (torch.sub(2 * x, twice), twice, squared))
        norms.append(torch.linalg.vector_norm(squared, dim=(-2, -1)))
        if step + 1 < squarings:
            x = torch.addcmul(identity, squared, norms[-1].pow(-2)[:, None, None], value=-2 * n)
    return norms, inverse, n


def _slope(form: Tensor, inverse: Tensor, norms: list[Tensor], powers: list[list[Tensor]], gradient: Tensor) -> Tensor:
    """The derivative of the bound by ``form``, given what the squarings left behind."""
    n = form.shape[-1]
    with torch.enable_grad():  # of a few numbers
        leaves = [number.detach().requires_grad_() for number in (*norms, inverse)]
        *by_norms, by_inverse = torch.autograd.grad(_read(leaves[:-1], leaves[-1], n), leaves, gradient)
    slope: Tensor | None = None
    for (*x, squared), norm, by_norm in zip(reversed(powers), reversed(norms), reversed(by_norms), strict=True):
        if slope is None:
            inner = squared * (by_norm / norm)[:, None, None]
        else:
            shrink = -2 * n / norm.square()
            # X_{t+1} = 1 + shrink X_t^2, and shrink depends on the norm as well.
            by_norm = by_norm - 2 * shrink / norm * (slope * squared).sum(dim=(-2, -1))
            inner = torch.addcmul(slope * shrink[:, None, None], squared, (by_norm / norm)[:, None, None])
        # The real form of the product of Hermitian matrices H and S + iT is H S + H' T.
        slope = torch.bmm(inner, x[0])
        if len(x) == 2:
            slope = torch.baddbmm(slope, inner.mT, x[1])
    assert slope is not None
    by_inverse = by_inverse - 2 * (slope * form).sum(dim=(-2, -1))
    return slope * (-2 * inverse)[:, None, None] + _by_inverse(form, inverse, by_inverse)


def _by_inverse(form: Tensor, inverse: Tensor, gradient: Tensor) -> Tensor:
    """The derivative of :func:`_shifted`'s second result, times ``gradient``."""
    floor = torch.finfo(form.dtype).tiny ** 0.5
    size = torch.linalg.vector_norm(form, dim=(-2, -1))
    trace = form.diagonal(dim1=-2, dim2=-1).sum(-1)
    by_size = torch.where(size > floor, gradient * inverse / size.clamp_min(floor).square(), 0)
    wide = trace > size  # else the inverse is 1 / size, of which the trace is no part
    found = form * (by_size * torch.where(wide, -2, -1))[:, None, None]
    by_trace = torch.where(wide, gradient / size.clamp_min(floor).square(), 0)
    found.diagonal(dim1=-2, dim2=-1).add_(by_trace[:, None])
    return found


@torch.no_grad()
def bounds_above(form: Tensor, squarings: int, best: Tensor) -> tuple[Tensor, Tensor]:
    """Those values of :func:`eigenvalue_bound` that exceed ``best``, and where they are.

    The bound is read after every squaring. A matrix for which it does not exceed ``best`` is left out from then on:
    its largest eigenvalue is no larger either. (This waits for the device at every squaring.)

    Returns:
        Bounds ``(some,)`` and their indices in the batch.
    """
    x, inverse = _shifted(form, torch.eye(form.shape[-1], dtype=form.dtype, device=form.device))
    where = torch.arange(len(form), device=form.device)
    norms: list[Tensor] = []
    for _ in range(squarings):
        twice = x - x.mT
        squared = torch.bmm(x, x).baddbmm_(twice, twice, alpha=-0.5)
        norms.append(torch.linalg.vector_norm(squared, dim=(-2, -1)))
        # A bound that is not a number has to be seen, so what is left out is what does not exceed, not the rest.
        keep = ~(_read(norms, inverse, form.shape[-1]) <= best)
        count = int(keep.sum())
        if count < len(where):
            where, inverse, squared = where[keep], inverse[keep], squared[keep]
            norms = [norm[keep] for norm in norms]
        if count == 0:
            break
        x = squared.mul_(norms[-1].pow(-2).mul(-2 * form.shape[-1])[:, None, None])
        x.diagonal(dim1=-2, dim2=-1).add_(1)
    return _read(norms, inverse, form.shape[-1]), where


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
