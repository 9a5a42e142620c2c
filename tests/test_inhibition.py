"""Inhibition: closed forms against autograd, the minimiser against Clarabel, certificates against dense matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import opteq
from opteq import operators as op
from opteq.states import blocks, like, map_state
from oracles import SHARP, cp

EXACT = opteq.FISTA(tol=1e-12, max_steps=5000)


def vectors(size: float = 2.0, m: float = 0.2, activation: str = "relu") -> opteq.Inhibition:
    torch.manual_seed(0)
    problem = opteq.Inhibition(op.Dense(4, 6), nn.Linear(3, 6), m, activation).double()
    problem.A.weight.data.mul_(size / problem.A.norm())
    return problem


def images(*scales: int, activation: str = "relu") -> opteq.Inhibition:
    torch.manual_seed(0)
    made = [opteq.Branch(op.Conv2d(2, 3 + i, 3), nn.Conv2d(2, 3 + i, 3, padding=1), s) for i, s in enumerate(scales)]
    problem = opteq.Inhibition(made, m=0.3, activation=activation).double()
    for branch in problem.branch_list():
        branch.W.weight.data.mul_(2)
    return problem


def dense(product, like: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The matrix of a linear map on states of one sample, column by column."""
    sizes = [part[0].numel() for part in like]
    columns = []
    for row in torch.eye(sum(sizes), dtype=torch.float64):
        parts = tuple(v.reshape(1, *part.shape[1:]) for v, part in zip(row.split(sizes), like, strict=True))
        columns.append(torch.cat([v.flatten() for v in product(parts)]))
    return torch.stack(columns, dim=1)


def test_the_minimiser_is_that_of_clarabel() -> None:
    problem = vectors()
    x = torch.randn(2, 3, dtype=torch.float64)
    found = opteq.Equilibrium(problem, EXACT)(x).detach().numpy()
    c, A = problem.U(x).detach().numpy(), problem.A.weight.detach().numpy()
    for sample in range(2):
        y = cp.Variable(6)
        objective = problem.m / 2 * cp.sum_squares(y) + cp.sum_squares(A.T @ y) / 2 - c[sample] @ y
        cp.Problem(cp.Minimize(objective), [y >= 0]).solve(**SHARP)
        assert np.abs(y.value - found[sample]).max() < 1e-5


@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus"])
@pytest.mark.parametrize("scales", [(1,), (1, 2, 4), (2, 1, 2)])
def test_closed_forms_agree_with_autograd(scales: tuple[int, ...], activation: str) -> None:
    problem = images(*scales, activation=activation)
    hidden = problem(torch.randn(2, 2, 8, 4, dtype=torch.float64))
    y = tuple(0.1 + 0.5 * torch.rand_like(part) for part in hidden.start())
    terms = hidden.terms(y)
    assert set(terms) == {"quadratic", "inhibition", "input", "penalty"}
    wanted = torch.func.grad(lambda state: hidden.value(state).sum())(y)
    for closed, right in zip(hidden.gradient(y), wanted, strict=True):
        torch.testing.assert_close(closed, right, rtol=1e-10, atol=1e-10)
    v = tuple(torch.randn_like(part) for part in y)
    # The Hessian is symmetric: reverse mode twice gives the same product.
    wanted = torch.func.vjp(torch.func.grad(lambda state: hidden.value(state).sum()), y)[1](v)[0]
    for closed, right in zip(hidden.hessian_at(y)(v), wanted, strict=True):
        torch.testing.assert_close(closed, right, rtol=1e-10, atol=1e-10)


def test_the_common_space_has_an_exact_adjoint_and_the_stated_norm() -> None:
    problem = images(1, 2, 4)
    hidden = problem(torch.randn(1, 2, 8, 8, dtype=torch.float64))
    y = tuple(torch.randn_like(part) for part in hidden.start())
    v = torch.randn(1, 2, 8, 8, dtype=torch.float64)
    there = sum((a * b).sum() for a, b in zip(hidden.A(v), y, strict=True))
    torch.testing.assert_close(there, (v * hidden.A.adjoint(y)).sum())
    hessian = dense(hidden.hessian_at(y), y)
    values = torch.linalg.eigvalsh(hessian)
    assert values[0] >= problem.m - 1e-10
    assert values[-1] <= 1 / hidden.length[0] + 1e-10
    assert hidden.length[0] < problem.certificate().contraction  # a positive step, and a rate below 1


@pytest.mark.parametrize("size", [0.5, 2.0, 20.0])
def test_the_certificate_holds_for_every_size_of_the_weights(size: float) -> None:
    problem = vectors(size)
    found = problem.certificate()
    assert found.exists
    assert found.unique
    hidden = problem(torch.randn(1, 3, dtype=torch.float64))
    a, b = torch.rand(1, 6, dtype=torch.float64), torch.rand(1, 6, dtype=torch.float64)
    moved = (hidden.step(a) - hidden.step(b)).norm() / (a - b).norm()
    assert moved <= found.contraction + 1e-9
    curvatures = torch.linalg.eigvalsh(torch.autograd.functional.hessian(lambda y: hidden.value(y).sum(), a)[0, :, 0])
    assert (1 - hidden.length * curvatures).abs().max() <= found.contraction + 1e-9  # along the worst direction, too
    layer = opteq.Equilibrium(problem, EXACT)
    x = torch.randn(1, 3, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda v: layer(v)[0], x)[:, 0]
    assert torch.linalg.matrix_norm(jacobian, 2) <= found.lipschitz + 1e-9


def test_stronger_penalties_tighten_the_certificate() -> None:
    sigmoid, tanh = (vectors(activation=name).certificate().lipschitz for name in ("sigmoid", "tanh"))
    assert sigmoid == pytest.approx(tanh * 0.2 / 3.2)


def test_the_gradient_is_that_of_a_dense_solve() -> None:
    problem = vectors()
    x = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    layer = opteq.Equilibrium(problem, EXACT)
    y = layer(x)
    weights = torch.randn(6, dtype=torch.float64)
    (y @ weights).sum().backward()
    active = y[0] > 0
    A, U = problem.A.weight.detach(), problem.U.weight.detach()
    hessian = problem.m * torch.eye(6, dtype=torch.float64) + A @ A.T
    solved = torch.linalg.solve(hessian[active][:, active], weights[active])
    torch.testing.assert_close(x.grad[0], U[active].T @ solved)


def test_default_options_solve_it_whatever_the_weights() -> None:
    layer = opteq.Equilibrium(vectors(size=10.0, m=0.01).float())
    assert isinstance(layer.solver, opteq.FISTA)
    solution = layer.solve(torch.randn(8, 3))
    assert bool(solution.converged.all())
    solution.features.sum().backward()
    assert bool(solution.backward.converged.all())


def test_other_solvers_and_low_precision_find_it() -> None:
    problem = images(1, 2).float()
    x = torch.randn(2, 2, 8, 8)
    right = opteq.Equilibrium(problem, opteq.FISTA(tol=1e-6, max_steps=2000))(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = opteq.Equilibrium(problem, opteq.FISTA(tol=1e-3, max_steps=100), on_failure="ignore")(x)
    plain = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-6, max_steps=200))(x)
    for exact, low, other in zip(*(map_state(torch.Tensor.detach, z) for z in (right, rough, plain)), strict=True):
        assert low.dtype == torch.float32
        torch.testing.assert_close(low, exact, rtol=0.1, atol=0.1 * float(exact.abs().max()))
        torch.testing.assert_close(other, exact, rtol=1e-3, atol=1e-4)


def inner_problems() -> dict[str, opteq.problems.Problem]:
    torch.manual_seed(0)

    def ring(**options: object) -> opteq.MOptEq:
        made = [opteq.Branch(op.Dense(4, 5 + i, bound=0.6), nn.Linear(3, 5 + i)) for i in range(2)]
        return opteq.MOptEq(made, **options)

    return {
        "opteq": opteq.OptEq(op.Dense(4, 6, bound=0.6), nn.Linear(3, 6), "tanh", mu=1.2),
        "heritage": ring(),
        "diversity": ring(diversity=0.05, smoothing=0.5),
        "geq": opteq.GEQ(op.Dense(6, 4, bound=0.9), nn.Linear(3, 4), opteq.kernels.Gaussian(0.3)),
        "popteq": opteq.POptEq([opteq.Branch(op.Dense(4, 5, bound=0.6), nn.Linear(3, 5)) for _ in range(2)]),
    }


@pytest.mark.parametrize("name", list(inner_problems()))
def test_inhibition_beside_other_terms(name: str) -> None:
    """A term like any other: the gradient is that of the sum, and the equilibrium its minimum."""
    problem = inner_problems()[name]
    sizes = [part.shape[1] for part in blocks(problem(torch.zeros(1, 3)).start())]
    both = opteq.Inhibited(problem, [op.Dense(3, size) for size in sizes], m=0.7).double()
    for A in both.operators():
        A.weight.data.mul_(3)
    x = torch.randn(3, 3, dtype=torch.float64)
    hidden = both(x)
    y = map_state(lambda part: torch.rand_like(part) * 0.5, hidden.start())
    wanted = torch.func.grad(lambda state: hidden.value(state).sum())(y)
    for closed, right in zip(blocks(hidden.gradient(y)), blocks(wanted), strict=True):
        torch.testing.assert_close(closed, right, rtol=1e-9, atol=1e-9)
    solution = opteq.Equilibrium(both, EXACT).solve(x)
    assert bool(solution.converged.all())
    step = hidden.step(solution.state)
    for here, there in zip(blocks(solution.state), blocks(step), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-8, atol=1e-9)
    least = hidden.objective(solution.state)
    for _ in range(5):
        near = hidden.project(map_state(lambda part: part + 0.01 * torch.randn_like(part), solution.state))
        assert bool((hidden.objective(near) >= least - 1e-10).all())
    found = both.certificate()
    if name in ("geq", "popteq"):
        assert found.unique is None
        return
    assert found.unique
    one = x[:1]
    layer = opteq.Equilibrium(both, EXACT)
    features = torch.autograd.functional.jacobian(lambda v: torch.cat(blocks(layer(v)), dim=1)[0], one)[:, 0]
    assert torch.linalg.matrix_norm(features, 2) <= found.lipschitz + 1e-9
    first = map_state(lambda part: part[:1], y)
    hessian = dense(lambda v: blocks(both(one).hessian_at(first)(like(first, v))), blocks(first))
    assert torch.linalg.eigvalsh(hessian)[0] > 0.7 - 0.6**2 * 1.3


def test_couplings_beyond_m_take_the_certificate_away() -> None:
    problem = opteq.Inhibited(opteq.OptEq(op.Dense(4, 6, bound=0.9), nn.Linear(3, 6)), op.Dense(2, 6), m=0.3)
    assert problem.certificate().unique is None
    assert "pull by up to" in problem.certificate().reasons["unique"]


@pytest.mark.parametrize("bound", [0.8, None])
def test_the_rate_is_that_of_the_step_where_weights_are_far_below_their_bound(bound: float | None) -> None:
    branches = [opteq.Branch(op.Dense(3, 4, bound=bound), nn.Linear(3, 4)) for _ in range(2)]
    problem = opteq.Inhibited(opteq.MOptEq(branches, activation="identity"), [op.Dense(3, 4)] * 2).double()
    for part in (*problem.problem.branch_list(), *problem.operators()):
        getattr(part, "W", part).weight.data.mul_(0.05)
    hidden = problem(torch.randn(1, 3, dtype=torch.float64))
    y = map_state(torch.zeros_like, hidden.start())
    jacobian = dense(lambda v: blocks(hidden.linearise(y).product(like(y, v))), blocks(y))
    assert torch.linalg.matrix_norm(jacobian, 2) <= problem.certificate().contraction + 1e-9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: opteq.Inhibition(op.Dense(2, 2), m=0.0), r"m should be a positive finite number; got 0.0"),
        (lambda: opteq.Inhibition(op.Dense(2, 2), m=1.5), "got 1.5"),
        (lambda: opteq.Inhibition([opteq.Branch(op.Dense(2, 2))], nn.Linear(2, 2)), "U has no effect"),
        (lambda: opteq.Inhibition(op.Dense(2, 2), activation=opteq.penalties.ELU(2.0)), "convex"),
        (lambda: opteq.Inhibited(inner_problems()["heritage"], op.Dense(3, 5))(torch.ones(1, 3)), "2 tensors"),
        (lambda: opteq.Inhibited(opteq.MOptEq([opteq.Branch(op.Dense(2, 2))], 0.1), op.Dense(2, 2)), "smoothing"),
        (
            lambda: opteq.Inhibited(
                opteq.DeepOptEq([(op.Dense(3, 4, bound=0.5), nn.Linear(3, 4))] * 2), op.Dense(3, 3)
            )(torch.ones(1, 3)),
            "DeepOptEq is none",
        ),
        (lambda: images(2, 3)(torch.randn(1, 2, 6, 6).double()), "divide the largest one"),
    ],
)
def test_wrong_arguments_are_named(make, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()
