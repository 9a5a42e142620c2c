"""The pass over memory of plain iteration, which also accepts the step: one launch per step besides the map."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl

from opteq.engine.triton.row_state_kernels import (
    BEST,
    COUNT,
    LEAST,
    PENDING,
    RESIDUAL,
    SAVE,
    STEPS,
    entries,
    record,
    save_best,
    unless_far,
)


@triton.jit(do_not_specialize=["step"])
def plain_observe(
    point, image, newest, before, best, following, damping, flags, numbers, sums, trace, step, rows, width, first,
    parts, tol, floor, START: tl.constexpr, DAMPED: tl.constexpr, NON_FINITE: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``|T(y) - y|^2`` and ``|T(y)|^2``, the copies that the last decision asked for, and this step's decision.

    ``START`` has no decision before it, and leaves its own to ``accept_start``. Where steps are ``DAMPED``, the next
    point is written too; otherwise it is the image.
    """
    part, row, _, inside, at = entries(width, BLOCK)
    if START:
        active = 1
    else:
        active = save_best(newest, before, best, flags, rows, row, at, inside)
    if active != 0:
        y = tl.load(point + at, mask=inside, other=0.0).to(WIDE)
        f = tl.load(image + at, mask=inside, other=0.0).to(WIDE)
        g = f - y
        out = sums + row * K * parts + first + part
        tl.store(out, tl.sum(g * g, axis=0))
        tl.store(out + parts, tl.sum(f * f, axis=0))
        if DAMPED:
            share = tl.load(damping + row).to(WIDE)
            # From the nearer end, as torch.lerp: a share of one is the image to the last digit.
            value = tl.where(share < 0.5, y + share * g, f - (1 - share) * g)
            tl.store(following + at, value.to(following.dtype.element_ty), mask=inside)
    if not START:
        # All threads of this program have read the flags, and its sums are written: the last one may accept the step.
        tl.debug_barrier()
        finished = tl.atomic_add(flags + COUNT * rows + row, 1, sem="acq_rel", scope="gpu")
        if finished == parts - 1:
            tl.store(flags + COUNT * rows + row, 0)
            mine = sums + row * K * parts
            accept_plain(mine, parts, flags, numbers, trace, step, rows, row, active, tol, floor, NON_FINITE, P)


@triton.jit
def accept_plain(
    sums, parts, flags, numbers, trace, step, rows, row, active, tol, floor, NON_FINITE: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """Update the state of one row by its newest point, as ``accept_step`` does where every finite step is taken."""
    piece = tl.arange(0, P)
    # Other programs have just written the sums: they are read where those are seen, past this one's own cache.
    gaps = tl.load(sums + piece, mask=piece < parts, other=0.0, cache_modifier=".cg")
    sizes = tl.load(sums + parts + piece, mask=piece < parts, other=0.0, cache_modifier=".cg")
    residual = tl.load(numbers + RESIDUAL * rows + row)
    best = tl.load(numbers + BEST * rows + row)
    least = tl.load(numbers + LEAST * rows + row)
    steps = tl.load(flags + STEPS * rows + row)
    was_pending = tl.load(flags + PENDING * rows + row) != 0
    if active == 0:
        tl.store(flags + SAVE * rows + row, 0)
    else:
        gap = tl.sqrt(tl.sum(gaps.to(tl.float64), axis=0))
        residual = gap / tl.maximum(tl.sqrt(tl.sum(sizes.to(tl.float64), axis=0)), floor)
        ends = tl.where(residual < float("inf"), 0, NON_FINITE)  # false for NaN
        residual = unless_far(residual, gap, least, tol)
        tl.store(numbers + LEAST * rows + row, tl.where(gap < least, gap, least))
        tl.store(numbers + RESIDUAL * rows + row, residual)
        record(flags, numbers, rows, row, residual, best, ends, steps, was_pending, tol)
    tl.store(trace + step * rows + row, residual)
