"""Which samples of a batch are strict minima, by bounds on eigenvalues that hold with a stated probability."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opteq.diagnostics.minimum import curvature_at_solution, curvature_product
from opteq.problems.base import Problem
from opteq.problems.hidden import BoundMap, Hidden
from opteq.solvers.linear.lanczos import random_start
from opteq.states import Layout, State, blocks, like, map_state

_STAGES = ((16, 1 / 4), (32, 1 / 4), (64, 1 / 2))
"""Lanczos steps after which bounds are looked at, and the shares of the probability of a failure."""

_ZERO = 1e-12
"""Entries of that size are as good as 0, where most kinks are."""

_CHUNK = 2**24
"""Entries of the states that are looked at together."""


@torch.no_grad()
def strict_minima(hidden: BoundMap, state: State, steps: int = 60, failure: float = 1e-3) -> tuple[Tensor, ...] | None:
    """Which states are strict minima ``(B,)``, and bounds on the eigenvalues of S; None where J has no symmetric form.

    Args:
        hidden: the problem with its input bound.
        state: an equilibrium of it.
        steps: of Lanczos.
        failure: probability that a bound fails for a sample.
    """
    extremes = curvature_at_solution(hidden, state, steps, failure)
    if extremes is None or not isinstance(hidden, Hidden) or hidden.coupled:
        return None
    lower, upper = 1 - extremes.upper, 1 - extremes.lower  # the extremes are those of I - S
    rounding = 100 * torch.finfo(Layout.of(state).dtype).eps * torch.maximum(lower.abs(), upper.abs())
    lower, upper = lower - rounding, upper + rounding
    return (upper < 1) & smooth_beside(hidden, state), lower, upper


@torch.no_grad()
def certified_minima(problem: Problem, x: State, state: State, among: Tensor, failure: float = 1e-3) -> Tensor | None:
    """Which samples are strict minima, ``(B,)``; None where J has no symmetric form.

    The same statement as :func:`strict_minima`, in stages: samples that few steps decide take no more.

    Args:
        problem: of the samples.
        x: its input.
        state: equilibria for it.
        among: the samples in question, ``(B,)``; others are not called minima.
        failure: probability that a sample is called a strict minimum and is none.
    """
    found = torch.zeros_like(among)
    if not bool(among.any()):  # whether there could be any is a question of the problem
        first = torch.arange(min(1, len(among)), device=among.device)
        known = not len(first) or curvature_product(problem(_at(x, first)), _at(state, first)) is not None
        return found if known else None
    count = max(1, _CHUNK // sum(part[:1].numel() for part in blocks(state)))
    for steps, share in _STAGES:
        left = (among & ~found).nonzero()[:, 0]
        for rows in (left[begin : begin + count] for begin in range(0, len(left), count)):
            minima = strict_minima(problem(_at(x, rows)), _at(state, rows), steps, failure * share)
            if minima is None:
                return None
            found[rows] = minima[0]
    return found


@torch.no_grad()
def smooth_beside(hidden: Hidden, state: State) -> Tensor:
    """Where derivatives of sigma and of g are the same a few roundings away, ``(B,)``; at a kink they are not.

    Kinks need not be known: a user's own sigma, or a term with ``y.abs()``, may have some that nothing tells of, and
    autograd gives one of many derivatives there. Entries are moved to both sides by random multiples of their rounding.
    """
    state = map_state(Tensor.detach, state)
    direction, largest = random_direction(state), Layout.of(state).pack(state).abs().amax(dim=1)

    def slopes(inside: State) -> State:
        parts = zip(hidden.penalties(inside), blocks(inside), blocks(direction), strict=True)
        return like(inside, tuple(penalty.linearise(at).derivative(v) for penalty, at, v in parts))

    smooth = same_beside(slopes, hidden.preactivation(state))
    if not hidden.quadratic:
        smooth = smooth & same_beside(hidden.preactivation, state, largest + 0.01)
        smooth = smooth & same_beside(lambda at: hidden.negative_hessian_at(at)(direction), state)
    return smooth


def same_beside(function: Callable[[State], State], at: State, scale: Tensor | float = 1.0) -> Tensor:
    """Where a function changes by rounding only if its argument does, to either side, ``(B,)``."""
    point, here = Layout.of(at), function(at)
    out = Layout.of(here)
    eps = max(torch.finfo(dtype).eps for dtype in (*point.dtypes, *out.dtypes))
    least = max(_ZERO, *(torch.finfo(dtype).tiny for dtype in point.dtypes))  # float16 knows no smaller numbers
    rows, values = point.pack(at), out.pack(here)
    move = (2 * eps * rows.abs() + least) * point.pack(random_direction(at))
    room: Tensor = eps**0.5 * (scale + values.abs().amax(dim=1))
    above, below = (out.pack(function(point.unpack(rows + side * move))) for side in (1, -1))
    return torch.maximum((above - values).abs(), (below - values).abs()).amax(dim=1) <= room


def random_direction(shaped: State) -> State:
    """Numbers between 1 and 2 in magnitude, the same for all samples: a batch equals its samples one by one."""
    layout = Layout.of(shaped)
    rows = layout.pack(shaped)
    random = random_start(rows).clamp(-1, 1)
    return layout.unpack((random + random.sign()).expand_as(rows))


def _at(state: State, rows: Tensor) -> State:
    return map_state(lambda part: part.detach()[rows], state)
