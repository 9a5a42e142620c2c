"""Fixed-point solvers on raw maps: what must hold for any map, however bad, and what a good map deserves."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import opteq
from cases import CASES, Case, combined
from opteq.gradients.base import find_no_grad
from opteq.solvers import Anderson, Outcome, Solver, Status
from opteq.solvers.linear import CG, LinearSolver
from opteq.solvers.loop import Method, RowTask
from opteq.states import (
    Layout,
    State,
    any_row,
    blocks,
    inner,
    map_state,
    row_norms,
    single,
    sum_over_sample,
    zeros_per_row,
)

KINDS: dict[str, type[Solver]] = {"picard": opteq.Picard, "anderson": opteq.Anderson, "broyden": opteq.Broyden}
EXTRAPOLATING = {name: KINDS[name] for name in ("anderson", "broyden")}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FLOOR = 1e-12

LINEAR = {"cg": opteq.CG, "minres": opteq.MINRES, "gmres": opteq.GMRES}
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


def assert_solved(outcome: Outcome, step: Callable[[State], State], start: State, solver: Solver) -> None:
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
@examples(10)
@given(batch=st.integers(0, 4), n=st.integers(0, 5), dtype=st.sampled_from(DTYPES), seed=seeds)
def test_any_map(kind: type[Solver], name: str, batch: int, n: int, dtype: torch.dtype, seed: int) -> None:
    sample = Sample(batch, n, dtype, seed)
    step = MAPS[name](sample)
    start = sample.shift() * 0.5
    solver = kind(max_steps=25)
    assert_solved(solver.solve(step, start), step, start, solver)


@each_solver
@examples(10)
@given(batch=st.integers(1, 3), seed=seeds)
def test_tuple_states_of_different_shapes_and_dtypes(kind: type[Solver], batch: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, 3), (batch, 2, 2), (batch,), (batch, 0)]
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    start = tuple(torch.randn(s, generator=generator).to(d) for s, d in zip(shapes, dtypes, strict=True))
    shifts = [part.clone() for part in start]

    def step(y: State) -> State:
        total = sum(part.reshape(batch, part[0].numel()).sum(1).double() for part in blocks(y))
        mix = 0.3 * (0.2 * total).cos()
        return tuple(
            (shift + mix.reshape(-1, *[1] * (part.ndim - 1)).to(part.dtype)).to(part.dtype)
            for part, shift in zip(blocks(y), shifts, strict=True)
        )

    def full_rows(state: State) -> Tensor:
        return torch.cat([part.reshape(batch, part[0].numel()).double() for part in blocks(state)], dim=1)

    outcome = kind(max_steps=60).solve(step, start)
    assert isinstance(outcome.state, tuple)
    assert [(p.shape, p.dtype) for p in outcome.state] == [(p.shape, p.dtype) for p in start]
    assert (outcome.codes == 0).all()
    assert outcome.tol == torch.finfo(torch.bfloat16).eps  # the coarsest block decides what can be asked for
    here, there = full_rows(outcome.state), full_rows(step(outcome.state))
    torch.testing.assert_close((there - here).norm(dim=1) / there.norm(dim=1), outcome.residual)


@each_solver
def test_a_bad_mate_changes_nothing(kind: type[Solver]) -> None:
    """Bit for bit: the same batch with one sample's map replaced by something that never finishes."""
    sample = Sample(4, 5, torch.float64, 3)
    good = affine(0.95)(sample)
    mate = (torch.arange(4) == 2)[:, None]
    solver = kind(tol=1e-6, max_steps=40)
    expected = solver.solve(good, sample.shift())
    others = [0, 1, 3]
    for bad in (MAPS[name](sample) for name in ("nan", "overflows", "expanding", "cycle", "jumps", "identity")):
        outcome = solver.solve(lambda y, bad=bad: torch.where(mate, bad(y), good(y)), sample.shift())
        for field in ("state", "residual", "steps", "codes"):
            assert torch.equal(getattr(outcome, field)[others], getattr(expected, field)[others])


@each_solver
@examples(8)
@given(seed=seeds, norm=st.sampled_from([0.3, 0.9, 0.99]))
def test_a_batch_equals_its_samples(kind: type[Solver], seed: int, norm: float) -> None:
    sample = Sample(4, 9, torch.float64, seed)
    matrix, shift = sample.matrix(norm), sample.shift() * torch.tensor([[1e-3], [1.0], [50.0], [0.0]])
    solver = kind(tol=1e-3, max_steps=300)  # loose: where it stopped still shows
    together = solver.solve(lambda y: torch.tanh(y @ matrix.T) + shift, torch.ones_like(shift))
    for i in range(4):
        one = slice(i, i + 1)
        alone = solver.solve(lambda y, one=one: torch.tanh(y @ matrix.T) + shift[one], torch.ones_like(shift[one]))
        assert alone.steps.tolist() == together.steps[one].tolist()
        torch.testing.assert_close(alone.state, together.state[one], rtol=1e-6, atol=1e-8)


# ----------------------------------------------------------------------------------------- what linear maps deserve


def spectral(n: int, low: float, high: float, seed: int) -> tuple[Tensor, Tensor]:
    """A symmetric matrix with eigenvalues evenly from ``low`` to ``high`` in a random basis, and right sides."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    values = torch.linspace(high, low, n, dtype=torch.float64)
    return (basis * values) @ basis.T, torch.randn(3, n, generator=generator, dtype=torch.float64)


def dense_solution(matrix: Tensor, shift: Tensor) -> Tensor:
    return torch.linalg.solve(torch.eye(len(matrix), dtype=matrix.dtype) - matrix, shift.T).T


@examples(40)
@given(n=st.integers(1, 8), high=st.sampled_from([0.5, 0.9, 0.99, 0.9999]), seed=seeds, shear=st.sampled_from([0, 0.3]))
def test_anderson_ends_in_the_dimension(n: int, high: float, seed: int, shear: float) -> None:
    matrix, shift = spectral(n, -high, high, seed)
    matrix = matrix + shear * matrix.triu(1)
    outcome = opteq.Anderson(tol=1e-9, max_steps=100, memory=n).solve(lambda y: y @ matrix.T + shift, 0 * shift)
    exact = dense_solution(matrix, shift)
    assert (outcome.codes == 0).all()
    assert int(outcome.steps.max()) <= n + 4
    inverse = float(torch.linalg.matrix_norm(torch.linalg.inv(torch.eye(n, dtype=torch.float64) - matrix), 2))
    assert ((outcome.state - exact).norm(dim=1) <= 2e-9 * inverse * outcome.state.norm(dim=1)).all()


@examples(40)
@given(n=st.integers(1, 8), high=st.sampled_from([0.5, 0.9, 0.99]), seed=seeds)
def test_broyden_ends_in_twice_the_dimension(n: int, high: float, seed: int) -> None:
    matrix, shift = spectral(n, -high, high, seed)
    outcome = opteq.Broyden(tol=1e-9, max_steps=100, memory=2 * n).solve(lambda y: y @ matrix.T + shift, 0 * shift)
    assert (outcome.codes == 0).all()
    assert int(outcome.steps.min()) <= 2 * n + 2
    assert int(outcome.steps.max()) <= 6 * n + 12  # where proposals were refused on the way
    torch.testing.assert_close(outcome.state, dense_solution(matrix, shift), rtol=1e-5, atol=1e-6)


@each_extrapolating
def test_badly_conditioned_contractions_in_few_steps(kind: type[Solver]) -> None:
    """Plain steps would need some 200 000; a guard by relative residuals kept Broyden from coming back at all."""
    solved = 0
    for seed in range(10):
        matrix, shift = spectral(5, -0.9999, 0.9999, seed)
        outcome = kind(tol=1e-8, max_steps=60).solve(lambda y: y @ matrix.T + shift, torch.zeros_like(shift))  # noqa: B023
        solved += int((outcome.codes == 0).sum())
    assert solved == 30


@each_extrapolating
def test_memory_shorter_than_the_dimension(kind: type[Solver]) -> None:
    for memory in (1, 2, 3):
        matrix, shift = spectral(40, -0.9, 0.9, memory)
        outcome = kind(tol=1e-8, max_steps=300, memory=memory).solve(
            lambda y, matrix=matrix, shift=shift: y @ matrix.T + shift, torch.zeros_like(shift)
        )
        assert (outcome.codes == 0).all()
        torch.testing.assert_close(outcome.state, dense_solution(matrix, shift), rtol=1e-5, atol=1e-5)


@each_extrapolating
def test_expanding_linear_maps_have_fixed_points_too(kind: type[Solver]) -> None:
    matrix, shift = spectral(5, -3.0, 0.9, 1)
    outcome = kind(tol=1e-10, max_steps=60).solve(lambda y: y @ matrix.T + shift, torch.zeros_like(shift))
    assert (outcome.codes == 0).all()
    torch.testing.assert_close(outcome.state, dense_solution(matrix, shift), rtol=1e-7, atol=1e-8)
    picard = opteq.Picard(max_steps=60).solve(lambda y: y @ matrix.T + shift, torch.zeros_like(shift))
    assert (picard.codes != 0).all()


@each_solver
def test_without_a_fixed_point_the_answer_stays_near(kind: type[Solver]) -> None:
    """``relu(A y + 1)`` with A of eigenvalue 3 in a positive direction: steps lead to 3^60 times the start's."""
    matrix = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    shift = torch.tensor([[1.0, 0.5]], dtype=torch.float64)

    def step(y: Tensor) -> Tensor:
        return (y @ matrix + shift).relu()

    outcome = kind().solve(step, torch.zeros_like(shift))
    assert outcome.codes.item() != int(Status.CONVERGED)
    gap = (step(outcome.state) - outcome.state).norm()
    assert outcome.state.norm() <= 20 * shift.norm()
    assert gap <= 10.001 * shift.norm()  # the least one is at most that of the start
    assert outcome.residual.item() == pytest.approx(float(gap / step(outcome.state).norm()))


@each_solver
@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_scale_of_the_problem_does_not_matter(kind: type[Solver], scale: float, dtype: torch.dtype) -> None:
    matrix, shift = spectral(4, -0.8, 0.8, 2)
    matrix, shift = matrix.to(dtype), shift.to(dtype)
    solver = kind(tol=1e-5, max_steps=80, floor=1e-45)

    def solve(scale: float) -> Outcome:
        return solver.solve(lambda y: y @ matrix.T + scale * shift, torch.zeros_like(shift))

    plain, scaled = solve(1.0), solve(scale)
    assert (scaled.codes == 0).all()
    torch.testing.assert_close(scaled.state / scale, plain.state, rtol=1e-3, atol=1e-4)


def test_a_state_below_the_floor_counts_as_zero() -> None:
    for kind in KINDS.values():
        outcome = kind(tol=1e-4, max_steps=100, floor=1e-6).solve(lambda y: 0.5 * y, torch.ones(1, 3))
        assert outcome.codes.tolist() == [0]
        assert float(outcome.state.norm()) < 1e-9


# -------------------------------------------------------------------------------------------------------- the options


@each_solver
@pytest.mark.parametrize("start", [0.0, 1.0])
def test_a_tolerance_of_zero_takes_every_step_and_warns_of_nothing(kind: type[Solver], start: float) -> None:
    class Wells(opteq.Objective):  # two minima, and between them a maximum, at which a solve without input begins
        def start(self, x: Tensor) -> Tensor:
            return torch.full_like(x, start)

        def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
            return {"wells": (y.square() - 1).square().sum(1) - (x * y).sum(1)}

    layer = opteq.Equilibrium(Wells(), kind(tol=0, max_steps=7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = layer.solve(torch.tensor([[0.0], [0.3]]))
    assert solution.residual[0] == 0
    assert solution.steps.tolist() == [7, 7]
    assert solution.status == (Status.FIXED_STEPS, Status.FIXED_STEPS)


@each_solver
@pytest.mark.parametrize("name", ["contraction", "non-normal", "nan-far-out", "expanding", "identity"])
def test_how_often_the_host_looks_changes_no_answer(kind: type[Solver], name: str) -> None:
    sample = Sample(3, 4, torch.float64, 5)
    step = MAPS[name](sample)
    expected = kind(tol=1e-6, max_steps=30, check_every=1).solve(step, sample.shift())
    for every in (2, 7, 1000):
        outcome = kind(tol=1e-6, max_steps=30, check_every=every).solve(step, sample.shift())
        for field in ("state", "residual", "steps", "codes"):
            assert torch.equal(getattr(outcome, field), getattr(expected, field))
        assert torch.equal(outcome.trace[: len(expected.trace)].nan_to_num(-1), expected.trace.nan_to_num(-1))


def test_the_host_never_looks_when_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr("opteq.solvers.loop.any_row", lambda mask, of_all: looks.append(1) or bool(mask.any()))
    for kind in KINDS.values():
        kind(max_steps=9, check_every=10).solve(lambda y: y.cos(), torch.zeros(2, 3))
        assert not looks
    opteq.Picard(max_steps=9, tol=1e-30, check_every=4).solve(lambda y: y.cos(), torch.zeros(2, 3))
    assert len(looks) == 2


def test_the_history_of_a_solve_is_freed_with_it() -> None:
    histories: list[weakref.ref[Any]] = []

    class Noting(Anderson):
        def _method(self, task: RowTask) -> Method:
            method = super()._method(task)
            histories.append(weakref.ref(method))
            return method

    problem = opteq.OptEq(opteq.operators.Dense(3, 5, bound=0.9), torch.nn.Linear(2, 5))
    _, outcome = find_no_grad(problem(torch.randn(4, 2)), Noting(), None)
    assert outcome.steps.amin() > 0
    assert [history() for history in histories] == [None]


def test_damping_stops_a_cycle() -> None:
    def flip(y: Tensor) -> Tensor:
        return 2.0 - y

    start = torch.tensor([[5.0], [-3.0]])
    assert (opteq.Picard(max_steps=50).solve(flip, start).codes == int(Status.MAX_STEPS)).all()
    damped = opteq.Picard(damping=0.5).solve(flip, start)
    assert damped.state.tolist() == [[1.0], [1.0]]
    assert damped.steps.tolist() == [1, 1]


@each_solver
def test_damping_by_the_problem_and_by_the_user(kind: type[Solver]) -> None:
    """The user's damping goes before the problem's; one a sample is possible."""
    visited: list[Tensor] = []

    def step(y: Tensor) -> Tensor:
        visited.append(y.clone())
        return 2.0 - 3.0 * y

    start = torch.tensor([[1.0], [4.0]])
    for damping, expected in ((0.25, [[0.5], [0.5]]), (torch.tensor([0.25, 0.5]), [[0.5], [-3.0]])):
        visited.clear()
        kind(max_steps=1).solve(step, start, damping=damping)
        assert visited[1].tolist() == expected
        visited.clear()
        kind(max_steps=1, damping=0.125).solve(step, start, damping=damping)
        assert visited[1].tolist() == [[0.75], [2.25]]
    visited.clear()
    kind(max_steps=1).solve(step, start, damping=torch.tensor([0.25, 0.5]), coupled=True)
    assert visited[1].tolist() == [[0.5], [0.5]]  # one system: the more careful damping of the two


@each_solver
def test_coupled_samples_are_one_system(kind: type[Solver]) -> None:
    sample = Sample(3, 4, torch.float64, 8)
    shift = sample.shift()

    def step(y: Tensor) -> Tensor:
        return 0.5 * torch.tanh(y.mean(dim=0, keepdim=True)) + 0.3 * y.cos() + shift

    solver = kind(tol=1e-8, max_steps=200)
    whole = solver.solve(step, torch.zeros_like(shift), coupled=True)
    flat = solver.solve(lambda v: step(v.reshape(3, 4)).reshape(1, 12), torch.zeros(1, 12, dtype=torch.float64))
    assert torch.equal(whole.state, flat.state.reshape(3, 4))
    for field in ("residual", "steps", "codes"):
        assert getattr(whole, field).tolist() == getattr(flat, field).tolist() * 3
    assert whole.trace.shape == (int(flat.steps) + 1, 3)
    empty = solver.solve(lambda y: y, torch.zeros(0, 4), coupled=True)
    assert empty.state.shape == (0, 4)
    assert empty.residual.shape == (0,)


# --------------------------------------------------------------------------------------------------------- the guards


def flat_far_out(y: Tensor) -> Tensor:
    """``y - slope(y)`` with a slope that is nearly constant away from its zero at 5: a secant through it overshoots."""
    return y - 0.9 * torch.tanh(y - 5)


def flat_merit(y: Tensor) -> Tensor:
    """The convex function whose gradient step ``flat_far_out`` is."""
    return 0.9 * torch.log(torch.cosh((y - 5).double()))[:, 0]


@each_extrapolating
def test_a_proposal_that_raises_the_merit_is_refused(kind: type[Solver]) -> None:
    visited: list[Tensor] = []

    def step(y: Tensor) -> Tensor:
        visited.append(y.clone())
        return flat_far_out(y)

    start = torch.full((1, 1), 8.0, dtype=torch.float64)
    kind(max_steps=3).solve(step, start)
    first, second, third, fourth = visited
    assert torch.equal(second, flat_far_out(first))
    assert float(third) < -10  # the secant jumps far beyond 5
    assert not torch.equal(fourth, flat_far_out(second))  # and unguarded the solver goes on from there
    visited.clear()
    outcome = kind(max_steps=60, tol=1e-8).solve(step, start, step_and_merit=lambda y: (step(y), flat_merit(y)))
    assert torch.equal(visited[2], third)
    assert torch.equal(visited[3], flat_far_out(second))  # a plain step from where it was
    assert float(outcome.state) == pytest.approx(5)


def test_fista_solves_contractions_that_are_no_gradient_steps() -> None:
    """Momentum turns with a rotation: alone it goes round in circles for ever, and farther out."""
    generator = torch.Generator().manual_seed(0)
    turn = 0.8 * torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    shift = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    outcome = opteq.FISTA(tol=1e-10, max_steps=400).solve(lambda y: y @ turn.T + shift, torch.zeros_like(shift))
    assert bool((outcome.codes == int(Status.CONVERGED)).all())
    torch.testing.assert_close(outcome.state, dense_solution(turn, shift), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("kind", "growth"), [(opteq.Anderson, 2), (opteq.Broyden, 30)])
def test_without_a_merit_a_residual_may_not_grow_too_far(kind: type[Solver], growth: float) -> None:
    """As above, but beyond zero the map is steep: the jump lands where ``|T(y) - y|`` is large."""
    visited: list[Tensor] = []

    def step(y: Tensor, steepness: float) -> Tensor:
        visited.append(y.clone())
        return flat_far_out(y) - steepness * y.clamp(max=0)

    start = torch.full((1, 1), 8.0, dtype=torch.float64)
    for steepness, refused in ((0.01 * growth, False), (growth, True)):
        visited.clear()
        kind(max_steps=3).solve(lambda y, steepness=steepness: step(y, steepness), start)
        _, second, third, fourth = visited
        ratio = float((step(third, steepness) - third).abs() / (step(second, steepness) - second).abs())
        assert (ratio > growth) == refused
        assert torch.equal(fourth, flat_far_out(second)) == refused


@each_extrapolating
def test_projection_keeps_points_in_the_domain(kind: type[Solver]) -> None:
    visited: list[Tensor] = []
    shift = torch.tensor([[1e-4, 0.05]], dtype=torch.float64)

    def power(y: Tensor) -> Tensor:
        visited.append(y.clone())
        return 0.1 * y**1.5 + shift  # no number for negative y

    start = torch.tensor([[4.0, 9.0]], dtype=torch.float64)
    solver = kind(tol=1e-10, max_steps=100)
    solver.solve(power, start)
    assert any((y < 0).any() for y in visited)  # so there is something to keep out
    visited.clear()
    outcome = solver.solve(power, start, project=torch.relu)
    assert all((y >= 0).all() for y in visited)
    assert outcome.codes.tolist() == [0]
    expected = shift
    for _ in range(60):
        expected = power(expected)
    torch.testing.assert_close(outcome.state, expected, rtol=1e-8, atol=0)


@each_extrapolating
def test_infinite_differences_do_not_stay_in_the_memory(kind: type[Solver]) -> None:
    """The first difference of residuals overflows float32. Zero times infinity is no number, so it must not be kept."""
    images = iter([2e38, 1e30])

    def step(y: Tensor) -> Tensor:
        return torch.full_like(y, next(images, 1.0))

    outcome = kind(max_steps=20).solve(step, torch.zeros(1, 1))
    assert outcome.codes.tolist() == [0]
    assert float(outcome.state) == pytest.approx(1.0)


# ------------------------------------------------------------------------------------------- memory formats, estimates


@each_solver
def test_channels_last_states_give_the_same_answers(kind: type[Solver]) -> None:
    generator = torch.Generator().manual_seed(0)
    kernel = 0.08 * torch.randn(3, 3, 3, 3, generator=generator, dtype=torch.float64)
    shift = torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64)

    def solve(layout: torch.memory_format) -> Outcome:
        own = shift.contiguous(memory_format=layout)
        return kind(tol=1e-10, max_steps=200).solve(
            lambda y: torch.tanh(torch.conv2d(y, kernel, padding=1)) + own, torch.zeros_like(own)
        )

    plain, last = solve(torch.contiguous_format), solve(torch.channels_last)
    assert (last.codes == 0).all()
    assert last.steps.tolist() == plain.steps.tolist()
    torch.testing.assert_close(last.state, plain.state, rtol=1e-8, atol=1e-9)
    assert last.state.is_contiguous(memory_format=torch.channels_last)
    assert plain.state.is_contiguous()


@each_extrapolating
def test_the_inverse_estimate_is_exact_where_everything_was_seen(kind: type[Solver]) -> None:
    matrix, shift = spectral(4, -0.7, 0.8, 6)
    outcome = kind(tol=1e-13, max_steps=30, memory=12).solve(lambda y: y @ matrix.T + shift, torch.zeros_like(shift))
    assert outcome.inverse_adjoint is not None
    inverse = torch.linalg.inv(torch.eye(4, dtype=torch.float64) - matrix)
    # What the last steps taught is right in the directions taken: (I - J)^-1 applied to residuals gives moves.
    found = torch.stack([outcome.inverse_adjoint(e.expand(3, 4)) for e in torch.eye(4, dtype=torch.float64)], dim=1)
    assert float((found[0].T - inverse).norm() / inverse.norm()) < (1e-3 if kind is opteq.Anderson else 0.5)


@each_solver
def test_no_inverse_estimate_from_a_solver_without_memory(kind: type[Solver]) -> None:
    outcome = kind().solve(lambda y: y.cos(), torch.zeros(1, 2))
    assert (outcome.inverse_adjoint is None) == (kind is opteq.Picard)


def test_sam_on_bad_maps() -> None:
    """SAM returns its last finite point, not its best; it must be finite and truly have the residual it reports."""
    sam = opteq.SAM(regularizer=opteq.regularizers.Ridge(), max_steps=15)
    for name, make in MAPS.items():
        sample = Sample(3, 4, torch.float64, 1)
        step = make(sample)
        outcome = sam.solve(step, sample.shift())
        assert torch.isfinite(outcome.state).all(), name
        finite = torch.isfinite(outcome.residual)
        torch.testing.assert_close(outcome.residual[finite], residual_of(step, outcome.state)[finite])
        assert ((outcome.codes == 0) == (outcome.residual <= outcome.tol)).all()


# ------------------------------------------------------------------------------------------------ law 11 without a GPU


class NoLooking(TorchDispatchMode):
    """Refuses the operations by which a program learns a tensor's value: on a GPU each makes the host wait."""

    LOOKS = frozenset(
        {
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.equal.default,
            torch.ops.aten.masked_select.default,
        }
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in self.LOOKS, f"{func} looks at a value"
        return func(*args, **(kwargs or {}))


def test_the_watch_sees_a_look() -> None:
    with NoLooking(), pytest.raises(AssertionError, match="looks at a value"):
        bool(torch.ones(1) > 0)


# Forward and backward know nothing of each other: one pair a problem will do.
@pytest.mark.parametrize(("case", "kind", "linear"), combined(CASES, KINDS, LINEAR))
def test_no_step_looks_at_a_value(
    case: Case, kind: type[Solver], linear: type[LinearSolver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, from the binding of the input to the gradient of the weights, as a GPU would run them."""
    if not case.one_equation and linear is not opteq.GMRES:
        linear = opteq.GMRES  # this problem's Jacobian has no symmetry
    never = 1000
    gradient = opteq.Implicit(linear=linear(max_steps=5, check_every=never))
    layer = opteq.Equilibrium(case.problem(), kind(max_steps=5, check_every=never), gradient, on_failure="ignore")
    x = case.input().requires_grad_()
    with NoLooking():
        sum(part.square().sum() for part in blocks(layer(x))).backward()
    assert x.grad is not None


# ------------------------------------------------------------------------------------------------ states as matrices

block_shapes = st.lists(st.integers(0, 3), min_size=0, max_size=3)


@examples(60)
@given(
    shapes=st.lists(st.tuples(block_shapes, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=3),
    batch=st.integers(0, 3),
    coupled=st.booleans(),
    seed=seeds,
)
def test_packing_and_unpacking_are_inverse(
    shapes: list[tuple[list[int], torch.dtype, bool]], batch: int, coupled: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for shape, dtype, last in shapes:
        part = torch.randn(batch, *shape, generator=generator).to(dtype)
        parts.append(part.contiguous(memory_format=torch.channels_last) if last and part.ndim == 4 else part)
    for state in (tuple(parts), parts[0]):
        layout = Layout.of(state, coupled)
        matrix = layout.pack(state)
        width = sum(part[:1].numel() if batch else math.prod(part.shape[1:]) for part in blocks(state))
        assert matrix.shape == ((1, batch * width) if coupled else (batch, width))
        back = layout.unpack(matrix)
        assert isinstance(back, tuple) == isinstance(state, tuple)
        for found, wanted in zip(blocks(back), blocks(state), strict=True):
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)
        assert layout.per_sample(torch.ones(matrix.shape[0])).shape == (batch,)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_packing_copies_nothing(layout: torch.memory_format) -> None:
    picture = torch.randn(2, 3, 5, 4).contiguous(memory_format=layout)
    form = Layout.of(picture)
    matrix = form.pack(picture)
    assert matrix.data_ptr() == picture.data_ptr()
    back = form.unpack(matrix)
    assert isinstance(back, Tensor)
    assert back.data_ptr() == picture.data_ptr()
    assert back.stride() == picture.stride()
    assert form.exact
    assert not Layout.of(picture.half()).exact


def test_norms_neither_overflow_nor_vanish() -> None:
    for scale in (1e-30, 1e-38, 1e30, 1e38):
        norms = row_norms(torch.tensor([[3.0, 4.0], [0.0, 0.0]]).div(5) * scale)
        assert norms.tolist() == pytest.approx([scale, 0.0], rel=1e-6)
    assert row_norms(torch.tensor([[torch.nan], [torch.inf]])).isfinite().sum() == 0
    assert row_norms(torch.zeros(3, 0)).tolist() == [0.0, 0.0, 0.0]
    rows = torch.randn(3, 1000)
    for mate in (1.0, 1e-30, 1e30, torch.nan):  # a row's norm does not depend, in any digit, on what others hold
        assert torch.equal(row_norms(torch.cat([rows, torch.full((1, 1000), mate)]))[:3], row_norms(rows))
    assert row_norms(torch.zeros(0, 3)).shape == (0,)


def test_zeros_per_row() -> None:
    for shape in ((3, 4), (3, 0), (0, 4)):
        zeros = zeros_per_row(torch.full(shape, torch.nan), 2, 5, dtype=torch.float64)
        assert zeros.shape == (shape[0], 2, 5)
        assert zeros.dtype == torch.float64
        assert not zeros.any()
        zeros[:, 0] = 1.0  # memory of its own
    assert zeros_per_row(torch.ones(3, 4), dtype=torch.bool).tolist() == [False] * 3

    def write(row: Tensor) -> Tensor:
        zeros = zeros_per_row(row[None], 2)
        zeros[:, 1] = row.sum()
        return zeros[0]

    rows = torch.arange(6.0).reshape(3, 2)
    assert torch.func.vmap(write)(rows).tolist() == [[0.0, 1.0], [0.0, 5.0], [0.0, 9.0]]


def test_sums_over_samples_run_in_float32_or_better() -> None:
    many = torch.full((2, 3, 5000), 0.1, dtype=torch.float16)
    assert sum_over_sample(many).dtype == torch.float32
    assert sum_over_sample(many).tolist() == pytest.approx([15000 * float(many[0, 0, 0])] * 2, rel=1e-5)
    assert inner(many * 0 + 300, many * 0 + 300).tolist() == [15000 * 90000.0] * 2  # overflows float16
    assert inner((many, many.double()), (many, many.double())).dtype == torch.float64
    assert sum_over_sample(torch.ones(2)).tolist() == [1.0, 1.0]


def test_small_helpers() -> None:
    pair = (torch.ones(2, 1), torch.zeros(2, 3))
    assert [p.shape for p in blocks(map_state(torch.add, pair, pair))] == [p.shape for p in pair]
    with pytest.raises(TypeError, match="one tensor; got a tuple of 2"):
        single(pair)
    with pytest.raises(ValueError, match="zip"):
        map_state(torch.add, pair, pair[:1])
    assert any_row(torch.tensor([False, True]))
    assert not any_row(torch.zeros(0, dtype=torch.bool))
    seen: list[bool] = []
    for mask in (torch.zeros(2, 2, dtype=torch.bool), torch.tensor([[False, False], [False, True]])):
        torch.func.vmap(lambda one: seen.extend((any_row(one), any_row(one, of_all=True))) or one)(mask)
    assert seen == [False, False, False, True]


@pytest.mark.parametrize("flat", [0.1, 0.01, 0.001])
def test_few_moves_are_not_trusted_to_estimate_a_distance(flat: float) -> None:
    # The first step ends the stiff direction; what it tells of distances is wrong by the condition number.
    curvature = torch.tensor([1.0, flat], dtype=torch.float64)
    solver = opteq.FISTA(tol=2 * flat, max_steps=2000, measure="error")
    outcome = solver.solve(lambda y: y - curvature * (y - 1), torch.zeros(1, 2, dtype=torch.float64))
    assert int(outcome.codes) == int(Status.CONVERGED)
    assert float((outcome.state - 1).norm() / 2**0.5) < 4 * flat
    short = opteq.FISTA(max_steps=3, measure="error").solve(lambda y: y / 2 + 1, torch.zeros(1, 1))
    assert float(short.state) > 1.7  # the best of few steps is the last one, not the start


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_steps_take_few_operations_beside_the_map(monkeypatch) -> None:
    monkeypatch.setattr("opteq.states._get_current_dispatch_mode", lambda: None)  # as where nothing counts
    diagonal = torch.logspace(0, 3, 50).expand(16, -1)
    goal = torch.randn(16, 50)

    def step_and_merit(y):
        slope = diagonal * (y - goal)
        return y - slope / 1000, (slope * (y - goal)).sum(1)

    def step(y):
        return step_and_merit(y)[0]

    with Operations() as counted:
        outcome = opteq.FISTA(max_steps=500, measure="error").solve(
            step, torch.zeros(16, 50), step_and_merit=step_and_merit
        )
    assert outcome.codes.tolist() == [0] * 16
    assert counted.count < 100 * outcome.steps.max()  # 6 are the map's
    with Operations() as counted:
        finish = CG(max_steps=500).solve(lambda v: diagonal * v, goal)
    assert finish.codes.tolist() == [0] * 16
    assert counted.count < 50 * finish.steps.max()
