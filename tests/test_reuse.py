"""A user's functions: what depends on the input alone is computed once."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import opteq
from opteq import operators as op


class Mine(opteq.HiddenProblem):
    """OptEq as a user would write it, with a term that depends on the input alone."""

    penalty = "tanh"

    def __init__(self) -> None:
        super().__init__()
        self.W = op.Conv2d(3, 4, 3, bound=0.8)
        self.U = nn.Conv2d(2, 4, 3, padding=1)

    def start(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), 4, *x.shape[2:])

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return -0.5 * self.W.adjoint(y).square().flatten(1).sum(1) - (self.U(x) * y).flatten(1).sum(1)


def test_the_input_is_carried_once_and_its_gradient_is_right() -> None:
    torch.manual_seed(0)
    problem = Mine().double()
    x = torch.randn(2, 2, 5, 5, dtype=torch.double, requires_grad=True)
    hidden = problem(x)
    names = [func.__name__ for func, *_ in hidden.bound.reused.results]
    assert names == ["conv2d"]  # U x, and nothing of W
    before = len(hidden.bound.reused.results)
    hidden.step(hidden.start())
    assert len(hidden.bound.reused.results) == before


class Small(opteq.HiddenProblem):
    """The same with matrices, for finite differences."""

    penalty = "tanh"

    def __init__(self) -> None:
        super().__init__()
        self.W, self.U = op.Dense(2, 3, bound=0.8), nn.Linear(2, 3)

    def start(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), 3)

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return -0.5 * self.W.adjoint(y).square().sum(1) - (self.U(x) * y).sum(1)


def test_gradients_of_what_is_reused_are_right() -> None:
    torch.manual_seed(0)
    problem = Small().double()
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-12, max_steps=200), opteq.Implicit(tol=1e-13))

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        named = dict(zip((f"problem.{name}" for name, _ in problem.named_parameters()), weights, strict=True))
        return torch.func.functional_call(layer, named, (x,))

    x = torch.randn(1, 2, dtype=torch.double, requires_grad=True)
    weights = tuple(weight.detach().requires_grad_() for weight in problem.parameters())
    assert torch.autograd.gradcheck(function, (x, *weights), eps=1e-6, atol=1e-6)


def test_weights_that_change_between_calls_are_seen() -> None:
    problem = Mine()
    layer, x = opteq.Equilibrium(problem), torch.randn(2, 2, 5, 5)
    first = layer(x)
    with torch.no_grad():
        problem.U.weight.mul_(2)
    assert not torch.allclose(layer(x), first)
    with torch.no_grad():
        assert not torch.allclose(layer(x), first)


class Writing(opteq.Objective):
    """Its weights are made from the input, and written to in place: by operators, views, items and ``out``."""

    def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        weight = torch.zeros_like(x)
        left = weight[:, :2]
        left += 1
        weight[:, 2:] = 3.0
        torch.add(weight, 1.0, out=weight)
        return {"data": 0.5 * (weight.mul_(2) * (y - x.exp()) ** 2).sum(1)}


def test_what_is_written_to_is_computed_every_time() -> None:
    x, y = torch.randn(2, 3, 4, dtype=torch.float64)
    layer = opteq.Equilibrium(Writing(), opteq.FISTA(tol=1e-8))
    hidden = layer.problem(x)
    expected = (torch.tensor([2.0, 2.0, 4.0, 4.0]) * (y - x.exp()) ** 2).sum(1)
    for problem in (hidden, hidden, copy.deepcopy(hidden)):
        torch.testing.assert_close(problem.objective(y), expected)
    assert any(result.equal(x.exp()) for *_, result in hidden.bound.reused.results), "the rest is kept"
    for _ in range(4):  # traced from the third call on, where that is possible
        torch.testing.assert_close(layer(x), x.exp(), rtol=1e-6, atol=1e-6)


class Signs(opteq.Objective):
    """Zeros of both signs, and two draws of random numbers."""

    def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        above, below = torch.div(x, 0.0), torch.div(x, -0.0)
        assert torch.equal(above, -below)
        assert not torch.equal(torch.rand_like(x), torch.rand_like(x))
        assert not torch.equal(nn.functional.dropout1d(x), nn.functional.dropout1d(x))
        return {"data": 0.5 * (y - x).square().sum(1)}


def test_other_zeros_and_other_draws_are_not_taken_for_the_same() -> None:
    torch.manual_seed(0)
    Signs()(1 + torch.rand(16, 8))
