"""Triton kernels of the fused solvers: what happens between two evaluations of the map, in passes over memory.

A state is a set of blocks, each a matrix ``(rows, width)`` in memory; one program takes ``BLOCK`` entries of one row.
Sums over a row are left as one number a program in ``sums (rows, K, parts)``, and one program a row adds them up and
judges the step (``judge``, ``cg_judge``). Rows that have finished are left alone, so they cost no bandwidth.

Bookkeeping of a row: ``flags (7, rows)`` int32 and ``numbers (5, rows)`` float64, by the indices below.

* ACTIVE, DEAD (a status code), STEPS;
* LATE: the last proposal was refused, so the point that counts is the one before it;
* PENDING: the best point so far is the newest one, which is still in its own buffer;
* SAVE: what has to be copied to ``best`` before its buffer is used again: 1 the newest point, 2 the one before it;
* PLAIN: the last proposal was a plain step.

The best point is thus copied only when a worse one follows it, or at the end: a row that converges monotonically is
copied once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl

ACTIVE = tl.constexpr(0)
DEAD = tl.constexpr(1)
STEPS = tl.constexpr(2)
LATE = tl.constexpr(3)
PENDING = tl.constexpr(4)
SAVE = tl.constexpr(5)
PLAIN = tl.constexpr(6)

BEST = tl.constexpr(0)
LEAST = tl.constexpr(1)
MERIT = tl.constexpr(2)
RESIDUAL = tl.constexpr(3)
UNIT = tl.constexpr(4)  # what the next differences are multiplied by
SQUARE = tl.constexpr(4)
BETA = tl.constexpr(1)  # conjugate gradients have no use for LEAST and MERIT
SIZE = tl.constexpr(2)


@triton.jit
def _save(newest, before, best, flags, rows, row, at, inside):
    """Copy this program's entries of the point that ``SAVE`` names to ``best``."""
    save = tl.load(flags + SAVE * rows + row)
    if save == 1:
        tl.store(best + at, tl.load(newest + at, mask=inside), mask=inside)
    if save == 2:
        tl.store(best + at, tl.load(before + at, mask=inside), mask=inside)


@triton.jit
def keep(newest, before, best, flags, rows, width, BLOCK: tl.constexpr):
    """At the end: bring what is pending or to be saved to ``best``."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    offsets = part * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < width
    at = row.to(tl.int64) * width + offsets
    _save(newest, before, best, flags, rows, row, at, inside)
    if tl.load(flags + PENDING * rows + row) != 0:
        tl.store(best + at, tl.load(newest + at, mask=inside), mask=inside)


@triton.jit
def plain_observe(
    point, image, newest, before, best, flags, sums, rows, width, first, parts, K: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``|T(y) - y|^2`` and ``|T(y)|^2``; and the copies that the last judgement asked for."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    offsets = part * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < width
    at = row.to(tl.int64) * width + offsets
    _save(newest, before, best, flags, rows, row, at, inside)
    if tl.load(flags + ACTIVE * rows + row) != 0:
        y = tl.load(point + at, mask=inside, other=0.0).to(WIDE)
        f = tl.load(image + at, mask=inside, other=0.0).to(WIDE)
        g = f - y
        out = sums + row * K * parts + first + part
        tl.store(out, tl.sum(g * g, axis=0))
        tl.store(out + parts, tl.sum(f * f, axis=0))


@triton.jit(do_not_specialize=["slot"])
def anderson_observe(
    point, image, last_point, last_image, older_point, older_image, residuals, moves, damping, flags, numbers, used,
    sums, rows, width, slot, first, parts, column,
    M: tl.constexpr, MP: tl.constexpr, DAMPED: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The new differences, their inner products with the columns in memory, and the norms that judge the step.

    ``HALF`` columns are float16 numbers of size about one, multiplied by ``UNIT``: differences are measured against the
    residual before them, so that neither large nor small ones leave the range of float16.
    """
    part = tl.program_id(0)
    row = tl.program_id(1)
    if tl.load(flags + ACTIVE * rows + row) != 0:
        line = tl.arange(0, MP)
        begin = row.to(tl.int64) * width
        late = tl.load(flags + LATE * rows + row) != 0
        before_point = tl.where(late, older_point, last_point)
        before_image = tl.where(late, older_image, last_image)
        unit = tl.load(numbers + UNIT * rows + row).to(WIDE)
        in_use = tl.load(used + row * MP + line, mask=line < M, other=0)
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
            if HALF:
                turn = turn * unit
                move = tl.minimum(tl.maximum(move * unit, -65504.0), 65504.0)
            # Rounded as they are stored: the Gram matrix is then that of the columns themselves.
            low = turn.to(residuals.dtype.element_ty)
            turn = low.to(WIDE)
            here = slot * column + at
            tl.store(residuals + here, low, mask=inside)
            tl.store(moves + here, move.to(moves.dtype.element_ty), mask=inside)
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
def _total(sums, parts, P: tl.constexpr):
    index = tl.arange(0, P)
    return tl.sum(tl.load(sums + index, mask=index < parts, other=0.0).to(tl.float64), axis=0)


@triton.jit(do_not_specialize=["slot", "step"])
def judge(
    sums, parts, merits, flags, numbers, used, gram, scale, weights, trace, step, rows, slot, tol, floor, growth,
    rounding, ridge, root, NON_FINITE: tl.constexpr, START: tl.constexpr, MERITED: tl.constexpr, HALF: tl.constexpr,
    M: tl.constexpr, MP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Judge the newest point of one row: is it taken, is it the best, is the row finished; and weigh the columns.

    With ``M = 0`` there is no memory and every finite step is taken: plain iteration. ``START`` is the first point.
    All is loaded before anything is computed: a program that waits for one number after the other is mostly waiting.
    """
    row = tl.program_id(0)
    K: tl.constexpr = 4 + 2 * M if M > 0 else 2
    mine = sums + row * K * parts
    piece = tl.arange(0, P)
    some = piece < parts
    active = tl.load(flags + ACTIVE * rows + row)
    residual = tl.load(numbers + RESIDUAL * rows + row)
    best = tl.load(numbers + BEST * rows + row)
    least = tl.load(numbers + LEAST * rows + row)
    known = tl.load(numbers + MERIT * rows + row)
    taken_steps = tl.load(flags + STEPS * rows + row)
    plain = tl.load(flags + PLAIN * rows + row) != 0  # stays set where there is no memory
    was_pending = tl.load(flags + PENDING * rows + row) != 0
    gaps = tl.load(mine + piece, mask=some, other=0.0)
    sizes_of_images = tl.load(mine + parts + piece, mask=some, other=0.0)
    if MERITED:
        merit = tl.load(merits + row).to(tl.float64)
    if M > 0:
        line = tl.arange(0, MP)
        cells = row * MP * MP + line[:, None] * MP + line[None, :]
        turns = tl.load(mine + 2 * parts + piece, mask=some, other=0.0)
        across = tl.load(mine + 3 * parts + piece, mask=some, other=0.0)
        at = mine + (4 + line[:, None]) * parts + piece[None, :]
        inside = (line[:, None] < M) & some[None, :]
        products_along = tl.load(at, mask=inside, other=0.0)
        products_target = tl.load(at + M * parts, mask=inside, other=0.0)
        in_use = tl.load(used + row * MP + line)
        sizes = tl.load(scale + row * MP + line)
        matrix = tl.load(gram + cells)
        unit = tl.load(numbers + UNIT * rows + row)
    if active == 0:
        tl.store(flags + SAVE * rows + row, 0)
    else:
        gap = tl.sqrt(tl.sum(gaps.to(tl.float64), axis=0))
        residual = gap / tl.maximum(tl.sqrt(tl.sum(sizes_of_images.to(tl.float64), axis=0)), floor)
        finite = residual < float("inf")  # false for NaN
        tl.store(numbers + RESIDUAL * rows + row, residual)
        if START:
            taken = finite
            best = tl.where(finite, residual, float("inf"))
            tl.store(numbers + BEST * rows + row, best)
            tl.store(numbers + LEAST * rows + row, gap)
            if MERITED:
                tl.store(numbers + MERIT * rows + row, merit)
            still = (best > tol) & finite
            tl.store(flags + DEAD * rows + row, tl.where(finite, 0, NON_FINITE))
            tl.store(flags + ACTIVE * rows + row, still.to(tl.int32))
        else:
            harmless = gap <= growth * least
            if MERITED:
                harmless = merit <= known + rounding * tl.abs(known)
            taken = finite & (plain | harmless)
            if MERITED:
                tl.store(numbers + MERIT * rows + row, tl.where(taken, merit, known))
            tl.store(numbers + LEAST * rows + row, tl.where(gap < least, gap, least))
            chosen = residual < best
            best = tl.where(chosen, residual, best)
            tl.store(numbers + BEST * rows + row, best)
            dead = tl.where(finite, 0, tl.where(plain, NON_FINITE, 0))
            dead = tl.where(best <= tol, 0, dead)
            still = (best > tol) & (dead == 0)
            tl.store(flags + DEAD * rows + row, dead)
            tl.store(flags + ACTIVE * rows + row, still.to(tl.int32))
            tl.store(flags + STEPS * rows + row, taken_steps + 1)
            save = tl.where(chosen, tl.where(still, 0, 1), tl.where(was_pending, 2, 0))
            tl.store(flags + PENDING * rows + row, (chosen & still).to(tl.int32))
            tl.store(flags + SAVE * rows + row, save)
            if M > 0:
                tl.store(flags + LATE * rows + row, tl.where(taken, 0, 1))
                # The columns of a refused row are forgotten: its next step is plain.
                length = tl.sqrt(tl.sum(turns.to(tl.float64), axis=0))
                learned = tl.where(taken & (length > 0) & (length < float("inf")), 1, 0)
                newest = line == slot
                along = tl.sum(products_along.to(tl.float64), axis=1)
                target = tl.sum(products_target.to(tl.float64), axis=1)
                target = tl.where(newest, tl.sum(across.to(tl.float64), axis=0), target)
                in_use = tl.where(newest, learned, in_use * tl.where(taken, 1, 0))
                sizes = tl.where(newest, tl.where(learned != 0, length, 1.0), sizes)
                cosines = tl.where(newest, 1.0, along / (sizes * tl.where(learned != 0, length, 1.0)))
                cosines = tl.where((cosines == cosines) & (in_use != 0), cosines, 0.0)
                matrix = tl.where(newest[:, None], cosines[None, :], matrix)
                matrix = tl.where(newest[None, :], cosines[:, None], matrix)
                # Gauss-Jordan elimination; its pivots are the squares of Cholesky's.
                pairs = in_use[:, None] * in_use[None, :] != 0
                diagonal = line[:, None] == line[None, :]
                lift = tl.where(in_use != 0, ridge, 1.0)
                system = tl.where(pairs, matrix, 0.0) + tl.where(diagonal, lift[:, None], 0.0)
                goal = target / (sizes * tl.where(gap > 0, gap, 1.0))
                goal = tl.where((goal == goal) & (in_use != 0), goal, 0.0)
                single = goal / (1 + ridge)
                sound = 1
                for k in tl.static_range(M):
                    chosen_row = line == k
                    here = tl.sum(tl.where(chosen_row[:, None], system, 0.0), axis=0)
                    down = tl.sum(tl.where(chosen_row[None, :], system, 0.0), axis=1)
                    pivot = tl.sum(tl.where(chosen_row, here, 0.0), axis=0)
                    sound = tl.where(pivot > 3 * ridge, sound, 0)
                    inverse = 1.0 / tl.where(pivot > 3 * ridge, pivot, 1.0)
                    here = here * inverse
                    value = tl.sum(tl.where(chosen_row, goal, 0.0), axis=0) * inverse
                    down = tl.where(chosen_row, 0.0, down)
                    system = tl.where(chosen_row[:, None], here[None, :], system - down[:, None] * here[None, :])
                    goal = tl.where(chosen_row, value, goal - down * value)
                # Dependent columns: only the newest one stays.
                in_use = in_use * tl.where(newest, 1, sound)
                found = tl.where(sound != 0, goal, single) * gap / sizes
                tl.store(weights + row * MP + line, tl.where(in_use != 0, found, 0.0))
                tl.store(scale + row * MP + line, sizes)
                tl.store(gram + cells, matrix)
                tl.store(used + row * MP + line, in_use)
                tl.store(flags + PLAIN * rows + row, tl.where(tl.sum(in_use, axis=0) > 0, 0, 1))
        if HALF:
            # The next difference is about as long as the residual of the point it starts from: after a refusal, of the
            # one before.
            tl.store(numbers + UNIT * rows + row, tl.where(taken & (gap > 0), root / gap, unit))
    tl.store(trace + step * rows + row, residual)


@triton.jit
def anderson_mix(
    point, image, last_point, last_image, following, moves, weights, damping, best, flags, rows, width, column,
    low, high, M: tl.constexpr, MP: tl.constexpr, DAMPED: tl.constexpr, CLAMPED: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The next proposal, ``y + damping g - moves w``; and the copies that the judgement asked for."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    offsets = part * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < width
    at = row.to(tl.int64) * width + offsets
    _save(point, last_point, best, flags, rows, row, at, inside)
    if tl.load(flags + ACTIVE * rows + row) != 0:
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


@triton.jit
def cg_curvature(direction, product, flags, sums, rows, width, first, parts, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """``<d, d - S d>``, where the system is ``I - S``."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    if tl.load(flags + ACTIVE * rows + row) != 0:
        offsets = part * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < width
        at = row.to(tl.int64) * width + offsets
        d = tl.load(direction + at, mask=inside, other=0.0).to(WIDE)
        s = tl.load(product + at, mask=inside, other=0.0).to(WIDE)
        tl.store(sums + row * 3 * parts + first + part, tl.sum(d * (d - s), axis=0))


@triton.jit
def cg_update(
    direction, product, residual, point, following, before, best, flags, numbers, sums, rows, width, first, parts,
    P: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``x + a d`` and ``r - a (d - S d)`` with their norms, and the copies that the last judgement asked for."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    offsets = part * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < width
    at = row.to(tl.int64) * width + offsets
    _save(point, before, best, flags, rows, row, at, inside)
    if tl.load(flags + ACTIVE * rows + row) != 0:
        mine = sums + row * 3 * parts
        curvature = _total(mine, parts, P)
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
        curvature = _total(mine, parts, P)
        after = _total(mine + parts, parts, P)
        length = tl.sqrt(_total(mine + 2 * parts, parts, P))
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
        chosen = residual < best
        best = tl.where(chosen, residual, best)
        dead = tl.where(best <= tol, 0, ends)
        still = (best > tol) & (dead == 0)
        was_pending = tl.load(flags + PENDING * rows + row) != 0
        tl.store(flags + SAVE * rows + row, tl.where(chosen, tl.where(still, 0, 1), tl.where(was_pending, 2, 0)))
        tl.store(flags + PENDING * rows + row, (chosen & still).to(tl.int32))
        tl.store(flags + DEAD * rows + row, dead)
        tl.store(flags + ACTIVE * rows + row, still.to(tl.int32))
        tl.store(flags + STEPS * rows + row, tl.load(flags + STEPS * rows + row) + 1)
        tl.store(numbers + BEST * rows + row, best)
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
    part = tl.program_id(0)
    row = tl.program_id(1)
    if tl.load(flags + ACTIVE * rows + row) != 0:
        offsets = part * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < width
        at = row.to(tl.int64) * width + offsets
        beta = tl.load(numbers + BETA * rows + row).to(WIDE)
        r = tl.load(residual + at, mask=inside, other=0.0)
        d = tl.load(direction + at, mask=inside, other=0.0)
        tl.store(direction + at, r + beta * d, mask=inside)
