"""Laws 3 and 4: gradients are right, for leaves and non-leaves, at every scale of the loss."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

import opteq
from all_cases import CASES
from cases import EXACT_GRADIENTS, ROUGH_GRADIENTS, SOLVERS, Case, by_name, combined
from opteq.gradients import Gradient
from opteq.gradients.base import find
from opteq.gradients.implicit import AdjointSystem
from opteq.problems.hidden import BoundMap
from opteq.solvers import Outcome, Solver
from opteq.states import State, blocks
from oracles import (
    assert_slopes,
    dense_jacobian,
    difference,
    flatten,
    gradients,
    probe_loss,
    unflatten,
    unrolled_features,
)

ids = [case.name for case in CASES]
ALL_GRADIENTS = {**EXACT_GRADIENTS, **ROUGH_GRADIENTS}


@functools.cache
def reference(case: Case) -> list[torch.Tensor]:
    """The gradients of a long unrolling; the same for every solver and gradient."""
    problem = case.problem()
    x = case.input().requires_grad_()
    return gradients(unrolled_features(problem, x), [x, *problem.parameters()])


@pytest.mark.parametrize(("case", "solver", "gradient"), combined(CASES, SOLVERS, EXACT_GRADIENTS))
def test_equal_to_a_long_unrolling(case: Case, solver: Solver, gradient: Gradient) -> None:
    problem = case.problem()
    x = case.input().requires_grad_()
    inputs = [x, *problem.parameters()]
    layer = opteq.Equilibrium(problem, solver, gradient, on_failure="ignore")
    found = gradients(layer(x), inputs)
    assert difference(found, reference(case)) < 1e-8


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_equal_to_a_dense_solve(case: Case) -> None:
    problem = case.problem()
    x = case.input(2)
    solution = opteq.Equilibrium(problem, SOLVERS["anderson"]).solve(x)
    with torch.no_grad():
        state = torch.utils._pytree.tree_map(torch.Tensor.detach, solution.state)
    hidden = problem(x)
    jacobian = dense_jacobian(hidden.step, state)
    cotangent = torch.linspace(-1, 1, jacobian.shape[0], dtype=torch.float64)
    identity = torch.eye(len(cotangent), dtype=torch.float64)
    expected = torch.linalg.solve((identity - jacobian).T, cotangent)
    with torch.no_grad():
        found, report = AdjointSystem(hidden, state, opteq.Implicit()._linear(hidden, state)).solve(
            unflatten(cotangent, state)
        )
    assert report.converged.all()
    torch.testing.assert_close(flatten(found), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_linearisation_products(case: Case) -> None:
    hidden = case.problem()(case.input(2))
    state = hidden.step(hidden.step(hidden.start()))
    state = unflatten(flatten(state).detach(), state)
    jacobian = dense_jacobian(hidden.step, state)
    v = torch.linspace(-1, 2, jacobian.shape[0], dtype=torch.float64).sin()
    local = hidden.linearise(state)
    torch.testing.assert_close(flatten(local.product(unflatten(v, state))), jacobian @ v, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(flatten(local.adjoint(unflatten(v, state))), jacobian.T @ v, rtol=1e-9, atol=1e-11)


# Every solver's gradient is held against a long unrolling above, in the quick run; finite differences are dear.
@pytest.mark.parametrize(
    "solver",
    [pytest.param(s, id=name, marks=[] if name == "anderson" else pytest.mark.slow) for name, s in SOLVERS.items()],
)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_finite_differences_for_input_and_leaf_parameters(case: Case, solver: Solver) -> None:
    layer = opteq.Equilibrium(case.problem(), solver)
    x = case.input(2)
    weights = dict(layer.named_parameters())

    def features(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return functional_call(layer, dict(zip(weights, values, strict=True)), (x,))

    assert_slopes(features, [x, *weights.values()], near=1e-4)


@pytest.mark.parametrize("case", by_name("opteq-tanh opteq-conv deep written"), ids=lambda case: case.name)
def test_gradcheck_for_non_leaf_parameters(case: Case) -> None:
    """Weights that are themselves computed: the gradient must reach what they were computed from."""
    layer = opteq.Equilibrium(case.problem(), SOLVERS["anderson"])
    weights = {name: w.detach().clone() for name, w in layer.named_parameters()}
    scales = torch.linspace(0.6, 0.9, len(weights), dtype=torch.float64).requires_grad_()
    x = case.input(2)

    def features(scales: torch.Tensor) -> torch.Tensor:
        made = {name: scale.square() * w for scale, (name, w) in zip(scales, weights.items(), strict=True)}
        return probe_loss(functional_call(layer, made, (x * scales.sum(),)))

    assert torch.autograd.gradcheck(features, (scales,), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("scale", [1e-6, 1e6, 1e-30, 1e30])
@pytest.mark.parametrize("gradient", ALL_GRADIENTS.values(), ids=ALL_GRADIENTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_scaling_the_loss_changes_no_direction(dtype: torch.dtype, gradient: Gradient, scale: float) -> None:
    if dtype == torch.float32 and not 1e-7 < scale < 1e7:
        pytest.skip("float32 sums of gradients overflow or vanish by themselves at this scale")
    for case in by_name("opteq-relu deep written"):
        problem = case.problem(dtype)
        x = case.input(dtype=dtype).requires_grad_()
        layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-5, max_steps=200), gradient, on_failure="ignore")
        inputs = [x, *problem.parameters()]
        features = layer(x)
        plain, scaled = gradients(features, inputs, keep=True), gradients(features, inputs, scale)
        assert difference([g / scale for g in scaled], plain) < (1e-9 if dtype == torch.float64 else 1e-5)


# The vjps of every problem are in the test against a long unrolling: here it is about these gradients.
@pytest.mark.parametrize(("case", "solver", "gradient"), combined(CASES, SOLVERS, ROUGH_GRADIENTS, every=2))
def test_rough_gradients_point_the_right_way(case: Case, solver: Solver, gradient: Gradient) -> None:
    problem = case.problem()
    x = case.input().requires_grad_()
    inputs = [x, *problem.parameters()]
    layer = opteq.Equilibrium(problem, solver, gradient)
    found = gradients(layer(x), inputs)
    exact = reference(case)
    cosine = sum(float((a * b).sum()) for a, b in zip(found, exact, strict=True))
    sizes = [sum(float(g.square().sum()) for g in side) ** 0.5 for side in (found, exact)]
    assert cosine / (sizes[0] * sizes[1]) > 0.7


def test_phantom_is_the_series_it_says() -> None:
    (case,) = by_name("opteq-tanh")
    problem, x = case.problem(), case.input(1)
    state = opteq.Equilibrium(problem, SOLVERS["anderson"]).solve(x).state.detach()
    hidden = problem(x)
    jacobian = dense_jacobian(hidden.step, state)
    cotangent = torch.linspace(-1, 1, jacobian.shape[0], dtype=torch.float64)
    matrix = 0.2 * torch.eye(len(cotangent), dtype=torch.float64) + 0.8 * jacobian.T
    series = sum(0.8 * torch.linalg.matrix_power(matrix, j) @ cotangent for j in range(5))
    layer = opteq.Equilibrium(problem, SOLVERS["anderson"], opteq.Phantom(steps=5, damping=0.8))
    x = x.requires_grad_()
    (found,) = torch.autograd.grad(layer.solve(x).state, x, cotangent.view_as(state))
    (expected,) = torch.autograd.grad(problem(x).step(state), x, series.view_as(state))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_gradients_reach_a_solution_in_evaluation_mode_and_through_the_state() -> None:
    (case,) = by_name("opteq-relu")
    layer = opteq.Equilibrium(case.problem(), SOLVERS["anderson"]).eval()
    x = case.input().requires_grad_()
    solution = layer.solve(x)
    (through_state,) = torch.autograd.grad(probe_loss(solution.state), x)
    assert through_state.abs().sum() > 0
    unrolled = layer.problem(x).start()
    for _ in range(300):
        unrolled = layer.problem(x).step(unrolled)
    (expected,) = torch.autograd.grad(probe_loss(unrolled), x)
    torch.testing.assert_close(through_state, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("gradient", ALL_GRADIENTS.values(), ids=ALL_GRADIENTS)
def test_features_of_a_solve_without_autograd_stop_no_gradient(
    gradient: Gradient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the captured solve computes the features as well."""
    (case,) = by_name("opteq-conv")
    problem = case.problem()
    x = case.input().requires_grad_()
    inputs = [x, *problem.parameters()]
    layer = opteq.Equilibrium(problem, SOLVERS["anderson"], gradient)
    expected = gradients(layer(x), inputs)

    def solve(hidden: BoundMap, solver: Solver, start: State | None, same_steps: bool = False) -> Outcome:
        outcome = find(hidden, solver, start, same_steps)
        return replace(outcome, features=hidden.features(outcome.state))

    monkeypatch.setattr(opteq.engine, "solve", solve)
    assert difference(gradients(layer(x), inputs), expected) < 1e-12


@pytest.mark.parametrize("gradient", ALL_GRADIENTS.values(), ids=ALL_GRADIENTS)
def test_a_second_backward_on_a_kept_graph_is_the_same(gradient: Gradient) -> None:
    (case,) = by_name("opteq-relu")
    layer = opteq.Equilibrium(case.problem(), SOLVERS["broyden"], gradient, on_failure="ignore")
    x = case.input().requires_grad_()
    loss = probe_loss(layer(x))
    first = torch.autograd.grad(loss, x, retain_graph=True)
    second = torch.autograd.grad(loss, x)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("gradient", ALL_GRADIENTS.values(), ids=ALL_GRADIENTS)
def test_the_value_does_not_depend_on_the_gradient(gradient: Gradient) -> None:
    (case,) = by_name("written-tuple")
    problem, x = case.problem(), case.input()
    layer = opteq.Equilibrium(problem, SOLVERS["anderson"], gradient)
    with torch.no_grad():
        quiet = layer(x)
    for a, b in zip(blocks(layer(x.requires_grad_())), blocks(quiet), strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("case", by_name("opteq-relu opteq-conv deep"), ids=lambda case: case.name)
def test_an_unrolled_network_is_the_same_where_no_gradient_is_wanted(case: Case, solver: Solver) -> None:
    """Far from the equilibrium: as many steps on the features as on the state would lead further."""
    x = case.input()
    layer = opteq.Equilibrium(case.problem(), solver, opteq.Unrolled(steps=3), on_failure="ignore")
    with torch.no_grad():
        quiet = layer.solve(x)
    taped = layer.solve(x)
    torch.testing.assert_close(taped.features.detach(), quiet.features, rtol=0, atol=1e-12)
    torch.testing.assert_close(taped.residual, quiet.residual, rtol=1e-9, atol=1e-12)
