"""Fixed-point solvers on raw maps: what must hold for any map, however bad, and what a good map deserves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import opteq
from opteq.solvers import Outcome, Solver, Status
from opteq.states import State, blocks

KINDS: dict[str, type[Solver]] = {"picard": opteq.Picard, "anderson": opteq.Anderson, "broyden": opteq.Broyden}
EXTRAPOLATING = {name: KINDS[name] for name in ("anderson", "broyden")}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FLOOR = 1e-12

each_solver = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
each_extrapolating = pytest.mark.parametrize("kind", EXTRAPOLATING.values(), ids=EXTRAPOLATING)
seeds = st.integers(0, 10_000)


def examples(count: int) -> settings:
    return settings(deadline=None, derandomize=True, max_examples=count)


def rows(state: State) -> Tensor:
    return torch.cat([part.flatten(1).to(torch.promote_types(part.dtype, torch.float32)) for part in blocks(state)], 1)


def residual_of(step: Callable[[State], State], state: State) -> Tensor:
    here, there = rows(state), rows(step(state))
    return (there - here).double().norm(dim=1) / there.double().norm(dim=1).clamp(min=FLOOR)


# ------------------------------------------------------------------------------------------------------ any map at all


@dataclass(frozen=True)
class Sample:
    """What a map is made from."""

    batch: int
    n: int
    dtype: torch.dtype
    seed: int

    def draw(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def matrix(self, norm: float) -> Tensor:
        matrix = self.draw(self.n, self.n)
        return (matrix * norm / max(float(torch.linalg.matrix_norm(matrix, 2)) if self.n else 1.0, 1e-9)).to(self.dtype)

    def shift(self) -> Tensor:
        return self.draw(self.batch, self.n).to(self.dtype)


def affine(norm: float, scale: float = 1.0) -> Callable[[Sample], Callable[[Tensor], Tensor]]:
    def make(s: Sample) -> Callable[[Tensor], Tensor]:
        matrix, shift = s.matrix(norm), s.shift() * scale
        return lambda y: y @ matrix.T + shift

    return make


def non_normal(s: Sample) -> Callable[[Tensor], Tensor]:
    """Spectral radius 0.9, norm far above one: plain steps grow before they shrink."""
    matrix = (0.9 * torch.eye(s.n, dtype=torch.float64) + s.draw(s.n, s.n).triu(1)).to(s.dtype)
    shift = s.shift()
    return lambda y: y @ matrix.T + shift


def rank_one(s: Sample) -> Callable[[Tensor], Tensor]:
    """All differences are parallel, so the columns of every memory are dependent."""
    direction, shift = s.draw(s.n).to(s.dtype), s.shift()
    return lambda y: (y.sum(1, keepdim=True) * 0.3).sin() * direction + shift


def nan_in_one_sample(s: Sample) -> Callable[[Tensor], Tensor]:
    good = affine(0.8)(s)
    bad = (torch.arange(s.batch) == 1)[:, None]
    return lambda y: torch.where(bad, torch.nan, good(y))


def nan_far_out(s: Sample) -> Callable[[Tensor], Tensor]:
    shift = s.shift()
    return lambda y: (1.5 - y).sqrt() - 0.4 * y + shift  # NaN beyond 1.5


def jumps(s: Sample) -> Callable[[Tensor], Tensor]:
    shift = s.shift()
    return lambda y: -y.sign() + 0.1 * shift


def overflows(s: Sample) -> Callable[[Tensor], Tensor]:
    shift = s.shift()
    return lambda y: y**3 + 2 + shift.abs()


def pole(s: Sample) -> Callable[[Tensor], Tensor]:
    shift = s.shift()
    return lambda y: 1 / (y - shift)


MAPS: dict[str, Callable[[Sample], Callable[[Tensor], Tensor]]] = {
    "zero": lambda s: torch.zeros_like,
    "identity": lambda s: lambda y: y,
    "constant": lambda s: lambda y: s.shift(),
    "contraction": affine(0.9),
    "barely": affine(0.9999),
    "non-normal": non_normal,
    "expanding": affine(3.0),
    "exploding": affine(1e6),
    "cycle": lambda s: lambda y: 1 - y,
    "drift": lambda s: lambda y: y + 1,
    "huge": affine(0.9, 1e30),
    "tiny": affine(0.9, 1e-30),
    "rank-one": rank_one,
    "saturating": lambda s: lambda y: torch.tanh(8 * y - s.shift()),
    "nan-in-one": nan_in_one_sample,
    "nan-far-out": nan_far_out,
    "jumps": jumps,
    "overflows": overflows,
    "pole": pole,
    "nan": lambda s: lambda y: y * torch.nan,
    "infinite": lambda s: lambda y: y + torch.inf,
}


def check(outcome: Outcome, step: Callable[[State], State], start: State, solver: Solver) -> None:
    """What an outcome promises, whatever the map."""
    batch = blocks(start)[0].shape[0]
    first = residual_of(step, start)
    found = outcome.residual
    assert all(torch.isfinite(part).all() for part in blocks(outcome.state))
    assert [(p.shape, p.dtype) for p in blocks(outcome.state)] == [(p.shape, p.dtype) for p in blocks(start)]
    assert found.shape == outcome.steps.shape == outcome.codes.shape == (batch,)
    # The reported residual is that of the state returned; infinite where even the start had none.
    finite = torch.isfinite(found)
    torch.testing.assert_close(found[finite], residual_of(step, outcome.state)[finite], rtol=1e-6, atol=1e-300)
    assert (outcome.codes[~finite] == int(Status.NON_FINITE)).all()
    # Never worse than the start, and converged exactly where the residual says so.
    known = torch.isfinite(first)
    assert (finite == known).all()
    assert (found[known] <= first[known] * (1 + 1e-6)).all()
    assert ((outcome.codes == int(Status.CONVERGED)) == (found <= outcome.tol)).all()
    # Steps and trace tell one story: the best of the trace is what was found, and a finished sample stands still.
    assert ((outcome.steps >= 0) & (outcome.steps <= solver.max_steps)).all()
    assert outcome.trace.shape == (max(outcome.steps.tolist(), default=0) + 1, batch)
    least = torch.where(torch.isnan(outcome.trace), torch.inf, outcome.trace).amin(0)
    torch.testing.assert_close(found, least, rtol=0, atol=0)
    for sample, steps in enumerate(outcome.steps.tolist()):
        tail = outcome.trace[steps:, sample]
        assert torch.equal(tail.nan_to_num(-1), tail[:1].nan_to_num(-1).expand_as(tail))


@each_solver
@pytest.mark.parametrize("name", MAPS)
@examples(6)
@given(batch=st.integers(0, 4), n=st.integers(0, 5), dtype=st.sampled_from(DTYPES), seed=seeds)
def test_any_map(kind: type[Solver], name: str, batch: int, n: int, dtype: torch.dtype, seed: int) -> None:
    sample = Sample(batch, n, dtype, seed)
    step = MAPS[name](sample)
    start = sample.shift() * 0.5
    solver = kind(max_steps=25)
    check(solver.solve(step, start), step, start, solver)
