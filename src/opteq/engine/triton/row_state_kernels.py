"""The row state: the memory layout of its flags and numbers, and their updates in the kernels of all methods.

``flags (7, rows)`` are int32, ``numbers (7, rows)`` float64, by the indices below.

* ACTIVE, DEAD (a status code), STEPS;
* LATE: the last proposal was refused, so the point that counts is the one before it;
* PENDING: the best point so far is the newest one, which is still in its own buffer;
* SAVE: what has to be copied to ``best`` before its buffer is used again: 1 the newest point, 2 the one before it;
* PLAIN: the last proposal was a plain step;
* BEST_STEP, of conjugate gradients, which copy no answers and have no use for LATE: the step of the best one.

The best point is thus copied only when a worse one follows it, or at the end: a row that converges monotonically is
copied once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl

from opteq.solvers import loop

FAR = tl.constexpr(loop.FAR)

ACTIVE = tl.constexpr(0)
DEAD = tl.constexpr(1)
STEPS = tl.constexpr(2)
LATE = tl.constexpr(3)
PENDING = tl.constexpr(4)
SAVE = tl.constexpr(5)
PLAIN = tl.constexpr(6)
BEST_STEP = tl.constexpr(3)

BEST = tl.constexpr(0)
LEAST = tl.constexpr(1)
MERIT = tl.constexpr(2)
RESIDUAL = tl.constexpr(3)
SQUARE = tl.constexpr(4)
BETA = tl.constexpr(1)  # conjugate gradients have no use for LEAST and MERIT
SIZE = tl.constexpr(2)
LENGTH = tl.constexpr(5)  # of the answer, squared
ALONG = tl.constexpr(6)  # its product with the direction


@triton.jit
def total(sums, parts, P: tl.constexpr):
    """The sum of the partial results of a row's programs."""
    index = tl.arange(0, P)
    return tl.sum(tl.load(sums + index, mask=index < parts, other=0.0).to(tl.float64), axis=0)


@triton.jit
def open_flags(flags, rows, row, still, dead):
    """The flags of a row at its first point: to be copied to ``best`` now if it ends there, else when it must be."""
    tl.store(flags + ACTIVE * rows + row, still.to(tl.int32))
    tl.store(flags + DEAD * rows + row, dead)
    tl.store(flags + STEPS * rows + row, 0)
    tl.store(flags + LATE * rows + row, 0)
    tl.store(flags + PENDING * rows + row, still.to(tl.int32))
    tl.store(flags + SAVE * rows + row, tl.where(still, 0, 1))
    tl.store(flags + PLAIN * rows + row, 1)


@triton.jit
def unless_far(residual, gap, least, tol):
    """``residual``, or infinity for a point that is no answer: see ``FAR`` of :mod:`opteq.solvers.loop`."""
    far = (gap > FAR * tl.minimum(gap, least)) & (residual > tol)
    return tl.where(far, float("inf"), residual)


@triton.jit
def record(flags, numbers, rows, row, residual, best, ends, steps, was_pending, tol):
    """Enter a step: whether it is the best so far, whether the row goes on, and what has to be copied for that.

    ``best``, ``steps`` and ``was_pending`` are what is known from before. ``ends`` is the status of a row that cannot
    go on, else 0; where the best point is within the tolerance it does not count.
    """
    chosen = residual < best
    best = tl.where(chosen, residual, best)
    dead = tl.where(best <= tol, 0, ends)
    still = (best > tol) & (dead == 0)
    save = tl.where(chosen, tl.where(still, 0, 1), tl.where(was_pending, 2, 0))
    tl.store(numbers + BEST * rows + row, best)
    tl.store(flags + DEAD * rows + row, dead)
    tl.store(flags + ACTIVE * rows + row, still.to(tl.int32))
    tl.store(flags + STEPS * rows + row, steps + 1)
    tl.store(flags + PENDING * rows + row, (chosen & still).to(tl.int32))
    tl.store(flags + SAVE * rows + row, save)


@triton.jit
def entries(width, BLOCK: tl.constexpr):
    """This program's part of a row, the row, its entries' places in the row, which of them exist, and their offsets."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    offsets = part * BLOCK + tl.arange(0, BLOCK)
    return part, row, offsets, offsets < width, row.to(tl.int64) * width + offsets


@triton.jit
def save_best(newest, before, best, flags, rows, row, at, inside):
    """Copy this program's entries of the point that ``SAVE`` names to ``best``; whether the row is ``ACTIVE``."""
    save = tl.load(flags + SAVE * rows + row)
    active = tl.load(flags + ACTIVE * rows + row)  # both under way at once
    if save == 1:
        tl.store(best + at, tl.load(newest + at, mask=inside), mask=inside)
    if save == 2:
        tl.store(best + at, tl.load(before + at, mask=inside), mask=inside)
    return active


@triton.jit
def keep(newest, best, flags, rows, width, BLOCK: tl.constexpr):
    """At the end: bring what is pending to ``best``."""
    _, row, _, inside, at = entries(width, BLOCK)
    if tl.load(flags + PENDING * rows + row) != 0:
        tl.store(best + at, tl.load(newest + at, mask=inside), mask=inside)


@triton.jit
def summarise(
    flags, numbers, residual, steps, codes, rows, tol, CONVERGED: tl.constexpr, MAX_STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """How every row ended: its best residual, its steps and its status."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    best = tl.load(numbers + BEST * rows + row, mask=inside, other=0.0)
    dead = tl.load(flags + DEAD * rows + row, mask=inside, other=0)
    code = tl.where(best <= tol, CONVERGED, tl.where(dead > 0, dead, MAX_STEPS))
    tl.store(residual + row, best, mask=inside)
    tl.store(steps + row, tl.load(flags + STEPS * rows + row, mask=inside, other=0).to(tl.int64), mask=inside)
    tl.store(codes + row, code.to(tl.int64), mask=inside)
