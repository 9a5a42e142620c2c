"""States exactly on a kink of the activation: minima are CONVERGED, saddles and maxima are not, in every dtype."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import opteq
from opteq import operators as op
from opteq.penalties import HardTanh, LeakyReLU, Penalty, ReLU, SoftThreshold
from opteq.solvers import Status


class Quadratic(opteq.HiddenProblem):
    """``g = -1/2 <y - at, M (y - at)> - <x, y>``, whose pre-activation at the state ``at`` is x."""

    def __init__(self, penalty: Penalty, M: Tensor, at: Tensor) -> None:
        super().__init__()
        self.penalty, self.M, self.at = penalty, M, at

    def start(self, x: Tensor) -> Tensor:
        return self.at.expand_as(x)

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        away = y - self.at
        return -0.5 * ((away @ self.M) * away).sum(1) - (x * y).sum(1)


# Penalty, pre-activation and state, entry by entry: all on kinks.
KINKS = {
    "relu": (ReLU(), [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
    "relu beside a free unit": (ReLU(), [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]),
    "leaky_relu": (LeakyReLU(0.5), [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
    "soft_threshold": (SoftThreshold(0.25), [0.25, -0.25, 0.25], [0.0, 0.0, 0.0]),
    "hardtanh": (HardTanh(), [1.0, -1.0, 1.0], [1.0, -1.0, 1.0]),
}


def least_gain(problem: Quadratic, x: Tensor, away: float = 1e-3) -> float:
    """The least ``(G(y + d) - G(y)) / |d|^2`` over a grid of directions, by the formula of G."""
    steps = torch.arange(-12, 13, dtype=torch.float64) / 12
    grid = torch.cartesian_prod(steps, steps, steps)
    grid = away * torch.nn.functional.normalize(grid[grid.norm(dim=1) > 0.9])

    def objective(y: Tensor) -> Tensor:
        return problem.penalty.value(y).sum(1) + y.square().sum(1) / 2 + problem.smooth(y, x)

    return float(((objective(problem.at + grid) - objective(problem.at[None])) / away**2).min())


@pytest.mark.parametrize("name", KINKS)
def test_the_status_agrees_with_a_search_over_all_directions(name: str) -> None:
    penalty, inside, at = KINKS[name]
    x = torch.tensor([inside], dtype=torch.float64)
    seen = set()
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        half = torch.randn(3, 3, generator=generator, dtype=torch.float64)
        problem = Quadratic(penalty, (half + half.T) / 2, torch.tensor(at, dtype=torch.float64))
        gain = least_gain(problem, x)
        if abs(gain) < 0.05:  # the grid is too coarse to tell
            continue
        expected = Status.CONVERGED if gain > 0 else Status.NOT_A_MINIMUM
        solution = opteq.Equilibrium(problem, on_failure="ignore").solve(x)
        assert solution.status == (expected,), (seed, gain)
        seen.add(expected)
    assert len(seen) == 2


def test_zero_of_a_polynomial_kernel_with_relu() -> None:
    """``G = 1/2 |y|^2 - <c, y>^2`` on ``y >= 0``: 0 is a minimum where |c+| and |c-| are below ``1/sqrt(2)``."""
    W = op.Dense(2, 2)
    W.weight.data.zero_()
    layer = opteq.Equilibrium(opteq.GEQ(W, torch.nn.Identity(), opteq.kernels.Polynomial(2)), on_failure="ignore")
    edge = math.sqrt(0.5)
    x = torch.tensor([[1.1 * edge, -0.1], [0.9 * edge, -0.9 * edge], [-0.1, -1.1 * edge], [0.1, 0.1]])
    wrong, right = Status.NOT_A_MINIMUM, Status.CONVERGED
    assert layer.solve(x, torch.zeros(4, 2)).status == (wrong, right, wrong, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_and_several_blocks(dtype: torch.dtype) -> None:
    class Apart(opteq.HiddenProblem):
        penalty = "relu"

        def start(self, x: Tensor) -> tuple[Tensor, ...]:
            return torch.zeros_like(x), torch.zeros_like(x)

        def smooth(self, y: tuple[Tensor, ...], x: Tensor) -> Tensor:
            return -(x * y[0] * y[1]).sum(1)

    x = torch.tensor([[4.0, 0.0], [-4.0, 0.5]], dtype=dtype)
    solution = opteq.Equilibrium(Apart(), on_failure="ignore").solve(x)
    assert solution.status == (Status.NOT_A_MINIMUM, Status.CONVERGED)


def test_an_objective_with_a_penalty() -> None:
    class Saddle(opteq.Objective):
        penalty, curvature = "soft_threshold", 4.0

        def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
            return {"saddle": 0.5 * x * (y[:, 0] * y[:, 1]) + 0.1 * y.square().sum(1) - 0.1 * y.sum(1)}

        def start(self, x: Tensor) -> Tensor:
            return x.new_zeros(len(x), 2)

    x = torch.tensor([-2.0, 2.0])
    solution = opteq.Equilibrium(Saddle(), on_failure="ignore").solve(x)
    assert solution.status == (Status.NOT_A_MINIMUM, Status.CONVERGED)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_state_below_the_floor_counts_as_zero(dtype: torch.dtype) -> None:
    """``G = f + 1/2 |y|^2 - <c, y>^2`` descends from 0 to where y has the sign of c, if ``c^2 > 1/2``.

    Solvers stop on the other side, where it is steep, at some 1e-20: below their floor, and as good as 0.
    """
    W = op.Dense(1, 1)
    W.weight.data.zero_()
    problem = opteq.GEQ(W, torch.nn.Identity(), opteq.kernels.Polynomial(2), LeakyReLU(0.01))
    layer = opteq.Equilibrium(problem, on_failure="ignore").to(dtype)
    x = torch.tensor([[1.0], [0.6], [-1.0]], dtype=dtype)
    start = torch.tensor([[-1e-20], [-1e-20], [1e-20]], dtype=dtype)
    wrong, right = Status.NOT_A_MINIMUM, Status.CONVERGED
    assert layer.solve(x, start).status == (wrong, right, wrong)


def test_a_minimum_below_the_floor_is_one() -> None:
    """``y = relu(y / 4 + c)`` at ``c = 1e-14``: zero is no stationary point, and has nothing to say about it."""
    problem = Quadratic(ReLU(), 0.25 * torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    x = 1e-14 * torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    assert opteq.Equilibrium(problem).solve(x).status == (Status.CONVERGED,)


class Tied(opteq.HiddenProblem):
    """Two blocks that pull on each other, strongly convex with |M| = 0.8."""

    penalty = "elu"

    def __init__(self) -> None:
        super().__init__()
        M = torch.randn(5, 5)
        self.M = nn.Parameter(0.8 * M / torch.linalg.matrix_norm(M, 2))

    def start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(x), torch.zeros_like(x)

    def smooth(self, y: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
        u, v = y
        return ((u @ self.M) * v).sum(1) - (u * x).sum(1) - (v * x.flip(1)).sum(1)


def test_a_penalty_that_is_rounding_does_not_fall() -> None:
    torch.manual_seed(0)
    layer = opteq.Equilibrium(Tied(), solver=opteq.FISTA(tol=3e-3, max_steps=400))
    x = 1e-7 * torch.randn(64, 5)
    # In float32 the penalty of states of this size has no digit that is right, and seemed to fall without end.
    assert bool(layer.solve(x).converged.all())
