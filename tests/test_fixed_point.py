"""Layers of a user's own: their gradients against dense solves and finite differences, and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import opteq
from opteq import operators as op
from oracles import dense_jacobian

EXACT = opteq.Anderson(tol=1e-12, max_steps=500)


class Cell(nn.Module):
    """Half of an MDEQ block: convolutions with group normalisation, no symmetry anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 6, 3, padding=1, bias=False)
        self.outer = nn.Conv2d(6, 4, 3, padding=1, bias=False)
        self.view = nn.Conv2d(2, 4, 1)
        self.norm = nn.GroupNorm(2, 4)
        self.calls = 0

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        self.calls += 1
        return 0.5 * torch.tanh(self.norm(0.3 * self.outer(torch.tanh(self.inner(z))) + self.view(x)))


def image_layer() -> tuple[opteq.Equilibrium, Tensor]:
    torch.manual_seed(0)
    problem = opteq.FixedPoint(Cell(), start=lambda x: x.new_zeros(x.shape[0], 4, *x.shape[2:])).double()
    return opteq.Equilibrium(problem, EXACT), torch.randn(2, 2, 3, 3, dtype=torch.float64)


class Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W = op.Dense(5, 5, bound=0.8)
        self.U = nn.Linear(3, 5)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.W(z) + self.U(x))


def vector_layer() -> tuple[opteq.Equilibrium, Tensor]:
    torch.manual_seed(0)
    problem = opteq.FixedPoint(Vectors(), start=lambda x: x.new_zeros(x.shape[0], 5)).double()
    return opteq.Equilibrium(problem, EXACT), torch.randn(2, 3, dtype=torch.float64)


def test_it_finds_a_fixed_point() -> None:
    layer, x = image_layer()
    solution = layer.solve(x)
    assert bool(solution.converged.all())
    torch.testing.assert_close(layer.problem.f(solution.state, x), solution.state, rtol=1e-10, atol=1e-10)


def test_the_gradient_is_that_of_a_dense_solve() -> None:
    layer, x = vector_layer()
    one = x[:1].clone().requires_grad_()
    z = layer(one)
    cotangent = torch.randn(5, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((z * cotangent).sum(), one)
    hidden = layer.problem(one.detach())
    jacobian = dense_jacobian(hidden.step, z.detach())
    assert float((jacobian - jacobian.T).abs().max()) > 0.01  # no symmetry
    adjoint = torch.linalg.solve(torch.eye(5, dtype=torch.float64) - jacobian.T, cotangent)
    (wanted,) = torch.autograd.grad(layer.problem.f(z.detach(), one) @ adjoint, one)
    torch.testing.assert_close(gradient, wanted, rtol=1e-8, atol=1e-10)
    assert layer.last[1].report.method == "adjoint by GMRES"


@pytest.mark.parametrize("make", [image_layer, vector_layer])
def test_finite_differences_agree(make) -> None:
    layer, x = make()
    weights = [weight for weight in layer.parameters() if weight.numel() <= 40][:2]
    assert torch.autograd.gradcheck(
        lambda given, *_: layer(given), (x.requires_grad_(), *weights), atol=1e-6, fast_mode=True
    )


def test_states_may_be_tuples_and_features_something_else() -> None:
    def swap(z, x):
        return 0.5 * torch.tanh(z[1]) + x, 0.3 * torch.tanh(z[0] + x)

    problem = opteq.FixedPoint(swap, start=lambda x: (x, x), features=lambda z: z[0] + z[1])
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-6))
    x = torch.randn(3, 4, requires_grad=True)
    solution = layer.solve(x)
    assert isinstance(solution.state, tuple)
    torch.testing.assert_close(solution.features, solution.state[0] + solution.state[1])
    solution.features.sum().backward()
    assert bool(x.grad.isfinite().all())


def test_the_input_may_be_a_tuple() -> None:
    layer = opteq.Equilibrium(opteq.FixedPoint(lambda z, x: 0.5 * torch.cos(z) + x[0] * x[1]), EXACT)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True), torch.rand(2, 3, dtype=torch.float64)
    z = layer(x)
    z.sum().backward()
    torch.testing.assert_close(x[0].grad, (x[1] / (1 + 0.5 * z.sin())).detach())


def test_what_depends_on_the_input_alone_is_computed_once() -> None:
    layer, x = image_layer()
    hidden = layer.problem(x)
    before = layer.problem.f.calls
    z = hidden.start()
    for _ in range(3):
        z = hidden.step(z)
    assert layer.problem.f.calls == before + 3
    torch.testing.assert_close(z, layer.problem.f(layer.problem.f(layer.problem.f(hidden.start(), x), x), x))


def test_the_certificate_promises_nothing_and_says_why() -> None:
    found = vector_layer()[0].problem.certificate()
    assert (found.exists, found.unique, found.contraction, found.lipschitz) == (None, None, None, None)
    assert "no hidden objective" in str(found)


def test_it_is_an_ordinary_module() -> None:
    layer, x = image_layer()
    assert {name for name, _ in layer.named_parameters()} >= {"problem.f.inner.weight", "problem.f.view.bias"}
    vectors = opteq.Equilibrium(opteq.FixedPoint(nn.Bilinear(3, 3, 3)), opteq.Picard(tol=0, max_steps=1))
    again = pickle.loads(pickle.dumps(vectors))
    given = torch.randn(2, 3)
    torch.testing.assert_close(again(given), vectors(given))
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))


def test_divergence_is_reported() -> None:
    layer = opteq.Equilibrium(opteq.FixedPoint(lambda z, x: 3 * z + x), opteq.Picard(max_steps=30), on_failure="raise")
    with pytest.raises(opteq.ConvergenceError):
        layer(torch.ones(2, 2))


def call(**functions) -> Tensor:
    return opteq.Equilibrium(opteq.FixedPoint(lambda z, x: z / 2 + x, **functions))(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: opteq.FixedPoint(3), "FixedPoint.f should be a module or a function; got 3"),
        (lambda: opteq.FixedPoint(torch.add, start=0), "FixedPoint.start should be a module or a function; got 0"),
        (
            lambda: opteq.Equilibrium(opteq.FixedPoint(lambda z, x: z[:, :1]))(torch.ones(2, 3)),
            r"should have shape \(2, 3\)",
        ),
        (lambda: call(features=lambda z: None), r"FixedPoint.features\(y\) should be a tensor .* got NoneType"),
        (
            lambda: call(features=lambda z: z.sum()),
            r"FixedPoint.features\(y\) should be .* \(2, ...\).* got shape \(\)",
        ),
        (lambda: call(features=lambda z: z[:1]), r"FixedPoint.features\(y\) should be .* got shape \(1, 3\)"),
        (lambda: call(start=lambda x: None), r"FixedPoint.start\(x\) should be a tensor .* got NoneType"),
        (lambda: call(start=lambda x: x.sum()), r"FixedPoint.start\(x\) should be a tensor .* got shape \(\)"),
    ],
)
def test_wrong_arguments_are_named(make, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(z)) / 2 + x


def test_a_map_that_mixes_samples_is_refused() -> None:
    x = torch.randn(4, 3)
    layer = opteq.Equilibrium(opteq.FixedPoint(Normalised()))
    message = (
        r"FixedPoint.f\(z, x\) mixes the samples.* Batch normalisation \(f.norm\) is in training mode: use a Group"
    )
    with pytest.raises(ValueError, match=message):
        layer(x)
    layer.eval()(x)
    with pytest.raises(ValueError, match=message):
        layer.train()(x)
    swapped = opteq.FixedPoint(lambda z, x: (z[1] / 2, z[0].flip(0) / 3 + x), start=lambda x: (x, x))
    with pytest.raises(ValueError, match="mixes the samples of a batch: part 1"):
        swapped(x)
