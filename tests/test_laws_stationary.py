"""Laws 1 and 2: a fixed point is a stationary point, and an independent solver agrees."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import opteq
from all_cases import CASES
from cases import SOLVERS, Case
from opteq import operators as op
from opteq.problems.hidden import Hidden
from opteq.states import State, blocks, map_state
from oracles import dense_jacobian, flatten, relu_programme

ONE_EQUATION = [case for case in CASES if case.one_equation]
ids = [case.name for case in ONE_EQUATION]


def some_state(hidden: Hidden) -> State:
    generator = torch.Generator().manual_seed(3)
    y = map_state(lambda part: torch.randn(part.shape, generator=generator, dtype=part.dtype), hidden.start())
    return hidden.project(y)


@pytest.mark.parametrize("case", ONE_EQUATION, ids=ids)
def test_step_is_sigma_of_minus_the_gradient_of_smooth(case: Case) -> None:
    hidden = case.problem()(case.input())
    assert isinstance(hidden, Hidden)
    y = map_state(lambda part: part.requires_grad_(), some_state(hidden))
    slopes = torch.autograd.grad(hidden.smooth(y).sum(), blocks(y))
    expected = [penalty.prox(-slope) for penalty, slope in zip(hidden.penalties(y), slopes, strict=True)]
    for found, wanted in zip(blocks(hidden.step(y)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", ONE_EQUATION, ids=ids)
def test_closed_forms_agree_with_autograd(case: Case) -> None:
    hidden = case.problem()(case.input())
    assert isinstance(hidden, Hidden)
    y, v = some_state(hidden), some_state(hidden)
    v = map_state(torch.cos, v)
    by_autograd = Hidden.preactivation(hidden, y), Hidden.negative_hessian_at(hidden, y)(v)
    closed = hidden.preactivation(y), hidden.negative_hessian_at(y)(v)
    for found, wanted in zip(closed, by_autograd, strict=True):
        torch.testing.assert_close(flatten(found), flatten(wanted), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", ONE_EQUATION, ids=ids)
def test_curvature_is_symmetric(case: Case) -> None:
    hidden = case.problem()(case.input(2))
    assert isinstance(hidden, Hidden)
    matrix = dense_jacobian(hidden.preactivation, some_state(hidden))
    torch.testing.assert_close(matrix, matrix.T, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", ONE_EQUATION, ids=ids)
def test_terms_sum_to_the_objective(case: Case) -> None:
    hidden = case.problem()(case.input())
    assert isinstance(hidden, Hidden)
    y = hidden.step(some_state(hidden))
    total = sum(hidden.terms(y).values())
    torch.testing.assert_close(total, hidden.objective(y))
    smooth = sum(hidden.smooth_terms(y).values())
    torch.testing.assert_close(smooth, hidden.smooth(y))
    assert torch.isfinite(total).all()


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("case", ONE_EQUATION, ids=ids)
def test_no_nearby_state_has_a_smaller_objective(case: Case, solver: opteq.solvers.Solver) -> None:
    layer = opteq.Equilibrium(case.problem(), solver)
    x = case.input()
    with torch.no_grad():
        hidden = layer.problem(x)
        assert isinstance(hidden, Hidden)
        solution = layer.solve(x)
        assert solution.converged.all()
        least = hidden.objective(solution.state)
        assert torch.isfinite(least).all()
        generator = torch.Generator().manual_seed(0)
        for size in (1e-1, 1e-3):
            for _ in range(10):
                moved = hidden.project(
                    map_state(
                        lambda part, size=size: (
                            part + size * torch.randn(part.shape, generator=generator, dtype=part.dtype)
                        ),
                        solution.state,
                    )
                )
                here, there = least, hidden.objective(moved)
                if case.couples_batch:
                    here, there = here.sum(), there.sum()
                assert (there >= here - 1e-9).all()


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_answer_is_a_fixed_point_with_the_residual_it_claims(case: Case, solver: opteq.solvers.Solver) -> None:
    layer = opteq.Equilibrium(case.problem(), solver)
    x = case.input()
    with torch.no_grad():
        solution = layer.solve(x)
        image = layer.problem(x).step(solution.state)
    assert solution.converged.all()
    rows = [torch.cat([p.flatten(1) for p in blocks(s)], dim=1) for s in (solution.state, image)]
    if case.couples_batch:
        rows = [r.reshape(1, -1) for r in rows]
    residual = (rows[1] - rows[0]).norm(dim=1) / rows[1].norm(dim=1)
    if layer.problem(x).compact_form() is not None:  # solved in the features, whose residual is the larger one
        assert (residual <= solution.residual * (1 + 1e-4) + 1e-15).all()
        return
    torch.testing.assert_close(solution.residual, residual.expand(len(x)), rtol=1e-4, atol=1e-15)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_interior_point_solver_agrees_for_relu(shape: tuple[int, int], solver: opteq.solvers.Solver) -> None:
    torch.manual_seed(sum(shape))
    n, m = shape
    problem = opteq.OptEq(op.Dense(m, n, bound=0.9), nn.Linear(3, n)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    hidden = problem(x)
    solution = opteq.Equilibrium(problem, solver).solve(x)
    W = problem.W(torch.eye(m, dtype=torch.float64)).T
    for sample in range(len(x)):
        y, value = relu_programme(W, problem.U(x)[sample])
        torch.testing.assert_close(solution.state[sample].detach(), torch.from_numpy(y), rtol=0, atol=1e-5)
        objective = hidden.objective(solution.state)[sample].detach()
        torch.testing.assert_close(objective, torch.tensor(value, dtype=torch.float64), rtol=0, atol=1e-8)
