"""Which samples of a batch are strict minima, by bounds on eigenvalues that hold with a stated probability."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.diagnostics.minimum import curvature_at_solution, curvature_product
from opteq.problems.base import Problem
from opteq.problems.hidden import BoundMap, Hidden
from opteq.solvers.linear.base import Product
from opteq.solvers.linear.lanczos import missing_share, random_start
from opteq.states import Layout, State, blocks, map_state, row_norms

_STAGES = ((16, 1 / 8), (24, 1 / 8), (36, 1 / 4), (64, 1 / 2))
"""Lanczos steps after which bounds are looked at, and the shares of the probability of a failure. The last stage
decides what 60 steps at once would."""

_SMALL = 256
"""States of up to that size get an orthogonal basis, which finds all eigenvalues in as many steps."""

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
    apart = hidden.distance_to_kink(map_state(Tensor.detach, state))
    strict = upper < 1
    return (strict if apart is None else strict & (apart > 0)), lower, upper


@torch.no_grad()
def certified_minima(problem: Problem, x: State, state: State, among: Tensor, failure: float = 1e-3) -> Tensor | None:
    """Which samples are strict minima, ``(B,)``; None where J has no symmetric form.

    The same statement as :func:`strict_minima`, in a fraction of its time. Bounds are looked at several times, and
    the probability of a failure is divided among them; samples that are decided take part no longer. The basis is not
    kept orthogonal: in rounding, Ritz values are those of exact Lanczos steps on a matrix with the same eigenvalues,
    some of them several times (Greenbaum 1989).

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
    width = sum(part[:1].numel() for part in blocks(state))
    asked, count = among.nonzero()[:, 0], max(1, _CHUNK // width)
    for begin in range(0, len(asked), count):
        rows = asked[begin : begin + count]
        decided = _decide(problem, _at(x, rows), _at(state, rows), width, failure)
        if decided is None:
            return None
        found[rows] = decided
    return found


def _decide(problem: Problem, x: State, state: State, width: int, failure: float) -> Tensor | None:
    hidden = problem(x)
    if width <= _SMALL or hidden.coupled or not isinstance(hidden, Hidden):
        minima = strict_minima(hidden, state, failure=failure)
        return None if minima is None else minima[0]
    rows = Layout.of(state).pack(state)
    apart = hidden.distance_to_kink(state)
    strict = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    left = torch.arange(len(rows), device=rows.device)
    lanczos = _Lanczos(rows)
    for steps, share in _STAGES:
        product = curvature_product(problem(_at(x, left)), _at(state, left))
        if product is None:
            return None
        smallest, largest = lanczos.extremes(product, steps)
        missing = missing_share(width, steps, failure * share / 2)
        spread = (largest - smallest) / (1 - 2 * missing) if missing < 0.5 else torch.full_like(largest, torch.inf)
        rounding = 100 * torch.finfo(rows.dtype).eps * (1 + torch.maximum(largest.abs(), smallest.abs()))
        above = smallest - missing * spread > rounding
        strict[left[above]] = True
        undecided = ~above & (smallest > 0)  # a Ritz value of 0 or less is a direction along which it is none
        if not bool(undecided.any()):
            break
        left = left[undecided]
        lanczos.keep(undecided)
    return strict if apart is None else strict & (apart > 0)


def _at(state: State, rows: Tensor) -> State:
    return map_state(lambda part: part.detach()[rows], state)


class _Lanczos:
    """Lanczos steps from one random start for all rows, which can be continued with fewer rows."""

    def __init__(self, like: Tensor) -> None:
        first = random_start(like)
        self.current = (first / torch.linalg.vector_norm(first)).expand_as(like)
        self.before = torch.zeros_like(self.current)
        wide = torch.float32 if like.device.type == "mps" else torch.float64
        self.diagonal = torch.zeros(len(like), 0, dtype=wide, device=like.device)
        self.beside = torch.zeros_like(self.diagonal)

    def keep(self, rows: Tensor) -> None:
        """Only these rows, a mask."""
        self.current, self.before = self.current[rows], self.before[rows]
        self.diagonal, self.beside = self.diagonal[rows], self.beside[rows]

    def extremes(self, product: Product, steps: int) -> tuple[Tensor, Tensor]:
        """The smallest and the largest Ritz value of each row after ``steps`` steps in all; NaN where one is."""
        tiny = 32 * torch.finfo(self.current.dtype).eps
        for _ in range(self.diagonal.shape[1], steps):
            image = product(self.current)
            quotient = (image * self.current).sum(dim=1, dtype=self.diagonal.dtype)
            rest = image - quotient.to(image.dtype)[:, None] * self.current
            if self.beside.shape[1]:
                rest = rest - self.beside[:, -1:].to(image.dtype) * self.before
                # An invariant subspace has been found: what follows is filled with a value from inside the spectrum.
                quotient = torch.where(self.beside[:, -1] == 0, self.diagonal[:, 0], quotient)
            size = row_norms(rest).to(self.diagonal.dtype)
            self.diagonal = torch.cat([self.diagonal, quotient[:, None]], dim=1)
            beside = torch.cat([self.beside, size[:, None]], dim=1)
            ended = size <= tiny * torch.maximum(self.diagonal.abs().amax(dim=1), beside.amax(dim=1))
            size = torch.where(ended, 0.0, size)
            self.beside = torch.cat([self.beside, size[:, None]], dim=1)
            self.before = self.current
            self.current = torch.where(
                ended[:, None], 0.0, rest / torch.where(ended, 1.0, size).to(rest.dtype)[:, None]
            )
        off = self.beside[:, :-1]
        small = torch.diag_embed(self.diagonal) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
        sound = small.isfinite().all(dim=2).all(dim=1)
        values = torch.linalg.eigvalsh(torch.where(sound[:, None, None], small, 0.0))
        values = torch.where(sound[:, None], values, torch.nan)
        return values[:, 0], values[:, -1]
