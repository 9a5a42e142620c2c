"""The largest bound over all frequencies and its derivative, by a GPU in some thirty launches.

A sweep in half precision (:mod:`opteq.operators.half`) tells which frequencies may attain the maximum. The few with the
largest bounds are computed again in float32; the result is the largest of their values, or, if that is larger, the
largest bound of the others. The derivative is that of the winner alone. With ``D_t`` the derivative by
``M_t`` and ``W_t = (1 - c_t M_t) D_{t+1}``, all of them polynomials of the Gram matrix that commute,

    D_t = -2 c_t W_t + (derivative by c_t) (derivative of c_t by M_t),
    derivative by c_t = (derivative while the matrices stay) - 2 tr(W_t M_t),

where ``c_t = 2 n / |M_t|_F^2``, and ``c_0 = 2 tr M_0 / |M_0|_F^2``. That is one product for every squaring. A second
derivative, if one is asked for, is that of the plain operations at the same frequency.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opteq._autocast import Autocast
from opteq._fast import has_triton, settings
from opteq.operators.correlation import forms_by_products
from opteq.operators.gram import gram_form
from opteq.operators.half import Tiling, rounded_bounds

# How many frequencies are computed again in full precision; a power of two.
_CANDIDATES = 4
# In units of the mean eigenvalue, the trace of a Gram matrix is at most its side times the number of taps, which halves
# can hold. One program chooses among all frequencies, and all matrices are in memory at once.
_LARGEST, _MOST_PLACES, _MOST_NUMBERS = 60_000, 4096, 2**25
# Beyond this side, products of whole matrices keep a GPU busy by themselves. Very narrow matrices are not worth the
# seconds that compiling takes. (For 16 to 64 rows kernels take as long as tensor operations, but are far fewer: a step
# of mopteq-0.48m launches 900 less, which counts where others use the GPU too.)
_WIDEST, _NARROWEST = 1024, 16
# Tests set it, to run the kernels by Triton's interpreter on a CPU. (Those of solvers have a switch of their own, as
# bounds take the interpreter very long.)
_interpreted = False
# Products in float32 by three products on tensor cores.
_PRECISION = "tf32x3"


class Grid(NamedTuple):
    """Frequencies and the waves that belong to them.

    Attributes:
        table: ``(4, F, taps)``: cosine, sine, their difference and their sum.
        pairs: ``(F, taps^2)``: cosine less sine for all pairs of taps.
    """

    table: Tensor
    pairs: Tensor


def can_fuse(taps: Tensor, places: int) -> bool:
    """Whether :func:`largest_bound` serves ``taps (k1 * k2, groups, n, m)`` at as many frequencies times groups."""
    count, _, n, _ = taps.shape
    return (
        settings.fused
        and ((taps.is_cuda and settings.bounds and n >= _NARROWEST) or _interpreted)
        and taps.dtype == torch.float32
        and n <= _WIDEST
        and count * n <= _LARGEST
        and places <= _MOST_PLACES
        and places * n * n <= _MOST_NUMBERS
        and taps.numel() > 0
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and _has_kernels(taps.device)
    )


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    """Whether Triton is there, and a device with the tensor cores that the kernels are written for."""
    if not has_triton():
        return False
    return device.type != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0))


Again = Callable[[Tensor, Tensor, Tensor], Tensor]


def largest_bound(taps: Tensor, grid: Grid | None, squarings: int, again: Again) -> Tensor:
    """An upper bound of the squared norms of a symbol at all frequencies of a grid, over all groups.

    Args:
        taps: ``(k1 * k2, groups, n, m)`` in float32, with ``n <= m``; for a matrix, ``(1, 1, n, m)``.
        grid: the frequencies; None for a matrix.
        squarings: number of products.
        again: the plain operations, from taps, a frequency and a group ``(1,)`` to the bound ``(1,)`` there.
    """
    bound: Tensor = _Largest.apply(taps, grid, squarings, again)  # type: ignore[no-untyped-call]
    return bound


class _Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, taps: Tensor, grid: Grid | None, squarings: int, again: Again) -> Tensor:
        with torch.cuda.device_of(taps):  # type: ignore[no-untyped-call]  # kernels run on the current device
            length = torch.linalg.vector_norm(taps, dim=(0, 2, 3))
            if grid is None:
                form, picked, others = torch.bmm(taps[0], taps[0].mT), None, None
            else:
                form = _forms(taps, grid)
                bounds = rounded_bounds(form, length, squarings)
                picked, others = _chosen(bounds)
            result, winner, way = _best(form, length, squarings, picked, others)
        if ctx.needs_input_grad[0]:
            ctx.grid, ctx.again = grid, again
            ctx.save_for_backward(taps, winner, result, *way)
        return result[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        taps, winner, result, *way = ctx.saved_tensors
        with Autocast.current(taps.device).off():  # which may be on where the caller goes back
            if torch.is_grad_enabled():  # a second derivative may follow: give it the operations themselves
                value = ctx.again(taps, winner[1:2], winner[2:]).squeeze(0) * result[1]
                return torch.autograd.grad(value, taps, gradient, create_graph=True)[0], None, None, None
            with torch.cuda.device_of(taps):  # type: ignore[no-untyped-call]
                slope = _slope(result, winner, _Way(*way))
            return gradient * _to_taps(slope, taps, ctx.grid, winner), None, None, None


def _forms(taps: Tensor, grid: Grid) -> Tensor:
    """The Gram matrices ``(groups * F, n, n)`` in real form, with the fewer operations of two ways."""
    count, m, places = len(taps), taps.shape[3], len(grid.pairs)
    if count**2 * (m + places) < 2 * places * m:
        return forms_by_products(taps, grid.pairs)
    return gram_form(*torch.tensordot(grid.table, taps, dims=1).transpose(1, 2).flatten(1, 2))


def _chosen(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Where the largest bounds are, and the largest of the others ``(1,)``."""
    from opteq.operators import squaring_kernels as kernels

    number = min(_CANDIDATES, 1 << (len(bounds).bit_length() - 1))
    picked = torch.empty(number, dtype=torch.int64, device=bounds.device)
    others = torch.empty(1, dtype=bounds.dtype, device=bounds.device)
    padded = 1 << (len(bounds) - 1).bit_length()
    kernels.choose[(1,)](bounds, picked, others, len(bounds), MOST=number, PADDED=padded, num_warps=4)
    return picked, others


class _Way(NamedTuple):
    """What was computed on the way to a result: all powers of the matrices, sums over them, and rates of change."""

    powers: Tensor
    sums: Tensor
    rates: Tensor


def _best(
    form: Tensor, length: Tensor, squarings: int, picked: Tensor | None, others: Tensor | None
) -> tuple[Tensor, Tensor, _Way]:
    """The result with what it was raised by, ``(2,)``; place, frequency and group ``(3,)``; and the way to it."""
    from opteq.operators import squaring_kernels as kernels

    batch, n = len(form) if picked is None else len(picked), form.shape[-1]
    each = len(form) // len(length)
    device, tiling, levels = form.device, Tiling(n, 32), 1 << squarings.bit_length()
    pairs = tiling.pairs
    # M_0 to M_T, each as real and imaginary part; a real matrix has no imaginary part to keep.
    real = picked is None
    powers = torch.empty(squarings + 1, 1 if real else 2, batch, n, n, device=device)
    sums = torch.empty(squarings + 1, batch, 3, pairs, device=device)
    values, rates = torch.empty(batch, device=device), torch.empty(batch, 2, levels, device=device)
    winner, result = torch.empty(3, dtype=torch.int64, device=device), torch.empty(2, device=device)
    source, rest = (form, form) if picked is None or others is None else (picked, others)
    shape = _shape(real, tiling)
    product = _product(tiling, shape)
    grid = (pairs, batch)
    kernels.begin[grid](
        form, source, length, powers[0, 0], powers[0, -1], sums[0], n, each, pairs, PICKED=not real, **shape
    )
    for step in range(squarings):
        kernels.square[grid](
            powers[step, 0], powers[step, -1], powers[step + 1, 0], powers[step + 1, -1], sums[step], sums[step + 1],
            n, pairs, FIRST=step == 0, STORE=True, **product,
        )  # fmt: skip
    kernels.value[(batch,)](
        sums, source, length, values, rates, n, each, batch, pairs, PICKED=not real, T=squarings,
        EPS=torch.finfo(form.dtype).eps, LEVELS=levels, PARTS=tiling.padded, num_warps=1,
    )  # fmt: skip
    kernels.settle[(1,)](values, source, rest, winner, result, each, MOST=batch, PICKED=not real, num_warps=1)
    return result, winner, _Way(powers, sums, rates)


def _shape(real: bool, tiling: Tiling) -> dict[str, Any]:
    return {"REAL": real, "TILE": tiling.tile, "num_warps": 4}


def _product(tiling: Tiling, shape: dict[str, Any]) -> dict[str, Any]:
    # There are few programs, and nothing but the wait for memory: two warps and a third stage take two thirds of the
    # time of four and two (256 channels, an H200).
    return {"PRECISION": _PRECISION, "PARTS": tiling.padded, "K": 32, **shape, "num_stages": 3, "num_warps": 2}


def _slope(result: Tensor, winner: Tensor, way: _Way) -> Tensor:
    """The derivative ``(n, n)`` of the result by the winner's real form."""
    from opteq.operators import squaring_kernels as kernels

    powers, sums, rates = way
    squarings, n, device = len(powers) - 1, powers.shape[-1], powers.device
    tiling, levels = Tiling(n, 32), rates.shape[-1]
    pairs, shape = tiling.pairs, _shape(powers.shape[1] == 1, tiling)
    product = _product(tiling, shape)
    two = torch.empty(2, 2, n, n, device=device)
    traces = torch.empty(2, pairs, device=device)
    for step in reversed(range(squarings)):
        here, there = step % 2, 1 - step % 2
        kernels.slope[(pairs,)](
            powers[step, 0], powers[step, -1], powers[step + 1, 0], powers[step + 1, -1], *two[there], *two[here],
            winner, rates, traces[there], traces[here], n, pairs, step, TOP=step + 1 == squarings,
            LEVELS=levels, **product,
        )  # fmt: skip
    slope = torch.empty(n, n, device=device)
    kernels.finish[(pairs,)](
        powers[0, 0], powers[0, -1], *two[0], winner, rates, traces[0], sums[0], result, slope, n, pairs,
        LEVELS=levels, PARTS=tiling.padded, **shape,
    )  # fmt: skip
    return slope


def _to_taps(slope: Tensor, taps: Tensor, grid: Grid | None, winner: Tensor) -> Tensor:
    """The derivative by the taps, given that by the real form of the Gram matrix at one frequency."""
    if grid is None:
        return torch.addmm(taps[0, 0], slope, taps[0, 0], beta=0, alpha=2)[None, None]
    groups, n, m = taps.shape[1:]
    cos, sin, difference, total = grid.table.index_select(1, winner[1:2]).unbind()
    own = taps if groups == 1 else taps.index_select(1, winner[2:])
    waves = torch.cat([difference, total, -difference])
    symbols = (waves @ own.flatten(1)).reshape(3, n, m)
    # The form is R (R - I)' + I (R + I)' for the symbol R + iI; the rows are its derivatives by R and by I.
    slopes = slope.expand(2, n, n)
    by_symbol = torch.baddbmm(torch.bmm(slopes, symbols[:2]), slopes.mT, symbols[1:])
    by_own = (torch.cat([cos, sin]).mT @ by_symbol.flatten(1)).reshape(own.shape)
    return by_own if groups == 1 else torch.zeros_like(taps).index_copy(1, winner[2:], by_own)
