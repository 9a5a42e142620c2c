"""Passes over memory of conjugate gradients for ``(I - S) v = rhs``, and the decision between them.

The first two passes find the lengths of right sides and divide by them. A step is three more beside the product with S:
the curvature along the direction, the new residual with its norm, and, once one program per row has checked it, the
next direction.

*No answer is written down.* It is the sum of all directions, each times the length of its step, so the last few
directions are kept, in the precision of products, and whoever asks for an answer adds them up. Only where their places
are used again, the sum so far is formed (``FOLD``). Then the best answer is the sum up to a certain step, which is one
number a row. What a row has in memory, from the last step that was folded in, ``f``:

* ``point``, the answer of step ``f``, if there was one; ``best``, the best one, where it is from before ``f``;
* the directions of the steps after ``f``, that of step ``k`` in place ``(k - 1) % KEPT``.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl

from opteq.engine.triton.row_state_kernels import (
    ACTIVE,
    ALONG,
    BEST,
    BEST_STEP,
    BETA,
    LENGTH,
    PENDING,
    RESIDUAL,
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
    rhs, lengths, direction, scale, flags, numbers, trace, rows, width, parts, tol,
    NON_FINITE: tl.constexpr, FIRST: tl.constexpr, SQUARED: tl.constexpr, P: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
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
    r = _divided(tl.load(rhs + at, mask=inside, other=0.0), usable, SQUARED, WIDE)
    tl.store(direction + at, r.to(direction.dtype.element_ty), mask=inside)
    if FIRST and part == 0:
        tl.store(scale + row, usable)
        size = tl.where(finite, tl.where(some, 1.0, 0.0).to(tl.float64), length)
        tl.store(numbers + SQUARE * rows + row, size)
        tl.store(numbers + RESIDUAL * rows + row, size)
        tl.store(numbers + BEST * rows + row, tl.where(finite, size, float("inf")))
        tl.store(numbers + SIZE * rows + row, 0.0)
        tl.store(numbers + LENGTH * rows + row, 0.0)
        tl.store(numbers + ALONG * rows + row, 0.0)
        open_flags(flags, rows, row, finite & (size > tol), tl.where(finite, 0, NON_FINITE))
        tl.store(trace + row, size)


@triton.jit
def _divided(r, length, SQUARED: tl.constexpr, WIDE: tl.constexpr):
    """Entries of a right side for its length one."""
    if SQUARED:  # lengths of float32 have an inverse, and numbers to spare; a division takes a GPU much longer
        found = (r.to(tl.float64) * (1.0 / length)).to(WIDE)
    else:
        found = (r.to(tl.float64) / length).to(WIDE)
    return found


@triton.jit
def cg_curvature(
    direction, product, flags, sums, rows, width, first, parts, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``<d, d - S d>``, where the system is ``I - S``, and ``<d, d>``."""
    part, row, _, inside, at = entries(width, BLOCK)
    if tl.load(flags + ACTIVE * rows + row) != 0:
        d = tl.load(direction + at, mask=inside, other=0.0).to(WIDE)
        s = tl.load(product + at, mask=inside, other=0.0).to(WIDE)
        mine = sums + row * 3 * parts + first + part
        tl.store(mine, tl.sum(d * (d - s), axis=0))
        tl.store(mine + 2 * parts, tl.sum(d * d, axis=0))


@triton.jit
def _step_length(square, curvature):
    return tl.where(curvature > 0, square / tl.where(curvature > 0, curvature, 1.0), 0.0)


@triton.jit
def cg_update(
    rhs, direction, product, residual, scale, paces, flags, numbers, sums, rows, width, first, parts,
    START: tl.constexpr, NARROW: tl.constexpr, SQUARED: tl.constexpr, FIRST: tl.constexpr,
    P: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``r - a (d - S d)`` with its norm; ``FIRST`` writes down ``a``, for directions as they are kept.

    At the ``START`` r is the right side, which is the direction as well, but for its rounding.
    """
    part, row, _, inside, at = entries(width, BLOCK)
    if tl.load(flags + ACTIVE * rows + row) != 0:
        mine = sums + row * 3 * parts
        pace = _step_length(tl.load(numbers + SQUARE * rows + row), total(mine, parts, P)).to(WIDE)
        d = tl.load(direction + at, mask=inside, other=0.0).to(WIDE)
        s = tl.load(product + at, mask=inside, other=0.0).to(WIDE)
        if not START:
            r = tl.load(residual + at, mask=inside, other=0.0)
        elif NARROW:
            r = _divided(tl.load(rhs + at, mask=inside, other=0.0), tl.load(scale + row), SQUARED, WIDE)
        else:
            r = d
        r -= pace * (d - s)
        tl.store(residual + at, r, mask=inside)
        tl.store(mine + parts + first + part, tl.sum(r * r, axis=0))
        if FIRST and part == 0:
            tl.store(paces + row, pace)


@triton.jit(do_not_specialize=["step"])
def cg_accept(
    sums, parts, flags, numbers, trace, step, rows, tol, eps, NON_FINITE: tl.constexpr,
    INDEFINITE: tl.constexpr, SINGULAR: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Update the state of one row by its newest answer, as ``accept_step`` does."""
    row = tl.program_id(0)
    residual = tl.load(numbers + RESIDUAL * rows + row)
    if tl.load(flags + ACTIVE * rows + row) != 0:
        mine = sums + row * 3 * parts
        curvature = total(mine, parts, P)
        after = total(mine + parts, parts, P)
        of_direction = total(mine + 2 * parts, parts, P)
        square = tl.load(numbers + SQUARE * rows + row)
        beta = tl.where(square == 0, 0.0, after / tl.where(square == 0, 1.0, square))
        size = tl.load(numbers + SIZE * rows + row)
        slope = curvature / tl.where(square == 0, 1.0, square)
        size = tl.where(slope > size, slope, size)
        # |x|^2 and <x, d>: the new residual is orthogonal to the new answer x, and the next direction is r + beta d.
        pace = _step_length(square, curvature)
        length = tl.load(numbers + LENGTH * rows + row)
        along = tl.load(numbers + ALONG * rows + row)
        length += pace * (2.0 * along + pace * of_direction)
        along = beta * (along + pace * of_direction)
        lost = eps * size * tl.sqrt(tl.maximum(length, 0.0)) > 1e-3
        residual = tl.where(lost, float("inf"), tl.sqrt(after))
        ends = tl.where(lost, SINGULAR, 0)
        negative = curvature < -8.0 * eps * tl.where(size > 1.0, size, 1.0) * of_direction
        ends = tl.where(curvature <= 0, tl.where(negative, INDEFINITE, SINGULAR), ends)
        ends = tl.where(tl.abs(curvature) < float("inf"), ends, NON_FINITE)
        best = tl.load(numbers + BEST * rows + row)
        steps = tl.load(flags + STEPS * rows + row)
        was_pending = tl.load(flags + PENDING * rows + row) != 0
        record(flags, numbers, rows, row, residual, best, ends, steps, was_pending, tol)
        if residual < best:
            tl.store(flags + BEST_STEP * rows + row, steps + 1)
        tl.store(numbers + SIZE * rows + row, size)
        tl.store(numbers + SQUARE * rows + row, after)
        tl.store(numbers + BETA * rows + row, beta)
        tl.store(numbers + LENGTH * rows + row, length)
        tl.store(numbers + ALONG * rows + row, along)
        tl.store(numbers + RESIDUAL * rows + row, residual)
    tl.store(trace + step * rows + row, residual)


@triton.jit
def _stretched(directions, paces, place: tl.constexpr, apart, lanes, row, at, inside, WIDE: tl.constexpr):
    """The contribution of the step whose direction is in this place to the solution."""
    d = tl.load(directions + tl.full((), place, tl.int64) * apart + at, mask=inside, other=0.0).to(WIDE)
    return tl.load(paces + place * lanes + row) * d


@triton.jit(do_not_specialize=["step"])
def cg_direction(
    residual, old, new, directions, paces, point, best, flags, numbers, apart, lanes, step, rows,
    width, FOLD: tl.constexpr, AGAIN: tl.constexpr, KEPT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``d <- r + b d``, from one place of the ``directions`` to the next one; places lie ``apart``, paces by ``lanes``.

    Where all ``KEPT`` places are in use after ``step`` steps, they are folded in first (``FOLD``), for the first time
    or ``AGAIN``. The best answer is written down where it could not be formed any more.

    Rows that have ended are multiplied with the others, so for them something is in every place as well.
    """
    _, row, _, inside, at = entries(width, BLOCK)
    if tl.load(flags + ACTIVE * rows + row) != 0:
        if FOLD:
            # Counted from the last fold: KEPT is the newest answer, which point will have.
            best_place = tl.load(flags + BEST_STEP * rows + row) - (step - KEPT)
            x = tl.zeros((BLOCK,), dtype=WIDE)
            if AGAIN:
                x += tl.load(point + at, mask=inside, other=0.0)
            if best_place == 0:
                tl.store(best + at, x, mask=inside)
            for place in tl.static_range(KEPT):
                x += _stretched(directions, paces, place, apart, lanes, row, at, inside, WIDE)
                if (best_place == place + 1) & (place + 1 < KEPT):
                    tl.store(best + at, x, mask=inside)
            tl.store(point + at, x, mask=inside)
        beta = tl.load(numbers + BETA * rows + row).to(WIDE)
        r = tl.load(residual + at, mask=inside, other=0.0)
        d = r + beta * tl.load(old + at, mask=inside, other=0.0).to(WIDE)
        tl.store(new + at, d.to(new.dtype.element_ty), mask=inside)
    elif step < KEPT:
        tl.store(new + at, tl.zeros((BLOCK,), dtype=new.dtype.element_ty), mask=inside)


@triton.jit
def cg_settle(
    directions, paces, point, best, out, scale, flags, apart, lanes, rows, width,
    FOLDED: tl.constexpr, KEPT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best answers, for right sides as they came. Nothing else is changed.

    ``FOLDED`` where there was a fold, which rows have taken part in that went on after it.
    """
    _, row, _, inside, at = entries(width, BLOCK)
    best_place = tl.load(flags + BEST_STEP * rows + row)
    x = tl.zeros((BLOCK,), dtype=WIDE)
    if FOLDED:
        ended = tl.where(tl.load(flags + ACTIVE * rows + row) == 0, 1, 0)
        folded = tl.maximum(tl.load(flags + STEPS * rows + row) - ended, 0) // KEPT * KEPT
        best_place -= folded
        if (folded > 0) & (best_place < 0):
            x = tl.load(best + at, mask=inside, other=0.0)
        if (folded > 0) & (best_place >= 0):
            x = tl.load(point + at, mask=inside, other=0.0)
    for place in tl.static_range(KEPT):
        if place < best_place:
            x += _stretched(directions, paces, place, apart, lanes, row, at, inside, WIDE)
    x *= tl.load(scale + row).to(WIDE)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)
