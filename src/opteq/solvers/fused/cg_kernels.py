"""Passes over memory of conjugate gradients for ``(I - S) v = rhs``, and the judgement between them.

The first pass divides right sides by their lengths. A step is three more beside the product with S: the curvature along
the direction, the new answer and residual with their norms, and, once one program a row has judged them, the next
direction.
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
    save_best,
    total,
)


@triton.jit
def cg_begin(
    rhs, lengths, residual, direction, point, flags, numbers, trace, rows, width, tol, NON_FINITE: tl.constexpr,
    FIRST: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Residual and direction of the answer zero: the right side, of length one or zero. ``FIRST`` enters the row."""
    part, row, _, inside, at = entries(width, BLOCK)
    length = tl.load(lengths + row)
    finite = length < float("inf")  # false for NaN
    some = finite & (length > 0)
    r = (tl.load(rhs + at, mask=inside, other=0.0).to(tl.float64) / tl.where(some, length, 1.0)).to(WIDE)
    tl.store(residual + at, r, mask=inside)
    tl.store(direction + at, r, mask=inside)
    tl.store(point + at, tl.zeros_like(r), mask=inside)
    if FIRST and part == 0:
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
def cg_update(
    direction, product, residual, point, following, before, best, flags, numbers, sums, rows, width, first, parts,
    P: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``x + a d`` and ``r - a (d - S d)`` with their norms, and the copies that the last judgement asked for."""
    part, row, _, inside, at = entries(width, BLOCK)
    active = save_best(point, before, best, flags, rows, row, at, inside)
    if active != 0:
        mine = sums + row * 3 * parts
        curvature = total(mine, parts, P)
        square = tl.load(numbers + SQUARE * rows + row)
        step = tl.where(curvature > 0, square / tl.where(curvature > 0, curvature, 1.0), 0.0).to(WIDE)
        d = tl.load(direction + at, mask=inside, other=0.0)
        s = tl.load(product + at, mask=inside, other=0.0).to(WIDE)
        x = tl.load(point + at, mask=inside, other=0.0) + step * d
        r = tl.load(residual + at, mask=inside, other=0.0) - step * (d - s)
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
def cg_direction(residual, direction, flags, numbers, rows, width, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """``d <- r + b d``."""
    _, row, _, inside, at = entries(width, BLOCK)
    if tl.load(flags + ACTIVE * rows + row) != 0:
        beta = tl.load(numbers + BETA * rows + row).to(WIDE)
        r = tl.load(residual + at, mask=inside, other=0.0)
        d = tl.load(direction + at, mask=inside, other=0.0)
        tl.store(direction + at, r + beta * d, mask=inside)
