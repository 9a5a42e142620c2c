"""Triton kernels against the plain path, by Triton's interpreter: a smoke set; the full matrix runs on a GPU.

The interpreter takes tens of milliseconds for a step of a row, so states are small and solves short.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import opteq
from opteq.engine.settings import settings
from opteq.kernels import gaussian as plain_gaussian
from opteq.operators.resample import pool, spread
from opteq.potentials.base import scaled_derivative, scaled_second
from opteq.problems.hidden import BoundMap
from opteq.solvers import Outcome, Solver, Status
from opteq.solvers.linear import CG
from opteq.solvers.loop import Loop, iterate
from opteq.states import Layout, State, blocks, map_state

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: tests/test_engine_gpu.py", allow_module_level=True)

from opteq.engine.triton import row_state
from opteq.engine.triton.operations import gaussian, resample, spline
from opteq.engine.triton.solvers import open_fixed_point, open_linear

# Rows overflow here on purpose, and the interpreter computes with numpy, which says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NEAR = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "interpreted", True)
    monkeypatch.setattr(row_state, "BLOCK", 512)  # so that small states have several pieces


class Map(BoundMap):
    """A step as a bound problem."""

    def __init__(self, step: Callable[[State], State], start: State, **options: object) -> None:
        self.step, self._start = step, start  # type: ignore[method-assign]
        for name, value in options.items():
            setattr(self, name, value)

    def start(self) -> State:
        return self._start

    def step(self, y: State) -> State:  # type: ignore[no-redef]
        raise NotImplementedError


def both(solver: Solver, hidden: Map) -> tuple[Outcome, Outcome]:
    """The outcome of the plain loop, and that of the kernels."""
    task = hidden.state_form().task
    with torch.no_grad():
        plain = solver.open(task)
        fused = open_fixed_point(hidden, solver, task)
        assert not isinstance(fused.iteration, Loop)
        iterate(plain.iteration)
        iterate(fused.iteration)
        return plain.outcome(), fused.outcome()


def assert_agree(plain: Outcome, fused: Outcome, near: float, exact: bool = True) -> None:
    assert fused.codes.tolist() == plain.codes.tolist()
    assert (fused.steps - plain.steps).abs().max() <= (0 if exact else 1)
    for own, other in zip(blocks(fused.state), blocks(plain.state), strict=True):
        assert own.dtype == other.dtype
        torch.testing.assert_close(own.double(), other.double(), rtol=near, atol=near, equal_nan=True)
    common = int(torch.minimum(plain.steps, fused.steps).min()) + 1
    torch.testing.assert_close(
        fused.trace[:common].double(), plain.trace[:common].double(), rtol=10 * near, atol=near, equal_nan=True
    )


def tanh_map(shape: tuple[int, ...], dtype: torch.dtype, slope: float, seed: int = 0) -> Callable[[Tensor], Tensor]:
    """``tanh(A y + b)`` with ``|A|`` = slope, for every sample with a b of its own."""
    generator = torch.Generator().manual_seed(seed)
    width = math.prod(shape[1:])
    A = torch.randn(width, width, generator=generator, dtype=torch.float64)
    A = (slope * A / torch.linalg.matrix_norm(A, 2)).to(dtype)
    b = torch.randn(shape[0], width, generator=generator, dtype=torch.float64).to(dtype)
    return lambda y: (y.reshape(shape[0], width) @ A.mT + b).tanh().reshape(shape)


@pytest.mark.parametrize("memory", [1, 5])  # a longer one is a longer loop in the same kernel
def test_anderson_with_several_memories_and_dampings(memory: int) -> None:
    damping = 0.7 if memory == 1 else torch.tensor([0.5, 0.8])
    hidden = Map(tanh_map((2, 12), torch.float64, 0.9, memory), torch.zeros(2, 12).double(), damping=damping)
    assert_agree(*both(opteq.Anderson(tol=1e-13, max_steps=memory + 2, memory=memory), hidden), near=1e-7)


# Solvers share the kernels that pack and unpack states: with a GPU every pair is tested. Other tests are in float64.
@pytest.mark.parametrize(
    ("solver", "dtype"),
    [
        (opteq.Anderson(tol=1e-3), torch.float16),
        (opteq.Anderson(tol=1e-3), torch.float32),
        (opteq.Anderson(tol=1e-3), torch.bfloat16),
    ],
    ids=str,
)
def test_other_precisions(solver: Solver, dtype: torch.dtype) -> None:
    hidden = Map(tanh_map((2, 6), dtype, 0.3), torch.zeros(2, 6, dtype=dtype), damping=0.9)
    assert_agree(*both(solver, hidden), near=NEAR[dtype], exact=False)


def test_tuples_channels_last_and_several_pieces() -> None:
    wide = torch.zeros(2, 3, 14, 14).double().contiguous(memory_format=torch.channels_last)
    hidden = Map(lambda y: map_state(lambda part: 0.5 * part.cos() + 0.1, y), (wide, torch.zeros(2, 5).double()))
    assert_agree(*both(opteq.Anderson(tol=1e-5, max_steps=4), hidden), near=1e-9)


def test_samples_that_overflow_leave_their_mates_alone() -> None:
    start = torch.tensor([[0.1, 0.2], [torch.nan, 0.0], [1e30, 0.0]], dtype=torch.float64)
    hidden = Map(lambda y: torch.where(y.abs() > 1e10, y * y * 1e300, 0.5 * y + 1), start)
    plain, fused = both(opteq.Anderson(tol=1e-8, max_steps=12), hidden)
    assert fused.codes.tolist() == plain.codes.tolist() == [0, int(Status.NON_FINITE), int(Status.NON_FINITE)]
    torch.testing.assert_close(fused.state[0], plain.state[0])


def test_a_merit_refuses_steps_in_both() -> None:
    step = tanh_map((2, 6), torch.float64, 0.95)
    hidden = Map(step, torch.zeros(2, 6).double(), has_merit=True)
    hidden.step_and_merit = lambda y: (step(y), (step(y) - y).square().sum(1).sin())  # type: ignore[method-assign]
    assert_agree(*both(opteq.Anderson(tol=1e-9, max_steps=4), hidden), near=1e-7)


def test_steps_that_may_be_too_long_are_left_to_the_plain_loop() -> None:
    class Steep(opteq.Objective):
        curvature = 1.0  # at x; it grows without limit away from it

        def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
            return {"steep": ((y - x).pow(4) / 4 + (y - x).square() / 2).sum(1)}

    x = 3 * torch.randn(3, 12, generator=torch.Generator().manual_seed(0)).double()
    for problem in (Steep(), opteq.Parallel([Steep()])):
        hidden = problem(x)
        with torch.no_grad():
            solve = open_fixed_point(hidden, opteq.Anderson(), hidden.state_form().task)
        assert isinstance(solve.iteration, Loop)


def test_a_row_that_runs_away_has_a_near_answer_in_both() -> None:
    hidden = Map(lambda y: (torch.tensor([[3.0], [0.2]]).double() * y + 1).relu(), torch.zeros(2, 4).double())
    plain, fused = both(opteq.Anderson(max_steps=6), hidden)
    assert_agree(plain, fused, near=1e-9)
    assert fused.codes.tolist() == [int(Status.MAX_STEPS), 0]
    assert float(fused.state[0].max()) < 20


def test_coupled_samples_are_one_row() -> None:
    hidden = Map(lambda y: 0.4 * y + 0.3 * y.mean(0) + 1, torch.zeros(3, 4).double(), coupled=True)
    assert_agree(*both(opteq.Anderson(tol=1e-9), hidden), near=1e-8)


# ------------------------------------------------------------------------------------------------ conjugate gradients


def systems(S: Tensor, rhs: Tensor, linear: CG) -> tuple[Tensor, Tensor, Tensor]:
    """The answer of ``(I - S) v = rhs`` by the kernels, its codes, and the residual of the answer."""
    layout = Layout.of(rhs)
    with torch.no_grad():
        solve = open_linear(linear, lambda v: (S @ v[:, :, None])[:, :, 0], rhs, layout, 0.0)
        assert not isinstance(solve.iteration, Loop)
        finish = solve.run()
    v = layout.restore(finish.point)
    assert isinstance(v, Tensor)
    return v, finish.codes, (v - (S @ v[:, :, None])[:, :, 0] - rhs).norm(dim=1) / rhs.norm(dim=1)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_conjugate_gradients(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(3, 6, 6, generator=generator, dtype=torch.float64)
    S = 0.9 * (A + A.mT) / torch.linalg.matrix_norm(A + A.mT, 2)[:, None, None]
    rhs = torch.randn(3, 6, generator=generator, dtype=torch.float64) * torch.tensor([[1.0], [1e-20], [1e15]])
    v, codes, residual = systems(S.to(dtype), rhs.to(dtype), CG(tol=1e-6, max_steps=60))
    assert codes.tolist() == [0, 0, 0]
    assert residual.max() < 2e-5
    exact = torch.linalg.solve(torch.eye(6).double() - S, rhs[:, :, None])[:, :, 0]
    assert ((v - exact).norm(dim=1) / exact.norm(dim=1)).max() < 1e-4


def test_conjugate_gradients_say_what_is_wrong() -> None:
    one = torch.eye(3, dtype=torch.float64)
    S = torch.stack([0.5 * one, torch.diag(torch.tensor([0.1, 2.0, 0.3]).double()), 0.5 * one, (1 + 1e-15) * one])
    rhs = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [torch.nan, 0.0, 0.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
    v, codes, _ = systems(S, rhs, CG())
    assert codes.tolist() == [0, int(Status.INDEFINITE), int(Status.NON_FINITE), int(Status.SINGULAR)]
    torch.testing.assert_close(v[0], 2 * rhs[0])


# ------------------------------------------------------------------------------------------------------- operations


@pytest.mark.parametrize("factor", [2, 4])
def test_resampling(factor: int) -> None:
    v = torch.randn(2, 5, 8, 8).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        torch.testing.assert_close(resample.pooled(v, factor), pool(v, factor))
        torch.testing.assert_close(resample.spread(v, factor), spread(v, factor))


@pytest.mark.parametrize("gamma", [0.3, torch.rand(2, 1, 1, 1)], ids=["number", "samples"])
def test_gaussian_weights(gamma: float | Tensor) -> None:
    q, a = torch.randn(2, 2, 3, 3, 5), torch.randn(2, 2, 3, 3, 5)
    with torch.no_grad():
        found, expected = gaussian.weigh(q, gamma), plain_gaussian.weigh(q, gamma)
        assert found is not None
        torch.testing.assert_close(found, expected)
        weights = expected[0].contiguous()
        torch.testing.assert_close(
            gaussian.weigh_derivative(q, a, gamma, weights), plain_gaussian.weigh_derivative(q, a, gamma, weights)
        )


@pytest.mark.parametrize("odd", [True, False])
@pytest.mark.parametrize("channels", [3, None])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("everywhere", [False, True])
@torch.no_grad()
def test_splines(odd: bool, channels: int | None, memory_format: torch.memory_format, everywhere: bool) -> None:
    torch.manual_seed(0)
    curve = opteq.potentials.Spline(channels, knots=5, reach=2.0, rho=1.0, mu=3.0, odd=odd).prepare()
    u = 3 * torch.randn(2, 3, 5, 4)
    u[0, 0, 0] = torch.tensor([0.0, torch.nan, torch.inf, -1e30])
    u = u.contiguous(memory_format=memory_format)
    inverse, weight = torch.rand(2, 3, 1, 1) + 0.5, torch.rand(2, 3, 5, 4) if everywhere else torch.rand(2, 3, 1, 1)
    weight = weight.contiguous(memory_format=memory_format if everywhere else torch.contiguous_format)
    for fast, plain in ((spline.scaled_derivative, scaled_derivative), (spline.scaled_second, scaled_second)):
        found = fast(u, curve, inverse, weight)
        assert found is not None
        torch.testing.assert_close(found, plain(u, curve, inverse, weight), equal_nan=True)
