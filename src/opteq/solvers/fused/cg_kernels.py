"""Passes over memory of conjugate gradients for ``(I - S) v = rhs``, and the judgement between them.

The first two passes find the lengths of right sides and divide by them. A step is three more beside the product with S:
the curvature along the direction, the new answer and residual with their norms, and, once one program a row has judged
them, the next direction. The answer before the first step is zero, and its residual is the direction: neither is
written down.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl

from opteq.solvers.fused.rows import (
    ACTIVE,
    BEST,
    BETA,
    PENDING,
    RESIDUAL,
    SAVE,
    SIZE,
    SQUARE,
    STEPS,
    entries,
    open_flags,
    record,
    total,
)


@triton.jit
def cg_squares(rhs, squares, width, first, parts, BLOCK: tl.constexpr):
    """This program's share of the squared lengths of right sides, in float64, which can hold those of float32."""
    part, row, _, inside, at = entries(width, BLOCK)
    r = tl.load(rhs + at, mask=inside, other=0.0).to(tl.float64)
    tl.store(squares + row * parts + first + part, tl.sum(r * r, axis=0))


@triton.jit
def cg_begin(
    rhs, lengths, direction, low, scale, flags, numbers, trace, rows, width, parts, tol, NON_FINITE: tl.constexpr,
    FIRST: tl.constexpr, SQUARED: tl.constexpr, NARROW: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The first direction: the right side, of length one or zero. ``FIRST`` enters the row, and its ``scale``.

    ``lengths`` are those of right sides, or what adds up to their squares.
    """
    part, row, _, inside, at = entries(width, BLOCK)
    if SQUARED:
        length = tl.sqrt(total(lengths + row * parts, parts, P))
    else:
        length = tl.load(lengths + row)
    finite = length < float("inf")  # false for NaN
    some = finite & (length > 0)
    usable = tl.where(some, length, 1.0)
    r = tl.load(rhs + at, mask=inside, other=0.0).to(tl.float64)
    if SQUARED:  # lengths of float32 have an inverse, and numbers to spare; a division takes a GPU much longer
        r = (r * (1.0 / usable)).to(WIDE)
    else:
        r = (r / usable).to(WIDE)
    tl.store(direction + at, r, mask=inside)
    if NARROW:
        tl.store(low + at, r.to(low.dtype.element_ty), mask=inside)
    if FIRST and part == 0:
        tl.store(scale + row, usable.to(WIDE))
        size = tl.where(finite, tl.where(some, 1.0, 0.0).to(tl.float64), length)
        tl.store(numbers + SQUARE * rows + row, size)
        tl.store(numbers + RESIDUAL * rows + row, size)
        tl.store(numbers + BEST * rows + row, tl.where(finite, size, float("inf")))
        tl.store(numbers + SIZE * rows + row, 0.0)
        open_flags(flags, rows, row, finite & (size > tol), tl.where(finite, 0, NON_FINITE))
        tl.store(trace + row, size)


@triton.jit
def cg_curvature(direction, product, flags, sums, rows, width, first, parts, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """``<d, d - S d>``, where the system is ``I - S``."""
    part, row, _, inside, at = entries(width, BLOCK)
    if tl.load(flags + ACTIVE * rows + row) != 0:
        d = tl.load(direction + at, mask=inside, other=0.0).to(WIDE)
        s = tl.load(product + at, mask=inside, other=0.0).to(WIDE)
        tl.store(sums + row * 3 * parts + first + part, tl.sum(d * (d - s), axis=0))


@triton.jit
def _chosen(place, point, before, best, step, at, inside, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Entries of the answer of ``step`` (1), of the one before it (2), or of the best so far (0)."""
    kept = tl.zeros((BLOCK,), dtype=WIDE)
    if place == 0:
        kept = tl.load(best + at, mask=inside, other=0.0)
    if (place == 1) & (step > 0):
        kept = tl.load(point + at, mask=inside, other=0.0)
    if (place == 2) & (step > 1):
        kept = tl.load(before + at, mask=inside, other=0.0)
    return kept


@triton.jit(do_not_specialize=["step"])
def cg_update(
    direction, product, residual, point, following, best, flags, numbers, sums, step, rows, width, first, parts,
    P: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``x + a d`` and ``r - a (d - S d)`` with their norms, and the copies that the last judgement asked for.

    ``point`` is the answer of the step before this one; ``following`` has the one before that, until it is written.
    """
    part, row, _, inside, at = entries(width, BLOCK)
    save = tl.load(flags + SAVE * rows + row)
    active = tl.load(flags + ACTIVE * rows + row)  # both under way at once
    if save != 0:
        kept = _chosen(save, point, following, best, step - 1, at, inside, WIDE, BLOCK)
        tl.store(best + at, kept, mask=inside)
    if active != 0:
        mine = sums + row * 3 * parts
        curvature = total(mine, parts, P)
        square = tl.load(numbers + SQUARE * rows + row)
        length = tl.where(curvature > 0, square / tl.where(curvature > 0, curvature, 1.0), 0.0).to(WIDE)
        d = tl.load(direction + at, mask=inside, other=0.0)
        s = tl.load(product + at, mask=inside, other=0.0).to(WIDE)
        x = length * d
        r = d
        if step > 1:
            x += tl.load(point + at, mask=inside, other=0.0)
            r = tl.load(residual + at, mask=inside, other=0.0)
        r -= length * (d - s)
        tl.store(following + at, x, mask=inside)
        tl.store(residual + at, r, mask=inside)
        tl.store(mine + parts + first + part, tl.sum(r * r, axis=0))
        tl.store(mine + 2 * parts + first + part, tl.sum(x * x, axis=0))


@triton.jit(do_not_specialize=["step"])
def cg_judge(
    sums, parts, flags, numbers, trace, step, rows, tol, eps, NON_FINITE: tl.constexpr, INDEFINITE: tl.constexpr,
    SINGULAR: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Judge the newest answer of one row, as ``judge`` does."""
    row = tl.program_id(0)
    residual = tl.load(numbers + RESIDUAL * rows + row)
    if tl.load(flags + ACTIVE * rows + row) != 0:
        mine = sums + row * 3 * parts
        curvature = total(mine, parts, P)
        after = total(mine + parts, parts, P)
        length = tl.sqrt(total(mine + 2 * parts, parts, P))
        square = tl.load(numbers + SQUARE * rows + row)
        size = tl.load(numbers + SIZE * rows + row)
        slope = curvature / tl.where(square == 0, 1.0, square)
        size = tl.where(slope > size, slope, size)
        lost = eps * size * length > 1e-3
        residual = tl.where(lost, float("inf"), tl.sqrt(after))
        ends = tl.where(lost, SINGULAR, 0)
        ends = tl.where(curvature <= 0, INDEFINITE, ends)
        ends = tl.where(tl.abs(curvature) < float("inf"), ends, NON_FINITE)
        best = tl.load(numbers + BEST * rows + row)
        steps = tl.load(flags + STEPS * rows + row)
        was_pending = tl.load(flags + PENDING * rows + row) != 0
        record(flags, numbers, rows, row, residual, best, ends, steps, was_pending, tol)
        tl.store(numbers + SIZE * rows + row, size)
        tl.store(numbers + SQUARE * rows + row, after)
        tl.store(numbers + BETA * rows + row, tl.where(square == 0, 0.0, after / tl.where(square == 0, 1.0, square)))
        tl.store(numbers + RESIDUAL * rows + row, residual)
    else:
        tl.store(flags + SAVE * rows + row, 0)
    tl.store(trace + step * rows + row, residual)


@triton.jit
def cg_direction(
    residual, direction, low, flags, numbers, rows, width, NARROW: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """``d <- r + b d``, and its copy in the precision of products where that is less."""
    _, row, _, inside, at = entries(width, BLOCK)
    if tl.load(flags + ACTIVE * rows + row) != 0:
        beta = tl.load(numbers + BETA * rows + row).to(WIDE)
        r = tl.load(residual + at, mask=inside, other=0.0)
        d = tl.load(direction + at, mask=inside, other=0.0)
        d = r + beta * d
        tl.store(direction + at, d, mask=inside)
        if NARROW:
            tl.store(low + at, d.to(low.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["step"])
def cg_settle(
    point, before, best, added, out, scale, flags, step, rows, width, ADDED: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The best answers, for right sides as they came, and what is ``added`` to them. Nothing else is changed."""
    _, row, _, inside, at = entries(width, BLOCK)
    pending = tl.load(flags + PENDING * rows + row)
    place = tl.where(pending != 0, 1, tl.load(flags + SAVE * rows + row))
    x = _chosen(place, point, before, best, step, at, inside, WIDE, BLOCK) * tl.load(scale + row)
    if ADDED:
        x += tl.load(added + at, mask=inside, other=0.0).to(WIDE)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)
