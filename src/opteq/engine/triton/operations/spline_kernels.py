"""Triton kernel of learned potentials: scale, look up, multiply by a weight, in one pass over the responses.

Entries of ``(B, C, ...)`` are taken in the order of memory. ``inner`` entries in a row belong to one channel (1 for
channels-last), ``sample`` entries to one sample. The table holds ``(3, tables, last + 1)`` numbers, see
:class:`~opteq.potentials.spline.SplineCurve`. :mod:`opteq.engine.triton.operations.spline` launches it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["entries", "inner", "sample"])
def evaluate(
    responses, table, inverse, weight, values, entries, inner, sample, width, channels: tl.constexpr,
    tables: tl.constexpr, last: tl.constexpr, ODD: tl.constexpr, SECOND: tl.constexpr, EVERYWHERE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``weight psi'(u inverse)``, or ``weight psi''(u inverse)``; ``EVERYWHERE``: one weight per entry of u."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < entries
    channel = (at // inner) % channels
    row = (at // sample) * channels + channel
    u = tl.load(responses + at, mask=inside, other=0.0) * tl.load(inverse + row, mask=inside, other=0.0)
    place = tl.abs(u) / width if ODD else u / width + last // 2
    known = place == place
    index = tl.minimum(tl.maximum(tl.where(known, place, 0.0), 0.0), last).to(tl.int32)
    if tables > 1:
        index += (channel * (last + 1)).to(tl.int32)
    q = tl.load(table + 2 * tables * (last + 1) + index)
    if SECOND:
        value = tl.where(known, q, u)
    else:
        p = tl.load(table + tables * (last + 1) + index)
        if ODD:
            p = tl.where(u > 0, p, tl.where(u < 0, -p, 0.0))
        value = p + q * u
    place_of_weight = at if EVERYWHERE else row
    value *= tl.load(weight + place_of_weight, mask=inside, other=0.0)
    tl.store(values + at, value, mask=inside)
