"""Passes over memory of Anderson-accelerated iteration: measure a point, propose the next one.

Between the two, :mod:`opteq.engine.triton.step_acceptance` decides on the point by the sums that the first has left.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl

from opteq.engine.triton.row_state_kernels import ACTIVE, LATE, entries, save_best


@triton.jit
def measure_start(
    point, image, sums, width, first, parts, K: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """``|T(y) - y|^2`` and ``|T(y)|^2`` at the start."""
    part, row, _, inside, at = entries(width, BLOCK)
    f = tl.load(image + at, mask=inside, other=0.0).to(WIDE)
    g = f - tl.load(point + at, mask=inside, other=0.0).to(WIDE)
    out = sums + row * K * parts + first + part
    tl.store(out, tl.sum(g * g, axis=0))
    tl.store(out + parts, tl.sum(f * f, axis=0))


@triton.jit(do_not_specialize=["slot"])
def anderson_observe(
    point, image, last_point, last_image, older_point, older_image, residuals, moves, damping, flags, used,
    sums, rows, width, slot, first, parts, column,
    M: tl.constexpr, MP: tl.constexpr, DAMPED: tl.constexpr, WIDE: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The new differences, their inner products with the columns in memory, and the norms a step is accepted by."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    line = tl.arange(0, MP)
    # All numbers of the row under way at once, before any is looked at.
    active = tl.load(flags + ACTIVE * rows + row)
    late = tl.load(flags + LATE * rows + row) != 0
    in_use = tl.load(used + row * MP + line, mask=line < M, other=0)
    if active != 0:
        begin = row.to(tl.int64) * width
        before_point = tl.where(late, older_point, last_point)
        before_image = tl.where(late, older_image, last_image)
        reach = tl.where(line == slot, 0, in_use) * width
        along = tl.zeros((MP,), dtype=WIDE)
        target = tl.zeros((MP,), dtype=WIDE)
        gaps = tl.zeros((BLOCK,), dtype=WIDE)
        sizes = tl.zeros((BLOCK,), dtype=WIDE)
        turns = tl.zeros((BLOCK,), dtype=WIDE)
        across = tl.zeros((BLOCK,), dtype=WIDE)
        for start in range(0, PIECE, BLOCK):
            offsets = part * PIECE + start + tl.arange(0, BLOCK)
            inside = offsets < width
            at = begin + offsets
            y = tl.load(point + at, mask=inside, other=0.0).to(WIDE)
            f = tl.load(image + at, mask=inside, other=0.0).to(WIDE)
            y0 = tl.load(before_point + at, mask=inside, other=0.0).to(WIDE)
            f0 = tl.load(before_image + at, mask=inside, other=0.0).to(WIDE)
            g = f - y
            turn = g - (f0 - y0)
            if DAMPED:
                move = (y - y0) + tl.load(damping + row).to(WIDE) * turn
            else:
                move = f - f0
            here = slot * column + at
            tl.store(residuals + here, turn, mask=inside)
            tl.store(moves + here, move, mask=inside)
            gaps += g * g
            sizes += f * f
            turns += turn * turn
            across += g * turn
            stored = residuals + line[:, None].to(tl.int64) * column + at[None, :]
            others = tl.load(stored, mask=offsets[None, :] < reach[:, None], other=0.0).to(WIDE)
            along += tl.sum(others * turn[None, :], axis=1)
            target += tl.sum(others * g[None, :], axis=1)
        out = sums + row * (4 + 2 * M) * parts + first + part
        tl.store(out, tl.sum(gaps, axis=0))
        tl.store(out + parts, tl.sum(sizes, axis=0))
        tl.store(out + 2 * parts, tl.sum(turns, axis=0))
        tl.store(out + 3 * parts, tl.sum(across, axis=0))
        tl.store(out + (4 + line) * parts, along, mask=line < M)
        tl.store(out + (4 + M + line) * parts, target, mask=line < M)


@triton.jit
def anderson_mix(
    point, image, last_point, last_image, following, moves, weights, damping, best, flags, rows, width,
    column, low, high, M: tl.constexpr, MP: tl.constexpr, DAMPED: tl.constexpr, CLAMPED: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The next proposal, ``y + damping g - moves w``; and the copies that the decision asked for."""
    _, row, offsets, inside, at = entries(width, BLOCK)
    active = save_best(point, last_point, best, flags, rows, row, at, inside)
    if active != 0:
        # Only one of two points is read: for the other no offset is below the limit.
        late = tl.load(flags + LATE * rows + row) != 0
        value = tl.load(tl.where(late, last_image, image) + at, mask=inside, other=0.0).to(WIDE)
        if DAMPED:
            y = tl.load(tl.where(late, last_point, point) + at, mask=inside, other=0.0).to(WIDE)
            value = y + tl.load(damping + row).to(WIDE) * (value - y)
        for j in tl.static_range(M):
            weight = tl.load(weights + row * MP + j).to(WIDE)
            # A weight of zero may stand for a column that is not finite.
            reach = tl.where(weight == 0, 0, width)
            value -= weight * tl.load(moves + j * column + at, mask=offsets < reach, other=0.0).to(WIDE)
        if CLAMPED:
            value = tl.minimum(tl.maximum(value, low), high)
        tl.store(following + at, value.to(following.dtype.element_ty), mask=inside)
