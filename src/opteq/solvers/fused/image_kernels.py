"""Passes over memory of Anderson acceleration that remembers residuals and images, not their differences.

A residual ``g = T(y) - y`` is a column of float16 numbers of size about one: multiplied by ``UNIT``, a power of two.
States of 16 bits lose nothing that way. Their images stay where the map has left them. The last ``R`` of both are kept,
each in its place in turn; ``held (rows, RP)`` says which columns count, with ``RP`` the next power of two.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl

from opteq.solvers.fused.rows import ACTIVE, UNIT, entries, save_best, save_image


@triton.jit
def images_begin(
    point, image, following, best, best_image, columns, flags, numbers, held, units, sums, rows, width, first, parts,
    low, high, R: tl.constexpr, RP: tl.constexpr, CLAMPED: tl.constexpr, IMAGED: tl.constexpr, FIRST: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first column, in place 0, and its square; the first step, which is plain; and copies of rows that ended."""
    part, row, _, inside, at = entries(width, BLOCK)
    unit = tl.load(numbers + UNIT * rows + row)
    if IMAGED:
        save_image(image, image, best_image, flags, rows, row, at, inside)
    active = save_best(point, point, best, flags, rows, row, at, inside)
    if active != 0:
        y = tl.load(point + at, mask=inside, other=0.0).to(WIDE)
        f = tl.load(image + at, mask=inside, other=0.0).to(WIDE)
        column = ((f - y) * unit.to(WIDE)).to(columns.dtype.element_ty)
        tl.store(columns + at, column, mask=inside)
        column = column.to(WIDE)
        tl.store(sums + (row * (4 + R) + 3) * parts + first + part, tl.sum(column * column, axis=0))
        if CLAMPED:
            f = tl.minimum(tl.maximum(f, low), high)
        tl.store(following + at, f.to(following.dtype.element_ty), mask=inside)
    if FIRST and part == 0:
        place = tl.arange(0, RP)
        tl.store(held + row * RP + place, tl.where(place == 0, 1, 0))
        tl.store(units + row * RP + place, tl.where(place == 0, unit, 1.0))


@triton.jit(do_not_specialize=["place"])
def images_observe(
    point, image, columns, flags, numbers, held, sums, rows, width, place, first, parts, column, R: tl.constexpr,
    RP: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The newest column, its inner products with those that are held and with itself, and the norms of the step."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    line = tl.arange(0, RP)
    # All numbers of the row under way at once, before any is looked at.
    active = tl.load(flags + ACTIVE * rows + row)
    unit = tl.load(numbers + UNIT * rows + row).to(WIDE)
    holds = tl.load(held + row * RP + line)
    if active != 0:
        begin = row.to(tl.int64) * width
        reach = tl.where(line == place, 0, holds) * width
        along = tl.zeros((RP,), dtype=WIDE)
        gaps = tl.zeros((BLOCK,), dtype=WIDE)
        sizes = tl.zeros((BLOCK,), dtype=WIDE)
        squares = tl.zeros((BLOCK,), dtype=WIDE)
        for start in range(0, PIECE, BLOCK):
            offsets = part * PIECE + start + tl.arange(0, BLOCK)
            inside = offsets < width
            at = begin + offsets
            y = tl.load(point + at, mask=inside, other=0.0).to(WIDE)
            f = tl.load(image + at, mask=inside, other=0.0).to(WIDE)
            stored = columns + line[:, None].to(tl.int64) * column + at[None, :]
            others = tl.load(stored, mask=offsets[None, :] < reach[:, None], other=0.0).to(WIDE)
            g = f - y
            newest = (g * unit).to(columns.dtype.element_ty)
            tl.store(columns + place * column + at, newest, mask=inside)
            # Rounded as it is stored: products of columns with each other are then those of one set of vectors.
            newest = newest.to(WIDE)
            gaps += g * g
            sizes += f * f
            squares += newest * newest
            along += tl.sum(others * newest[None, :], axis=1)
        out = sums + row * (4 + R) * parts + first + part
        tl.store(out, tl.sum(gaps, axis=0))
        tl.store(out + parts, tl.sum(sizes, axis=0))
        tl.store(out + 2 * parts, tl.sum(squares, axis=0))
        tl.store(out + (4 + line) * parts, along, mask=line < R)


@triton.jit
def with_share(value, image, weight, at, offsets, width, WIDE: tl.constexpr):
    """``value + weight image``; what has no weight is not read, as it may not be finite, or not exist."""
    reach = tl.where(weight == 0, 0, width)
    return value + weight * tl.load(image + at, mask=offsets < reach, other=0.0).to(WIDE)


@triton.jit
def images_mix(
    image_0, image_1, image_2, image_3, image_4, image_5, image_6, image_7, image_8, image_9, point, last_point,
    image, last_image, following, weights, best, best_image, flags, rows, width, low, high, R: tl.constexpr,
    RP: tl.constexpr, CLAMPED: tl.constexpr, IMAGED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The next proposal, a mean of the last ``R`` images; and the copies that the judgement asked for.

    Triton takes lists of tensors in its newer versions only, hence an argument each.
    """
    _, row, offsets, inside, at = entries(width, BLOCK)
    mine = weights + row * RP
    # All weights before any image: those are then under way together.
    weight_0 = tl.load(mine).to(WIDE)
    weight_1 = tl.load(mine + 1).to(WIDE)
    weight_2 = tl.load(mine + 2).to(WIDE)
    weight_3 = tl.load(mine + (3 if R > 3 else 0)).to(WIDE)
    weight_4 = tl.load(mine + (4 if R > 4 else 0)).to(WIDE)
    weight_5 = tl.load(mine + (5 if R > 5 else 0)).to(WIDE)
    weight_6 = tl.load(mine + (6 if R > 6 else 0)).to(WIDE)
    weight_7 = tl.load(mine + (7 if R > 7 else 0)).to(WIDE)
    weight_8 = tl.load(mine + (8 if R > 8 else 0)).to(WIDE)
    weight_9 = tl.load(mine + (9 if R > 9 else 0)).to(WIDE)
    if IMAGED:
        save_image(image, last_image, best_image, flags, rows, row, at, inside)
    active = save_best(point, last_point, best, flags, rows, row, at, inside)
    if active != 0:
        value = tl.zeros((BLOCK,), dtype=WIDE)
        value = with_share(value, image_0, weight_0, at, offsets, width, WIDE)
        value = with_share(value, image_1, weight_1, at, offsets, width, WIDE)
        value = with_share(value, image_2, weight_2, at, offsets, width, WIDE)
        if R > 3:
            value = with_share(value, image_3, weight_3, at, offsets, width, WIDE)
        if R > 4:
            value = with_share(value, image_4, weight_4, at, offsets, width, WIDE)
        if R > 5:
            value = with_share(value, image_5, weight_5, at, offsets, width, WIDE)
        if R > 6:
            value = with_share(value, image_6, weight_6, at, offsets, width, WIDE)
        if R > 7:
            value = with_share(value, image_7, weight_7, at, offsets, width, WIDE)
        if R > 8:
            value = with_share(value, image_8, weight_8, at, offsets, width, WIDE)
        if R > 9:
            value = with_share(value, image_9, weight_9, at, offsets, width, WIDE)
        if CLAMPED:
            value = tl.minimum(tl.maximum(value, low), high)
        tl.store(following + at, value.to(following.dtype.element_ty), mask=inside)
