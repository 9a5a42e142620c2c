"""Anderson's weights of a row: the small least-squares problem over the differences in memory.

With the changes of the residual as columns ``R``, the weights minimise ``|g - R w|``. The columns stay at their own
scale: ``scale`` has their lengths, ``gram`` their cosines, and ``used`` says which ones count. One program solves the
``M`` equations in one tile of ``MP`` rows, the next power of two. Those of
:mod:`opteq.engine.triton.step_acceptance` call these.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, attr-defined, misc"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_products(sums, parts, M: tl.constexpr, MP: tl.constexpr, P: tl.constexpr):
    """Pieces of the inner products of a row, as ``anderson_observe`` leaves them after its two norms.

    Those of the newest difference with itself and with the residual, ``(P,)``; those of every column with either,
    ``(MP, P)``.
    """
    line = tl.arange(0, MP)
    piece = tl.arange(0, P)
    some = piece < parts
    turns = tl.load(sums + 2 * parts + piece, mask=some, other=0.0)
    across = tl.load(sums + 3 * parts + piece, mask=some, other=0.0)
    at = sums + (4 + line[:, None]) * parts + piece[None, :]
    inside = (line[:, None] < M) & some[None, :]
    along = tl.load(at, mask=inside, other=0.0)
    target = tl.load(at + M * parts, mask=inside, other=0.0)
    return turns, across, along, target


@triton.jit
def load_columns(used, scale, gram, row, MP: tl.constexpr):
    """Which columns of a row count, their lengths and their cosines with each other."""
    line = tl.arange(0, MP)
    in_use = tl.load(used + row * MP + line)
    lengths = tl.load(scale + row * MP + line)
    cells = row * MP * MP + line[:, None] * MP + line[None, :]
    cosines = tl.load(gram + cells)
    return in_use, lengths, cosines


@triton.jit
def store_columns(used, scale, gram, row, in_use, lengths, cosines, MP: tl.constexpr):
    """Store the columns for ``load_columns`` of the next step."""
    line = tl.arange(0, MP)
    cells = row * MP * MP + line[:, None] * MP + line[None, :]
    tl.store(scale + row * MP + line, lengths)
    tl.store(gram + cells, cosines)
    tl.store(used + row * MP + line, in_use)


@triton.jit
def add_up(turns, across, along, target, slot, MP: tl.constexpr):
    """From the pieces: the length of the newest difference, and every column's products with it and with ``g``."""
    newest = tl.arange(0, MP) == slot
    length = tl.sqrt(tl.sum(turns.to(tl.float64), axis=0))
    with_newest = tl.sum(along.to(tl.float64), axis=1)
    with_residual = tl.sum(target.to(tl.float64), axis=1)
    # The column that the newest difference replaces was not read.
    with_residual = tl.where(newest, tl.sum(across.to(tl.float64), axis=0), with_residual)
    return length, with_newest, with_residual


@triton.jit
def enter_newest(in_use, lengths, cosines, length, with_newest, taken, slot, MP: tl.constexpr):
    """Put the newest difference in its slot. The columns of a refused row are forgotten: its next step is plain."""
    newest = tl.arange(0, MP) == slot
    learned = tl.where(taken & (length > 0) & (length < float("inf")), 1, 0)
    length = tl.where(learned != 0, length, 1.0)
    in_use = tl.where(newest, learned, in_use * tl.where(taken, 1, 0))
    lengths = tl.where(newest, length, lengths)
    fresh = tl.where(newest, 1.0, with_newest / (lengths * length))
    fresh = tl.where((fresh == fresh) & (in_use != 0), fresh, 0.0)
    cosines = tl.where(newest[:, None], fresh[None, :], cosines)
    cosines = tl.where(newest[None, :], fresh[:, None], cosines)
    return in_use, lengths, cosines


@triton.jit
def ridged(in_use, cosines, ridge, MP: tl.constexpr):
    """The matrix of the small system: cosines with a ridge, and ones for columns that do not count."""
    line = tl.arange(0, MP)
    pairs = in_use[:, None] * in_use[None, :] != 0
    diagonal = line[:, None] == line[None, :]
    lift = tl.where(in_use != 0, ridge, 1.0)
    return tl.where(pairs, cosines, 0.0) + tl.where(diagonal, lift[:, None], 0.0)


@triton.jit
def eliminate(system, goal, least_pivot, M: tl.constexpr, MP: tl.constexpr):
    """Gauss-Jordan elimination; its pivots are the squares of Cholesky's.

    The solution, and 1 if every pivot was above ``least_pivot``, else 0: then the columns are dependent and the
    solution means nothing.
    """
    line = tl.arange(0, MP)
    sound = 1
    for k in tl.static_range(M):
        chosen = line == k
        here = tl.sum(tl.where(chosen[:, None], system, 0.0), axis=0)
        down = tl.sum(tl.where(chosen[None, :], system, 0.0), axis=1)
        pivot = tl.sum(tl.where(chosen, here, 0.0), axis=0)
        sound = tl.where(pivot > least_pivot, sound, 0)
        inverse = 1.0 / tl.where(pivot > least_pivot, pivot, 1.0)
        here = here * inverse
        value = tl.sum(tl.where(chosen, goal, 0.0), axis=0) * inverse
        down = tl.where(chosen, 0.0, down)
        system = tl.where(chosen[:, None], here[None, :], system - down[:, None] * here[None, :])
        goal = tl.where(chosen, value, goal - down * value)
    return goal, sound


@triton.jit
def weigh(
    in_use, lengths, cosines, with_residual, gap, slot, ridge, M: tl.constexpr, MP: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The weights of the columns, and which of them stay: of dependent ones only the newest.

    ``WIDE`` is what the system is solved in; where the ridge is far above the rounding of float32, that will do.
    """
    system = ridged(in_use, cosines, ridge, MP).to(WIDE)
    goal = with_residual / (lengths * tl.where(gap > 0, gap, 1.0))
    goal = tl.where((goal == goal) & (in_use != 0), goal, 0.0)
    single = goal / (1 + ridge)
    solution, sound = eliminate(system, goal.to(WIDE), 3 * ridge, M, MP)
    in_use = in_use * tl.where(tl.arange(0, MP) == slot, 1, sound)
    found = tl.where(sound != 0, solution.to(tl.float64), single) * gap / lengths
    return tl.where(in_use != 0, found, 0.0), in_use
