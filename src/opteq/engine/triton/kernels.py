"""Triton kernels of the fused solvers: what happens between two evaluations of the map, in passes over memory.

A state is a set of blocks, each a matrix ``(rows, width)`` in memory; one program takes ``BLOCK`` entries of one row.
Every program leaves its share of a sum over a row in ``sums (rows, K, parts)``; one program per row adds them up and
accepts or refuses the step (``accept_step``, ``cg_accept``, or the last program of ``plain_observe``). Rows that have
finished are skipped, so they cost no bandwidth.

This module has the names that a host program needs: the kernels that it launches, and the index of the
flag of active rows. What kernels call inside stays in their modules:

* :mod:`opteq.engine.triton.row_state_kernels`: the bookkeeping of a row, and the copies of its best point;
* :mod:`opteq.engine.triton.picard_kernels`: the pass of plain iteration;
* :mod:`opteq.engine.triton.anderson_kernels`: the passes of Anderson-accelerated iteration;
* :mod:`opteq.engine.triton.step_acceptance`: the decision of a start, and that between these passes;
* :mod:`opteq.engine.triton.anderson_weights`: Anderson's weights, which are part of both;
* :mod:`opteq.engine.triton.cg_kernels`: the passes and the decision of conjugate gradients.
"""

from __future__ import annotations

from opteq.engine.triton.anderson_kernels import anderson_mix, anderson_observe
from opteq.engine.triton.cg_kernels import (
    cg_accept,
    cg_begin,
    cg_curvature,
    cg_direction,
    cg_settle,
    cg_squares,
    cg_update,
)
from opteq.engine.triton.picard_kernels import plain_observe
from opteq.engine.triton.row_state_kernels import ACTIVE, keep, summarise
from opteq.engine.triton.step_acceptance import accept_start, accept_step

__all__ = [
    "ACTIVE", "accept_start", "accept_step", "anderson_mix", "anderson_observe", "cg_accept", "cg_begin",
    "cg_curvature", "cg_direction", "cg_settle", "cg_squares", "cg_update", "keep", "plain_observe", "summarise",
]  # fmt: skip
