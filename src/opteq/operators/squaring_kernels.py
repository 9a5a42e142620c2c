"""Triton kernels that square many Hermitian matrices in one launch, and go back from the result to its derivative.

A matrix ``S + iT`` is kept as two arrays ``s`` and ``t`` of shape ``(batch, n, n)``; ``REAL`` ones have no ``t``. One
program takes a pair of tiles that mirror each other, ``(i, j)`` and ``(j, i)`` with ``i <= j``. Both operands of every
product are then rows of ``s`` and ``t``, since ``S' = S`` and ``T' = -T``, and only half of the product is computed.
What a program adds to the sums over its matrix it leaves in ``sums (batch, 3, pairs)``: squares of the entries as they
are stored, squares of what rounding to that format changed, and the trace. Whoever comes next adds them up.

:mod:`opteq.operators.half` has the iteration, ``M_{t+1} = (1 - c_t M_t)^2``, and how a bound is read from the sums;
:mod:`opteq.operators.fused` its derivative.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pair(index):
    """The tiles ``i <= j`` of a pair, which are counted column by column."""
    j = ((tl.sqrt(8.0 * index + 1.0) - 1.0) / 2.0).to(tl.int32)
    j = tl.where(j * (j + 1) // 2 > index, j - 1, j)
    j = tl.where((j + 1) * (j + 2) // 2 <= index, j + 1, j)
    return index - j * (j + 1) // 2, j


@triton.jit
def _total(numbers, parts, PARTS: tl.constexpr):
    line = tl.arange(0, PARTS)
    return tl.sum(tl.load(numbers + line, mask=line < parts, other=0.0), axis=0)


@triton.jit
def _tile_sum(tile):
    return tl.sum(tl.sum(tile, axis=1), axis=0)


@triton.jit
def _factor(sums, n, parts, FIRST: tl.constexpr, PARTS: tl.constexpr):
    """The factor ``c`` of ``1 - c M``, from the sums over ``M``."""
    square = _total(sums, parts, PARTS)
    if FIRST:
        # Any positive number will do; the trace is at least the size but for rounding, and a zero matrix has neither.
        size = tl.maximum(tl.sqrt(square), 1e-10)
        factor = 2.0 * tl.maximum(_total(sums + 2 * parts, parts, PARTS), size) / (size * size)
    else:
        factor = 2.0 * n / square
    return factor


@triton.jit
def _both(out_s, out_t, s, t, base, rows, columns, n, i, j, REAL: tl.constexpr):
    """Store a tile and the one that mirrors it."""
    here = base + rows[:, None] * n + columns[None, :]
    inside = (rows[:, None] < n) & (columns[None, :] < n)
    mirrored = base + columns[:, None] * n + rows[None, :]
    inside_mirrored = (columns[:, None] < n) & (rows[None, :] < n)
    tl.store(out_s + here, s, mask=inside)
    if i != j:
        tl.store(out_s + mirrored, tl.trans(s), mask=inside_mirrored)
    if not REAL:
        tl.store(out_t + here, t, mask=inside)
        if i != j:
            tl.store(out_t + mirrored, tl.trans(-t), mask=inside_mirrored)


@triton.jit
def _leave(
    s, t, out_s, out_t, sums, base, rows, columns, n, i, j, parts, REAL: tl.constexpr, STORE: tl.constexpr
):  # fmt: skip
    """Round and store a pair of tiles (or neither), and this program's share of the sums over the matrix."""
    low_s = s
    low_t = t
    if STORE:
        rounded_s = s.to(out_s.dtype.element_ty)
        rounded_t = t.to(out_s.dtype.element_ty)
        _both(out_s, out_t, rounded_s, rounded_t, base, rows, columns, n, i, j, REAL)
        low_s = rounded_s.to(tl.float32)
        low_t = rounded_t.to(tl.float32)
    weight = tl.where(i == j, 1.0, 2.0)
    changed_s = low_s - s
    changed_t = low_t - t
    tl.store(sums, weight * _tile_sum(low_s * low_s + low_t * low_t))
    tl.store(sums + parts, weight * _tile_sum(changed_s * changed_s + changed_t * changed_t))
    diagonal = (rows[:, None] == columns[None, :]) & (rows[:, None] < n)
    tl.store(sums + 2 * parts, _tile_sum(tl.where(diagonal, s, 0.0)))


@triton.jit
def begin(
    form, picked, length, out_s, out_t, sums, n, each, parts, PICKED: tl.constexpr, REAL: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Real forms, all of them or those that are ``picked``, each divided by the mean eigenvalue of its group.

    ``each`` forms in turn are one group's, of which ``length`` is the root of the mean trace.
    """
    index = tl.program_id(0)
    batch = tl.program_id(1)
    source = batch
    if PICKED:
        source = tl.load(picked + batch)
    i, j = _pair(index)
    rows = i * TILE + tl.arange(0, TILE)
    columns = j * TILE + tl.arange(0, TILE)
    begins = source.to(tl.int64) * n * n
    inside = (rows[:, None] < n) & (columns[None, :] < n)
    x = tl.load(form + begins + rows[:, None] * n + columns[None, :], mask=inside, other=0.0)
    inside_mirrored = (columns[:, None] < n) & (rows[None, :] < n)
    y = tl.load(form + begins + columns[:, None] * n + rows[None, :], mask=inside_mirrored, other=0.0)
    size = tl.load(length + source // each)
    scale = 0.5 * n / tl.maximum(size * size, 1e-30)
    y = tl.trans(y)
    base = batch.to(tl.int64) * n * n
    sums += batch * 3 * parts + index
    _leave((x + y) * scale, (x - y) * scale, out_s, out_t, sums, base, rows, columns, n, i, j, parts, REAL, True)


@triton.jit
def square(
    in_s, in_t, out_s, out_t, in_sums, sums, n, parts, FIRST: tl.constexpr, STORE: tl.constexpr, REAL: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """``(1 - c M)^2 = 1 - 2 c M + c^2 M^2``, or of the last one only the sums."""
    index = tl.program_id(0)
    batch = tl.program_id(1)
    i, j = _pair(index)
    rows = i * TILE + tl.arange(0, TILE)
    columns = j * TILE + tl.arange(0, TILE)
    base = batch.to(tl.int64) * n * n
    real = tl.zeros((TILE, TILE), dtype=tl.float32)
    plus = tl.zeros((TILE, TILE), dtype=tl.float32)
    minus = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, n, K):
        k = start + tl.arange(0, K)
        above = base + rows[:, None] * n + k[None, :]
        beside = base + columns[:, None] * n + k[None, :]
        inside_above = (rows[:, None] < n) & (k[None, :] < n)
        inside_beside = (columns[:, None] < n) & (k[None, :] < n)
        left_s = tl.load(in_s + above, mask=inside_above, other=0.0)
        right_s = tl.trans(tl.load(in_s + beside, mask=inside_beside, other=0.0))
        # Products of float16 numbers are exact in float32, where they are summed.
        real = tl.dot(left_s, right_s, real, input_precision=PRECISION)
        if not REAL:
            left_t = tl.load(in_t + above, mask=inside_above, other=0.0)
            right_t = tl.trans(tl.load(in_t + beside, mask=inside_beside, other=0.0))
            real = tl.dot(left_t, right_t, real, input_precision=PRECISION)
            plus = tl.dot(left_t, right_s, plus, input_precision=PRECISION)
            minus = tl.dot(left_s, right_t, minus, input_precision=PRECISION)
    c = _factor(in_sums + batch * 3 * parts, n, parts, FIRST, PARTS)
    here = base + rows[:, None] * n + columns[None, :]
    inside = (rows[:, None] < n) & (columns[None, :] < n)
    one = tl.where((rows[:, None] == columns[None, :]) & inside, 1.0, 0.0)
    s = one + c * (c * real - 2.0 * tl.load(in_s + here, mask=inside, other=0.0).to(tl.float32))
    t = plus - minus
    if not REAL:
        t = c * (c * t - 2.0 * tl.load(in_t + here, mask=inside, other=0.0).to(tl.float32))
    sums += batch * 3 * parts + index
    _leave(s, t, out_s, out_t, sums, base, rows, columns, n, i, j, parts, REAL, STORE)


@triton.jit
def read(sums, length, bounds, n, each, batches, parts, T: tl.constexpr, FLOOR: tl.constexpr, PARTS: tl.constexpr):
    """The bound of one matrix's largest eigenvalue, from all the sums ``(T + 1, batch, 3, pairs)`` over its powers."""
    batch = tl.program_id(0)
    level = sums + (T * batches + batch) * 3 * parts
    second = _total(level, parts, PARTS) / n
    mean = _total(level + 2 * parts, parts, PARTS) / n
    top = mean + tl.sqrt((n - 1) * tl.maximum(second - mean * mean, FLOOR * second))
    for step in tl.static_range(T):
        level = sums + ((T - 1 - step) * batches + batch) * 3 * parts
        changed = tl.sqrt(_total(level + parts, parts, PARTS))
        top = (1.0 + tl.sqrt(top)) / _factor(level, n, parts, step == T - 1, PARTS) + changed
    size = tl.load(length + batch // each)
    tl.store(bounds + batch, top * tl.maximum(size * size, 1e-30) / n)


@triton.jit
def choose(bounds, picked, others, count, MOST: tl.constexpr, PADDED: tl.constexpr):
    """Where the ``MOST`` largest of ``count`` bounds are, and the largest of the others."""
    line = tl.arange(0, PADDED)
    left = tl.load(bounds + line, mask=line < count, other=-1.0)
    # What is not a number compares as nothing: as infinity it is chosen, and found to be none when it is computed.
    left = tl.where(left == left, left, float("inf"))
    for place in tl.static_range(MOST):
        largest = tl.argmax(left, axis=0)
        tl.store(picked + place, largest)
        left = tl.where(line == largest, -1.0, left)
    tl.store(others, tl.max(left, axis=0))


@triton.jit
def _at(numbers, line, place):
    return tl.sum(tl.where(line == place, numbers, 0.0), axis=0)


@triton.jit
def value(
    sums, picked, length, values, rates, n, each, batches, parts, PICKED: tl.constexpr, T: tl.constexpr,
    EPS: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The bound of a matrix that was not rounded, and the rates ``(batch, 2, LEVELS)`` that its derivative starts from.

    The rates are ``c_t``, and the derivative by ``c_t`` while the matrices stay; at the last level, the factor of
    ``M_T`` in the derivative by ``M_T``, and nothing.
    """
    batch = tl.program_id(0)
    line = tl.arange(0, LEVELS)
    # The last matrix has mean 1, as the matrix before it has mean square 1.
    spread = _total(sums + (T * batches + batch) * 3 * parts, parts, PARTS) / n - 1.0
    root = tl.sqrt(tl.maximum(n - 1, 1) * tl.maximum(spread, EPS))
    top = 1.0 + root
    tops = tl.where(line == T, top, 0.0)
    factors = tl.zeros((LEVELS,), dtype=tl.float32)
    for step in tl.static_range(T):
        c = _factor(sums + ((T - 1 - step) * batches + batch) * 3 * parts, n, parts, step == T - 1, PARTS)
        top = (1.0 + tl.sqrt(top)) / c
        tops = tl.where(line == T - 1 - step, top, tops)
        factors = tl.where(line == T - 1 - step, c, factors)
    source = batch
    if PICKED:
        source = tl.load(picked + batch)
    size = tl.load(length + source // each)
    tl.store(values + batch, top * tl.maximum(size * size, 1e-30) / n)
    weight = 1.0
    for step in tl.static_range(T):
        c = _at(factors, line, step)
        slope = -weight * _at(tops, line, step) / c
        weight = weight / (2.0 * c * tl.sqrt(_at(tops, line, step + 1)))
        tl.store(rates + batch * 2 * LEVELS + step, c)
        tl.store(rates + batch * 2 * LEVELS + LEVELS + step, slope)
    weight = tl.where(spread > EPS, weight * tl.maximum(n - 1, 1) / (n * root), 0.0)
    tl.store(rates + batch * 2 * LEVELS + T, weight)


@triton.jit
def settle(
    values, picked, others, winner, result, each, MOST: tl.constexpr, PICKED: tl.constexpr
):  # fmt: skip
    """The largest value, where it is (place, frequency and group), and by what the bound of the others raises it."""
    line = tl.arange(0, MOST)
    found = tl.load(values + line)
    place = tl.argmax(tl.where(found == found, found, float("inf")), axis=0)
    best = tl.sum(tl.where(line == place, found, 0.0), axis=0)
    whole = best
    source = place
    if PICKED:
        # A value that is not a number has to stay one.
        rest = tl.load(others)
        whole = tl.where(rest > best, rest, best)
        source = tl.load(picked + place)
    tl.store(winner, place)
    tl.store(winner + 1, source % each)
    tl.store(winner + 2, source // each)
    tl.store(result, whole)
    tl.store(result + 1, whole / best)


@triton.jit(do_not_specialize=["level"])
def slope(
    s, t, above_s, above_t, in_s, in_t, out_s, out_t, winner, rates, in_traces, traces, n, parts, level,
    TOP: tl.constexpr, REAL: tl.constexpr, PRECISION: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr,
    TILE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """``W_t = (1 - c_t M_t) D_{t+1}`` for the winner, where ``D_{t+1}`` is the derivative by ``M_{t+1}``.

    It is ``alpha W_{t+1} + beta M_{t+1}`` (without ``W`` at the top), so it needs no array of its own. ``traces``
    receives what adds up to ``tr(W_t M_t)``.
    """
    index = tl.program_id(0)
    i, j = _pair(index)
    rows = i * TILE + tl.arange(0, TILE)
    columns = j * TILE + tl.arange(0, TILE)
    batch = tl.load(winner)
    base = batch.to(tl.int64) * n * n
    rates += batch * 2 * LEVELS
    c = tl.load(rates + level)
    beta = tl.load(rates + level + 1)
    alpha = 0.0
    if not TOP:
        later = beta
        rate = tl.load(rates + LEVELS + level + 1) - 2.0 * _total(in_traces, parts, PARTS)
        alpha = -2.0 * later
        beta = -rate * later * later / n
    real = tl.zeros((TILE, TILE), dtype=tl.float32)
    plus = tl.zeros((TILE, TILE), dtype=tl.float32)
    minus = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, n, K):
        k = start + tl.arange(0, K)
        above = rows[:, None] * n + k[None, :]
        beside = columns[:, None] * n + k[None, :]
        inside_above = (rows[:, None] < n) & (k[None, :] < n)
        inside_beside = (columns[:, None] < n) & (k[None, :] < n)
        left_s = tl.load(s + base + above, mask=inside_above, other=0.0)
        right_s = beta * tl.load(above_s + base + beside, mask=inside_beside, other=0.0)
        if not TOP:
            right_s += alpha * tl.load(in_s + beside, mask=inside_beside, other=0.0)
        right_s = tl.trans(right_s)
        real = tl.dot(left_s, right_s, real, input_precision=PRECISION)
        if not REAL:
            left_t = tl.load(t + base + above, mask=inside_above, other=0.0)
            right_t = beta * tl.load(above_t + base + beside, mask=inside_beside, other=0.0)
            if not TOP:
                right_t += alpha * tl.load(in_t + beside, mask=inside_beside, other=0.0)
            right_t = tl.trans(right_t)
            real = tl.dot(left_t, right_t, real, input_precision=PRECISION)
            plus = tl.dot(left_t, right_s, plus, input_precision=PRECISION)
            minus = tl.dot(left_s, right_t, minus, input_precision=PRECISION)
    here = rows[:, None] * n + columns[None, :]
    inside = (rows[:, None] < n) & (columns[None, :] < n)
    w_s = beta * tl.load(above_s + base + here, mask=inside, other=0.0) - c * real
    if not TOP:
        w_s += alpha * tl.load(in_s + here, mask=inside, other=0.0)
    along = w_s * tl.load(s + base + here, mask=inside, other=0.0)
    w_t = plus - minus
    if not REAL:
        w_t = beta * tl.load(above_t + base + here, mask=inside, other=0.0) - c * w_t
        if not TOP:
            w_t += alpha * tl.load(in_t + here, mask=inside, other=0.0)
        along += w_t * tl.load(t + base + here, mask=inside, other=0.0)
    tl.store(traces + index, tl.where(i == j, 1.0, 2.0) * _tile_sum(along))
    _both(out_s, out_t, w_s, w_t, 0, rows, columns, n, i, j, REAL)


@triton.jit
def finish(
    s, t, in_s, in_t, winner, rates, in_traces, sums, result, out, n, parts, REAL: tl.constexpr, LEVELS: tl.constexpr,
    PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The derivative by the winner's real form, times what :func:`settle` raised its value by."""
    index = tl.program_id(0)
    i, j = _pair(index)
    rows = i * TILE + tl.arange(0, TILE)
    columns = j * TILE + tl.arange(0, TILE)
    batch = tl.load(winner)
    base = batch.to(tl.int64) * n * n
    rates += batch * 2 * LEVELS
    raised = tl.load(result + 1)
    c = tl.load(rates)
    rate = tl.load(rates + LEVELS) - 2.0 * _total(in_traces, parts, PARTS)
    sums += batch * 3 * parts
    square = _total(sums, parts, PARTS)
    wide = _total(sums + 2 * parts, parts, PARTS) > tl.sqrt(square)
    # c = 2 trace / square, or 2 / size where rounding has made the trace the smaller one, or constant for no matrix.
    floored = tl.where(square > 1e-20, square, 1.0)
    rate = tl.where(square > 1e-20, rate, 0.0)
    by_matrix = -rate * c * tl.where(wide, 2.0, 1.0) / floored
    by_trace = tl.where(wide, 2.0 * rate / floored, 0.0)
    here = rows[:, None] * n + columns[None, :]
    inside = (rows[:, None] < n) & (columns[None, :] < n)
    one = tl.where((rows[:, None] == columns[None, :]) & inside, 1.0, 0.0)
    d_s = by_matrix * tl.load(s + base + here, mask=inside, other=0.0) + by_trace * one
    d_s = raised * (d_s - 2.0 * c * tl.load(in_s + here, mask=inside, other=0.0))
    d_t = tl.zeros((TILE, TILE), dtype=tl.float32)
    if not REAL:
        d_t = by_matrix * tl.load(t + base + here, mask=inside, other=0.0)
        d_t = raised * (d_t - 2.0 * c * tl.load(in_t + here, mask=inside, other=0.0))
    tl.store(out + here, d_s + d_t, mask=inside)
    if i != j:
        mirrored = columns[:, None] * n + rows[None, :]
        inside_mirrored = (columns[:, None] < n) & (rows[None, :] < n)
        tl.store(out + mirrored, tl.trans(d_s - d_t), mask=inside_mirrored)
