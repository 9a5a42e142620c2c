"""The judgement of a step of Anderson acceleration that remembers residuals ``g`` and images, one program a row.

Steps are weighed by the differences of residuals, ``d = g_newer - g_older``, as :mod:`opteq.solvers.fused.weighing`
does: that of step s is in line ``(s - 1) % M``, and ``newer`` and ``older`` are the places of its two columns. Of a
difference only products are needed, and those follow from products of the newest column with the others: with
``t = <g, d>``, where p is the column that the newest one follows, ``<g - g_p, d> = t - t_p``.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl

from opteq.solvers.fused.judgement import enter_point, load_row, unit_for
from opteq.solvers.fused.rows import ANCHOR, LATE, PLAIN, SAVE, UNIT
from opteq.solvers.fused.weighing import enter_newest, load_columns, store_columns, weigh

# Squares of differences are differences of squares, whose sums are rounded to some 1e-7.
LEAST_TURN = tl.constexpr(1e-6)


@triton.jit
def signs_of(newer, older, RP: tl.constexpr):
    """Differences as combinations of columns: 1 at the newer one, -1 at the older one, ``(MP, RP)``."""
    place = tl.arange(0, RP)
    ahead = (place[None, :] == newer[:, None]).to(tl.float64)
    return ahead - (place[None, :] == older[:, None]).to(tl.float64)


@triton.jit
def load_newest(sums, parts, step, R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr):
    """Pieces of the newest column's square, of its products with the others, and at step 1 of the first one's square.

    As ``images_begin`` and ``images_observe`` leave them after the two norms.
    """
    piece = tl.arange(0, P)
    place = tl.arange(0, RP)
    some = piece < parts
    squares = tl.load(sums + 2 * parts + piece, mask=some, other=0.0)
    first = tl.load(sums + 3 * parts + piece, mask=piece < tl.where(step == 1, parts, 0), other=0.0)
    at = sums + (4 + place[:, None]) * parts + piece[None, :]
    along = tl.load(at, mask=(place[:, None] < R) & some[None, :], other=0.0)
    return squares, first, along


@triton.jit
def compare(
    own, square, products, anchored, anchor, front, back, last_target, slot, MP: tl.constexpr, RP: tl.constexpr
):
    """From the newest column's products: the length of the newest difference, and every difference's products with it
    and with the newest column.
    """
    line = tl.arange(0, MP)
    with_anchor = tl.sum(tl.where(tl.arange(0, RP) == anchor, products, 0.0), axis=0)
    turn = own - 2 * with_anchor + square
    length = tl.sqrt(tl.where(anchored & (turn > LEAST_TURN * (own + square)), turn, 0.0))
    signs = signs_of(front, back, RP)
    target = tl.sum(tl.where(signs != 0, signs * products[None, :], 0.0), axis=1)
    with_newest = target - last_target
    return length, with_newest, tl.where(line == slot, own - with_anchor, target)


@triton.jit
def still_needed(in_use, signs, step, follows, follows_one, M: tl.constexpr, MP: tl.constexpr, RP: tl.constexpr):
    """Columns to be read in the next step: those of differences that last beyond it, and the one that it follows."""
    lasting = tl.where(tl.arange(0, MP) == step % M, 0, in_use)
    needed = tl.sum(tl.where(signs != 0, lasting[:, None], 0), axis=0) > 0
    return needed | ((tl.arange(0, RP) == follows) & follows_one)


@triton.jit(do_not_specialize=["slot", "place", "step"])
def images_judge(
    sums, parts, merits, flags, numbers, used, gram, scale, targets, newer, older, held, units, weights, trace, step,
    rows, slot, place, tol, floor, growth, rounding, ridge, root, NON_FINITE: tl.constexpr, MERITED: tl.constexpr,
    M: tl.constexpr, MP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Judge the newest point of one row as ``judge`` does, and weigh the images.

    ``slot`` is the line of the newest difference, ``place`` that of the newest column.
    """
    row = tl.program_id(0)
    mine = sums + row * (4 + R) * parts
    line = tl.arange(0, MP)
    at = tl.arange(0, RP)
    active, residual, best, least, known, unit, steps, plain, was_pending, gaps, sizes = load_row(
        mine, parts, flags, numbers, rows, row, P
    )
    square = tl.load(numbers + ANCHOR * rows + row)
    late = tl.load(flags + LATE * rows + row) != 0
    squares, first, along = load_newest(mine, parts, step, R, RP, P)
    in_use, lengths, cosines = load_columns(used, scale, gram, row, MP)
    last_target = tl.load(targets + row * MP + line)
    front = tl.load(newer + row * MP + line)
    back = tl.load(older + row * MP + line)
    holds = tl.load(held + row * RP + at) != 0
    their_units = tl.load(units + row * RP + at)
    merit = known
    if MERITED:
        merit = tl.load(merits + row).to(tl.float64)
    if active == 0:
        tl.store(flags + SAVE * rows + row, 0)
    else:
        gap, residual, taken = enter_point(
            flags, numbers, rows, row, gaps, sizes, merit, known, least, best, steps, plain, was_pending, tol, floor,
            growth, rounding, NON_FINITE, MERITED,
        )  # fmt: skip
        previous = (place + R - 1) % R
        anchor = tl.where(late, (place + R - 2) % R, previous)
        anchored = tl.sum(tl.where((at == anchor) & holds, 1, 0), axis=0) != 0
        square = tl.where(step == 1, tl.sum(first.to(tl.float64), axis=0) / (unit * unit), square)
        own = tl.sum(squares.to(tl.float64), axis=0) / (unit * unit)
        kept = taken & (own < float("inf"))  # a column may leave the range of float16
        products = tl.where(holds & (at != place), tl.sum(along.to(tl.float64), axis=1) / (unit * their_units), 0.0)
        length, with_newest, target = compare(
            own, square, products, anchored, anchor, front, back, last_target, slot, MP, RP
        )
        in_use, lengths, cosines = enter_newest(in_use, lengths, cosines, length, with_newest, kept, slot, MP)
        found, in_use = weigh(in_use, lengths, cosines, target, gap, slot, ridge, M, MP, tl.float32)
        front = tl.where(line == slot, place, front)
        back = tl.where(line == slot, anchor, back)
        signs = signs_of(front, back, RP)
        # The image of the point in force, less the differences of images by their weights.
        base = tl.where(at == tl.where(taken, place, previous), 1.0, 0.0)
        tl.store(weights + row * RP + at, base - tl.sum(found[:, None] * signs, axis=0))
        follows, follows_one = tl.where(taken, place, anchor), tl.where(taken, kept, anchored)
        needed = still_needed(in_use, signs, step, follows, follows_one, M, MP, RP)
        tl.store(held + row * RP + at, needed.to(tl.int32))
        tl.store(units + row * RP + at, tl.where(at == place, unit, their_units))
        tl.store(newer + row * MP + line, front)
        tl.store(older + row * MP + line, back)
        tl.store(targets + row * MP + line, tl.where(kept, target, last_target))
        tl.store(numbers + ANCHOR * rows + row, tl.where(kept, own, square))
        tl.store(numbers + UNIT * rows + row, tl.where(taken & (gap > 0), unit_for(gap, root), unit))
        store_columns(used, scale, gram, row, in_use, lengths, cosines, MP)
        tl.store(flags + PLAIN * rows + row, tl.where(tl.sum(in_use, axis=0) > 0, 0, 1))
    tl.store(trace + step * rows + row, residual)
