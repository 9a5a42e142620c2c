"""Triton kernels of the Gaussian similarity of projected patches, in one pass over the patches.

Patches are rows of a matrix ``(rows, D)``; one program takes ``ROWS`` of them. Sums are in ``WIDE``, and what leaves is
rounded once. ``gamma`` has one number for every ``share`` rows, which belong to one sample, or one for all where
``share`` is the number of rows. :mod:`opteq.engine.triton.operations.gaussian` launches them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(rows, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """This program's rows, which of them exist, offsets of their entries, and which of these exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    return row, row < rows, row[:, None] * D + column[None, :], inside


@triton.jit(do_not_specialize=["rows", "share"])
def weigh(
    patches, gamma, weights, weighed, rows, share, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """``e = exp(-gamma |q|^2)`` and ``e q``."""
    row, exists, at, inside = _place(rows, D, ROWS, WIDTH)
    q = tl.load(patches + at, mask=inside, other=0.0).to(WIDE)
    sharp = tl.load(gamma + row // share, mask=exists, other=0.0).to(WIDE)
    e = tl.exp(-sharp * tl.sum(q * q, axis=1))
    tl.store(weights + row, e, mask=exists)
    tl.store(weighed + at, (e[:, None] * q).to(weighed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "share"])
def weigh_derivative(
    patches, moves, gamma, weights, bent, rows, share, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """``e (2 gamma <q, a> q - a)`` for the move a of a patch q with weight e."""
    row, exists, at, inside = _place(rows, D, ROWS, WIDTH)
    q = tl.load(patches + at, mask=inside, other=0.0).to(WIDE)
    a = tl.load(moves + at, mask=inside, other=0.0).to(WIDE)
    e = tl.load(weights + row, mask=exists, other=0.0).to(WIDE)
    pull = 2 * tl.load(gamma + row // share, mask=exists, other=0.0).to(WIDE) * tl.sum(q * a, axis=1)
    tl.store(bent + at, (e[:, None] * (pull[:, None] * q - a)).to(bent.dtype.element_ty), mask=inside)
