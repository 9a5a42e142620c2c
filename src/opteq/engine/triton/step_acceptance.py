"""Acceptance of the start and of steps with memory: one small program per row, between two passes over memory."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl

from opteq.engine.triton.anderson_weights import add_up, enter_newest, load_columns, load_products, store_columns, weigh
from opteq.engine.triton.row_state_kernels import (
    ACTIVE,
    BEST,
    LATE,
    LEAST,
    MERIT,
    PENDING,
    PLAIN,
    RESIDUAL,
    SAVE,
    STEPS,
    open_flags,
    record,
    total,
    unless_far,
)


@triton.jit
def accept_start(
    sums, parts, merits, flags, numbers, used, gram, scale, weights, trace, rows, tol, floor,
    NON_FINITE: tl.constexpr, MERITED: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Initialise a row: its first point is the best one so far; write all that later steps read."""
    row = tl.program_id(0)
    mine = sums + row * K * parts
    gap = tl.sqrt(total(mine, parts, P))
    residual = gap / tl.maximum(tl.sqrt(total(mine + parts, parts, P)), floor)
    finite = residual < float("inf")  # false for NaN
    best = tl.where(finite, residual, float("inf"))
    still = (best > tol) & finite
    open_flags(flags, rows, row, still, tl.where(finite, 0, NON_FINITE))
    tl.store(numbers + BEST * rows + row, best)
    tl.store(numbers + LEAST * rows + row, gap)
    tl.store(numbers + RESIDUAL * rows + row, residual)
    tl.store(trace + row, residual)
    if MERITED:
        tl.store(numbers + MERIT * rows + row, tl.load(merits + row).to(tl.float64))
    store_columns(
        used, scale, gram, row, tl.zeros((MP,), tl.int32), tl.full((MP,), 1.0, tl.float64),
        tl.zeros((MP, MP), tl.float64), MP,
    )  # fmt: skip
    tl.store(weights + row * MP + tl.arange(0, MP), tl.zeros((MP,), tl.float64))


@triton.jit
def load_row(sums, parts, flags, numbers, rows, row, P: tl.constexpr):
    """The state of a row before a step, and the partial sums of the step's two norms."""
    piece = tl.arange(0, P)
    active = tl.load(flags + ACTIVE * rows + row)
    residual = tl.load(numbers + RESIDUAL * rows + row)
    best = tl.load(numbers + BEST * rows + row)
    least = tl.load(numbers + LEAST * rows + row)
    known = tl.load(numbers + MERIT * rows + row)
    steps = tl.load(flags + STEPS * rows + row)
    plain = tl.load(flags + PLAIN * rows + row) != 0
    was_pending = tl.load(flags + PENDING * rows + row) != 0
    gaps = tl.load(sums + piece, mask=piece < parts, other=0.0)
    sizes = tl.load(sums + parts + piece, mask=piece < parts, other=0.0)
    return active, residual, best, least, known, steps, plain, was_pending, gaps, sizes


@triton.jit
def is_harmless(gap, least, merit, known, growth, rounding, MERITED: tl.constexpr):
    """Whether a proposal that is not plain may be taken: by its merit, or without one by ``|T(y) - y|``."""
    if MERITED:
        harmless = merit <= known + rounding * tl.abs(known)
    else:
        harmless = gap <= growth * least
    return harmless


@triton.jit
def enter_point(
    flags, numbers, rows, row, gaps, sizes, merit, known, least, best, steps, plain, was_pending, tol, floor, growth,
    rounding, NON_FINITE: tl.constexpr, MERITED: tl.constexpr,
):  # fmt: skip
    """Decide on the newest point by its norms and its merit: ``|T(y) - y|``, its residual, and whether it is taken."""
    gap = tl.sqrt(tl.sum(gaps.to(tl.float64), axis=0))
    residual = gap / tl.maximum(tl.sqrt(tl.sum(sizes.to(tl.float64), axis=0)), floor)
    finite = residual < float("inf")  # false for NaN
    residual = unless_far(residual, gap, least, tol)
    tl.store(numbers + RESIDUAL * rows + row, residual)
    taken = finite & (plain | is_harmless(gap, least, merit, known, growth, rounding, MERITED))
    if MERITED:
        tl.store(numbers + MERIT * rows + row, tl.where(taken, merit, known))
    tl.store(numbers + LEAST * rows + row, tl.where(gap < least, gap, least))
    ends = tl.where(finite, 0, tl.where(plain, NON_FINITE, 0))
    record(flags, numbers, rows, row, residual, best, ends, steps, was_pending, tol)
    tl.store(flags + LATE * rows + row, tl.where(taken, 0, 1))
    return gap, residual, taken


@triton.jit(do_not_specialize=["slot", "step"])
def accept_step(
    sums, parts, merits, flags, numbers, used, gram, scale, weights, trace, step, rows, slot, tol, floor, growth,
    rounding, ridge, NON_FINITE: tl.constexpr, MERITED: tl.constexpr, M: tl.constexpr, MP: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """Decide on the newest point of one row: is it taken, is it the best, is the row finished; and weigh the columns.

    All is loaded before anything is computed: a program that waits for one number after the other is mostly waiting.
    """
    row = tl.program_id(0)
    mine = sums + row * (4 + 2 * M) * parts
    active, residual, best, least, known, steps, plain, was_pending, gaps, sizes = load_row(
        mine, parts, flags, numbers, rows, row, P
    )
    merit = known
    if MERITED:
        merit = tl.load(merits + row).to(tl.float64)
    turns, across, along, target = load_products(mine, parts, M, MP, P)
    in_use, lengths, cosines = load_columns(used, scale, gram, row, MP)
    if active == 0:
        tl.store(flags + SAVE * rows + row, 0)
    else:
        gap, residual, taken = enter_point(
            flags, numbers, rows, row, gaps, sizes, merit, known, least, best, steps, plain, was_pending, tol, floor,
            growth, rounding, NON_FINITE, MERITED,
        )  # fmt: skip
        length, with_newest, with_residual = add_up(turns, across, along, target, slot, MP)
        in_use, lengths, cosines = enter_newest(in_use, lengths, cosines, length, with_newest, taken, slot, MP)
        found, in_use = weigh(in_use, lengths, cosines, with_residual, gap, slot, ridge, M, MP, tl.float64)
        tl.store(weights + row * MP + tl.arange(0, MP), found)
        store_columns(used, scale, gram, row, in_use, lengths, cosines, MP)
        tl.store(flags + PLAIN * rows + row, tl.where(tl.sum(in_use, axis=0) > 0, 0, 1))
    tl.store(trace + step * rows + row, residual)
