"""Triton kernels for convolutions of 16 bits, and for what happens to their results.

Pictures are channels last, ``(batch, H, W, C)`` in memory, and what a kernel multiplies has 16 bits. A convolution
takes a box of pixels by tensor memory accesses, once for every tap: what lies outside of the picture is read as zero,
which is the padding. The box stands on the right of the product, as the shared memory that it lands in can be seen as
a matrix there without being moved. Sums are in float32. What happens to a product on its way to memory happens while
it is in registers.

Halves have the 11 significant bits of TF32, but a narrower range: there everything is multiplied by a power of two,
one for every sample and every row of weights, such that nothing can become too large. Where more bits count, a number
is a half and what is left of it, as another half: three products then make up one of some 22 bits.

:mod:`opteq.operators.narrow` launches them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl

from opteq._scale_kernels import factor_for, inverse_of, power_for


@triton.jit
def weights(
    weight, out, inverses, sums, start, by_row, by_column, by_tap, by_side, COLUMNS: tl.constexpr, TAPS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, FINE: tl.constexpr
):  # fmt: skip
    """One row of weights, tap by tap, in the precision of products; what undoes its scale; the sum of sizes.

    With ``FINE`` there are, for every tap, the halves of all columns twice, and then what is left of them.
    """
    row = tl.program_id(0)
    top = 0.0
    total = 0.0
    for first in range(0, TAPS * COLUMNS, BLOCK):
        place = first + tl.arange(0, BLOCK)
        tap = place // COLUMNS
        there = start + row * by_row + (place % COLUMNS) * by_column + (tap // WIDTH) * by_tap + (tap % WIDTH) * by_side
        size = tl.abs(tl.load(weight + there, mask=place < TAPS * COLUMNS, other=0.0).to(tl.float32))
        top = tl.maximum(top, tl.max(size, axis=0))
        total += tl.sum(size, axis=0)
    factor = factor_for(top) if SCALED else 1.0
    for first in range(0, TAPS * COLUMNS, BLOCK):
        place = first + tl.arange(0, BLOCK)
        tap = place // COLUMNS
        there = start + row * by_row + (place % COLUMNS) * by_column + (tap // WIDTH) * by_tap + (tap % WIDTH) * by_side
        value = tl.load(weight + there, mask=place < TAPS * COLUMNS, other=0.0).to(tl.float32) * factor
        half = value.to(out.dtype.element_ty)
        if FINE:
            here = out + row * (3 * TAPS * COLUMNS) + tap * (3 * COLUMNS) + place % COLUMNS
            tl.store(here, half, mask=place < TAPS * COLUMNS)
            tl.store(here + COLUMNS, half, mask=place < TAPS * COLUMNS)
            left = (value - half.to(tl.float32)).to(out.dtype.element_ty)
            tl.store(here + 2 * COLUMNS, left, mask=place < TAPS * COLUMNS)
        else:
            tl.store(out + row * (TAPS * COLUMNS) + place, half, mask=place < TAPS * COLUMNS)
    if SCALED:
        tl.store(inverses + row, inverse_of(factor))
        tl.store(sums + row, total)


@triton.jit
def _entries(source, minus, start, place, size, LESS: tl.constexpr, POLICY: tl.constexpr):
    """Entries of a sample: as they are, or without those of ``minus``, or without the positive part of those."""
    value = tl.load(source + start + place, mask=place < size, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if LESS != "nothing":
        other = tl.load(minus + start + place, mask=place < size, other=0.0, eviction_policy=POLICY)
        if LESS == "positive":
            other = tl.where(other < 0.0, 0.0, other)  # a NaN stays one
        value = value - other
    return value


@triton.jit
def largest(
    source, minus, parts, size, BLOCK: tl.constexpr, PARTS: tl.constexpr, POSITIVE: tl.constexpr, LESS: tl.constexpr
):  # fmt: skip
    """The largest entry of one part of a sample: by size, or of those that are positive."""
    sample = tl.program_id(0).to(tl.int64)
    top = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(tl.program_id(1) * BLOCK, size, PARTS * BLOCK):
        place = first + tl.arange(0, BLOCK)
        value = _entries(source, minus, sample * size, place, size, LESS, "")
        top = tl.maximum(top, value if POSITIVE else tl.abs(value))
    tl.store(parts + sample * PARTS + tl.program_id(1), tl.max(top, axis=0))


@triton.jit
def _note(tops, offset, gain, sample, batch, top, TOLD: tl.constexpr, BOUNDED: tl.constexpr):
    """Write down the size of a sample, and ``offset + gain * size``, where they are asked for."""
    if TOLD:
        tl.store(tops + sample, top)
    if BOUNDED:
        tl.store(tops + batch + sample, tl.load(offset + sample) + tl.load(gain + sample) * top)


@triton.jit(do_not_specialize=["stride", "batch"])
def narrow(
    source, minus, sizes, offset, gain, out, tops, size, stride, batch, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    COUNT: tl.constexpr, RECTIFY: tl.constexpr, LESS: tl.constexpr, TOLD: tl.constexpr, BOUNDED: tl.constexpr
):  # fmt: skip
    """A part of a sample in half precision, by the largest of ``COUNT`` sizes; what is negative as zero, if asked."""
    sample = tl.program_id(0).to(tl.int64)
    top = tl.max(tl.load(sizes + sample * stride + tl.arange(0, COUNT)), axis=0)
    factor = factor_for(top)
    for first in range(tl.program_id(1) * BLOCK, size, PARTS * BLOCK):
        place = first + tl.arange(0, BLOCK)
        value = _entries(source, minus, sample * size, place, size, LESS, "")
        if RECTIFY:
            value = tl.where(value < 0.0, 0.0, value)  # a NaN stays one
        tl.store(out + sample * size + place, (value * factor).to(out.dtype.element_ty), mask=place < size)
    if tl.program_id(1) == 0:
        _note(tops, offset, gain, sample, batch, top, TOLD, BOUNDED)


@triton.jit
def divide(
    source, sizes, out, size, BLOCK: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr, RECTIFY: tl.constexpr
):  # fmt: skip
    """A part of a sample in halves, and what is left of every number, behind all channels of its pixel."""
    sample = tl.program_id(0).to(tl.int64)
    factor = factor_for(tl.load(sizes + sample))
    for first in range(tl.program_id(1) * BLOCK, size, PARTS * BLOCK):
        place = first + tl.arange(0, BLOCK)
        value = tl.load(source + sample * size + place, mask=place < size, other=0.0)
        if RECTIFY:
            value = tl.where(value < 0.0, 0.0, value)  # a NaN stays one
        value = value * factor
        half = value.to(out.dtype.element_ty)
        there = out + 2 * sample * size + place + place // CHANNELS * CHANNELS
        tl.store(there, half, mask=place < size)
        tl.store(there + CHANNELS, (value - half.to(tl.float32)).to(out.dtype.element_ty), mask=place < size)


@triton.jit
def gap(left, right, parts, share, size, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """How far ``share * left`` and ``right`` are apart, part by part: sums of sizes, which do not lose a NaN."""
    sample = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(tl.program_id(1) * BLOCK, size, PARTS * BLOCK):
        place = first + tl.arange(0, BLOCK)
        there = tl.load(left + sample * size + place, mask=place < size, other=0.0)
        apart = share * there - tl.load(right + sample * size + place, mask=place < size, other=0.0)
        total += tl.abs(apart)
    tl.store(parts + sample * PARTS + tl.program_id(1), tl.sum(total, axis=0))


@triton.jit
def adopt(source, out, parts, least, fewer, size, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Copy a part of a sample where the sum of its ``parts`` is below ``least``; the smaller one goes to ``fewer``.

    Which is memory of its own: other parts of the sample may still have to read ``least``.
    """
    sample = tl.program_id(0).to(tl.int64)
    found = tl.sum(tl.load(parts + sample * PARTS + tl.arange(0, PARTS)), axis=0)
    before = tl.load(least + sample)
    closer = found < before
    if closer:  # never for a NaN
        for first in range(tl.program_id(1) * BLOCK, size, PARTS * BLOCK):
            place = first + tl.arange(0, BLOCK)
            value = tl.load(source + sample * size + place, mask=place < size, other=0.0)
            tl.store(out + sample * size + place, value, mask=place < size)
    if tl.program_id(1) == 0:
        tl.store(fewer + sample, tl.where(closer, found, before))


@triton.jit
def balance(tops_left, tops_right, sizes, total, batch, PADDED: tl.constexpr):
    """Sizes that give the left side factors whose products with those of the right side are one and the same.

    That product is the largest for which nothing becomes too large. Two sizes whose factors have it are left in
    ``total``: by itself it may be beyond the range of float32.
    """
    place = tl.arange(0, PADDED)
    inside = place < batch
    top_left = tl.load(tops_left + place, mask=inside, other=0.0)
    top_right = tl.load(tops_right + place, mask=inside, other=0.0)
    left = power_for(top_left)
    right = power_for(top_right)
    # A sample that is zero on one side adds nothing, and has no say.
    least = tl.min(tl.where((top_left > 0.0) & (top_right > 0.0), left + right, 1000), axis=0)
    least = tl.minimum(tl.maximum(least, -224), 250)
    own = tl.where(top_right > 0.0, 13 - (least - right), 13 - left)
    own = tl.minimum(tl.maximum(own, -126), 127)
    tl.store(sizes + place, ((own + 127) << 23).to(tl.float32, bitcast=True), mask=inside)
    half = least >> 1
    tl.store(total, ((140 - half) << 23).to(tl.float32, bitcast=True))
    tl.store(total + 1, ((140 - (least - half)) << 23).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["batch"])
def narrow_alone(
    source, minus, offset, gain, out, tops, size, batch, BLOCK: tl.constexpr, LESS: tl.constexpr, BOUNDED: tl.constexpr
):  # fmt: skip
    """A whole sample in half precision, read once for its size, and once more where it is at hand by then."""
    sample = tl.program_id(0).to(tl.int64)
    tall = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, size, BLOCK):
        place = first + tl.arange(0, BLOCK)
        tall = tl.maximum(tall, tl.abs(_entries(source, minus, sample * size, place, size, LESS, "")))
    top = tl.max(tall, axis=0)
    factor = factor_for(top)
    for first in range(0, size, BLOCK):
        place = first + tl.arange(0, BLOCK)
        # It is not needed again soon, unlike what is written.
        value = _entries(source, minus, sample * size, place, size, LESS, "evict_first")
        tl.store(out + sample * size + place, (value * factor).to(out.dtype.element_ty), mask=place < size)
    _note(tops, offset, gain, sample, batch, top, True, BOUNDED)


@triton.jit(do_not_specialize=["batch"])
def convolve(
    source, weight, out, beside, inverses, tops, batch, height, width, tiles_high, tiles_wide, COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, TAPS_HIGH: tl.constexpr, TAPS_WIDE: tl.constexpr,
    SAMPLES: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, THEN: tl.constexpr, SCALED: tl.constexpr, RESCALED: tl.constexpr
):  # fmt: skip
    """A convolution for a box of pixels and ``TILE`` channels, then what ``THEN`` says.

    Nothing; or the sum with ``beside``; or that, rectified; or how much the rectified sum is above ``beside``
    rectified; or the product with it; or the sum with one number a channel. With ``SCALED``, ``tops`` has the size of
    the source's entries and, with ``RESCALED``, behind those a bound of the result's. Where the source has fewer
    ``CHANNELS`` than the weight has ``COLUMNS``, it begins anew behind its last one.
    """
    PIXELS: tl.constexpr = SAMPLES * HIGH * WIDE
    BLOCKS: tl.constexpr = COLUMNS // DEPTH
    tile = tl.program_id(0)
    left = (tile % tiles_wide) * WIDE
    upper = (tile // tiles_wide % tiles_high) * HIGH
    sample = tile // (tiles_wide * tiles_high) * SAMPLES
    row = tl.program_id(1) * TILE
    total = tl.zeros((TILE, PIXELS), dtype=tl.float32)
    for turn in tl.range(0, TAPS_HIGH * TAPS_WIDE * BLOCKS, num_stages=STAGES):
        tap = turn // BLOCKS
        column = (turn % BLOCKS) * DEPTH
        down = upper + tap // TAPS_WIDE - TAPS_HIGH // 2
        right = left + tap % TAPS_WIDE - TAPS_WIDE // 2
        box = source.load([sample, down, right, column % CHANNELS]).reshape(PIXELS, DEPTH)
        total = tl.dot(weight.load([row, tap * COLUMNS + column]), box.T, total)
    result = total.T
    pixel = tl.arange(0, PIXELS)
    one = sample + pixel // (HIGH * WIDE)
    rows = row + tl.arange(0, TILE)
    if SCALED:
        back = inverse_of(factor_for(tl.load(tops + one, mask=one < batch, other=0.0)))
        result = result * back[:, None] * tl.load(inverses + rows, mask=rows < ROWS, other=0.0)[None, :]
    if THEN == "shift":
        result = result + tl.load(beside + rows, mask=rows < ROWS, other=0.0).to(tl.float32)[None, :]
    elif THEN != "nothing":
        down = upper + pixel // WIDE % HIGH
        right = left + pixel % WIDE
        inside = ((one < batch) & (down < height) & (right < width))[:, None] & (rows < ROWS)[None, :]
        place = ((one.to(tl.int64) * height + down) * width + right) * ROWS
        there = beside + place[:, None] + rows[None, :]
        other = tl.load(there, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if THEN == "weigh":
            result = result * other
        else:
            result = result + other
            if THEN != "add":
                result = tl.where(result < 0.0, 0.0, result)  # a NaN stays one
            if THEN == "change":
                result = result - tl.where(other < 0.0, 0.0, other)
    if RESCALED:
        result = result * factor_for(tl.load(tops + batch + one, mask=one < batch, other=0.0))[:, None]
    out.store([sample, upper, left, row], result.to(out.dtype).reshape(SAMPLES, HIGH, WIDE, TILE))


@triton.jit
def correlate(
    left, right, out, top_left, top_right, boxes, each, tiles_high, tiles, sides,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TAPS_HIGH: tl.constexpr, TAPS_WIDE: tl.constexpr,
    SAMPLES: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr,
    STAGES: tl.constexpr
):  # fmt: skip
    """For one tap, the sum over some boxes of ``left`` times ``right`` one tap away: the derivative by a weight.

    Boxes have all columns of a picture, so that their pixels follow each other in memory: ``left`` is a matrix.
    """
    PIXELS: tl.constexpr = SAMPLES * HIGH * WIDE
    place = tl.program_id(0)
    column = place % sides * SIDE
    row = place // sides % tiles * TILE
    tap = place // (sides * tiles)
    first = tl.program_id(1) * each
    total = tl.zeros((TILE, SIDE), dtype=tl.float32)
    for box in tl.range(first, tl.minimum(first + each, boxes), num_stages=STAGES):
        sample = box // tiles_high * SAMPLES
        upper = box % tiles_high * HIGH + tap // TAPS_WIDE - TAPS_HIGH // 2
        pixels = right.load([sample, upper, tap % TAPS_WIDE - TAPS_WIDE // 2, column]).reshape(PIXELS, SIDE)
        total = tl.dot(left.load([box * PIXELS, row]).T, pixels, total)
    total = total * inverse_of(factor_for(tl.load(top_left))) * inverse_of(factor_for(tl.load(top_right)))
    rows = row + tl.arange(0, TILE)
    columns = column + tl.arange(0, SIDE)
    start = tl.program_id(1).to(tl.int64) * (ROWS * TAPS_HIGH * TAPS_WIDE * COLUMNS) + tap * COLUMNS
    there = start + rows[:, None] * (TAPS_HIGH * TAPS_WIDE * COLUMNS) + columns[None, :]
    tl.store(out + there, total, mask=(rows < ROWS)[:, None] & (columns < COLUMNS)[None, :])
