"""Laws 5 and 6: a batch equals its samples one by one, and nothing fails silently."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import opteq
from all_cases import CASES
from cases import EXACT_GRADIENTS, ROUGH_GRADIENTS, SOLVERS, Case, by_name
from opteq import operators as op
from opteq.gradients import Gradient
from opteq.solvers import Solver, Status
from opteq.states import blocks
from oracles import gradients

LOOSE = {
    "picard": opteq.Picard(tol=1e-3, max_steps=500),
    "anderson": opteq.Anderson(tol=1e-3),
    "broyden": opteq.Broyden(tol=1e-3),
    "sam": opteq.SAM(regularizer=opteq.regularizers.Ridge(), tol=1e-3, max_steps=20),
}
INDEPENDENT = [case for case in CASES if not case.couples_batch]
GRADIENTS = {**EXACT_GRADIENTS, **ROUGH_GRADIENTS, "unrolled": opteq.Unrolled(steps=8)}


def takes(case: Case, solver: Solver) -> bool:
    """SAM works on features: not every problem can be written for them."""
    return not solver.works_on_features or case.name in ("opteq-relu", "opteq-tanh", "opteq-conv", "deep")


@pytest.mark.parametrize("solver", LOOSE.values(), ids=LOOSE)
@pytest.mark.parametrize("case", INDEPENDENT, ids=[case.name for case in INDEPENDENT])
def test_a_batch_equals_its_samples_one_by_one(case: Case, solver: Solver) -> None:
    """At a loose tolerance, where an answer still shows when its sample was stopped."""
    if not takes(case, solver):
        pytest.skip("this problem has no form in its features")
    layer = opteq.Equilibrium(case.problem(), solver, on_failure="ignore")
    # Samples of very different difficulty, so that they stop at different steps.
    x = case.input(4) * torch.tensor([1e-3, 1.0, 30.0, 0.0], dtype=torch.float64).view(-1, *[1] * len(case.shape))
    with torch.no_grad():
        together = layer.solve(x)
        for index in range(len(x)):
            alone = layer.solve(x[index : index + 1])
            assert int(alone.steps) == int(together.steps[index])
            assert alone.status[0] == together.status[index]
            for a, b in zip(blocks(alone.state), blocks(together.state), strict=True):
                torch.testing.assert_close(a[0], b[index], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("solver", list(LOOSE.values())[:3], ids=list(LOOSE)[:3])
@pytest.mark.parametrize("case", by_name("opteq-relu deep written-tuple"), ids=lambda case: case.name)
def test_gradients_of_a_batch_equal_those_of_its_samples(case: Case, solver: Solver, gradient: Gradient) -> None:
    layer = opteq.Equilibrium(case.problem(), solver, gradient, on_failure="ignore")
    x = case.input(3) * torch.tensor([1e-3, 1.0, 30.0], dtype=torch.float64).view(-1, 1)

    def input_gradient(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        features = layer(x)
        loss = sum(part.sum() for part in blocks(features))
        return torch.autograd.grad(loss, x)[0]

    together = input_gradient(x)
    alone = torch.cat([input_gradient(x[i : i + 1]) for i in range(len(x))])
    torch.testing.assert_close(together, alone, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("solver", LOOSE.values(), ids=LOOSE)
@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_empty_batch_and_batch_of_one(solver: Solver, gradient: Gradient) -> None:
    for case in by_name("opteq-relu opteq-conv deep"):
        layer = opteq.Equilibrium(case.problem(), solver, gradient, on_failure="ignore")
        for batch in (0, 1):
            x = case.input(batch).requires_grad_()
            solution = layer.solve(x)
            assert solution.residual.shape == solution.steps.shape == solution.converged.shape == (batch,)
            assert len(solution.status) == batch
            found = gradients(solution.features, [x, *layer.parameters()])
            assert all(torch.isfinite(g).all() for g in found)


def expanding(gain: float) -> opteq.OptEq:
    problem = opteq.OptEq(op.Dense(3, 3), nn.Linear(3, 3)).double()
    with torch.no_grad():
        problem.W.weight.copy_(gain * torch.eye(3))
        problem.U.weight.copy_(torch.eye(3))
        problem.U.bias.zero_()
    return problem


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_divergence_is_reported_and_leaves_finite_numbers(solver: Solver) -> None:
    """Positive inputs grow without end under an expanding ReLU, negative ones are at equilibrium at once."""
    layer = opteq.Equilibrium(expanding(3.0), solver)
    x = torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]], dtype=torch.float64).requires_grad_()
    with pytest.warns(opteq.ConvergenceWarning, match="1 of 2 samples: no equilibrium within the tolerance"):
        solution = layer.solve(x)
    assert solution.converged.tolist() == [False, True]
    assert solution.status[0] in (Status.NON_FINITE, Status.MAX_STEPS, Status.NOT_A_MINIMUM)
    assert solution.status[1] is Status.CONVERGED
    assert torch.isfinite(solution.state).all()
    assert torch.isfinite(solution.residual).all()
    assert solution.steps.tolist()[1] == 0


def test_a_layer_warns_once_and_says_what_to_try() -> None:
    layer = opteq.Equilibrium(expanding(0.9), opteq.Picard(tol=1e-9, max_steps=3))
    x = torch.ones(2, 3, dtype=torch.float64)
    with pytest.warns(opteq.ConvergenceWarning) as caught:
        layer(x)
    message = str(caught[0].message)
    for part in ("2 of 2 samples", "worst relative residual", "tolerance 1.0e-09", "3 steps", "Raise max_steps"):
        assert part in message
    layer(x)  # no second warning: it would be an error here


def test_a_warning_names_the_line_that_called() -> None:
    torch.manual_seed(0)
    layer = opteq.Equilibrium(
        opteq.OptEq(op.Dense(30, 30, bound=0.999), None).double(),
        opteq.Picard(tol=1e-9, max_steps=3),
        opteq.Implicit(linear=opteq.CG(tol=1e-12, max_steps=2)),
    )
    network = torch.nn.Sequential(torch.nn.Identity(), layer)
    with pytest.warns(opteq.ConvergenceWarning) as forward:
        features = network(torch.randn(2, 30, dtype=torch.float64))
    with pytest.warns(opteq.ConvergenceWarning) as backward:
        features.square().sum().backward()
    assert {forward[0].filename, backward[0].filename} == {__file__}
    assert forward[0].lineno < backward[0].lineno


def test_failures_can_be_raised_or_ignored() -> None:
    x = torch.ones(2, 3, dtype=torch.float64)
    solver = opteq.Picard(tol=1e-9, max_steps=3)
    with pytest.raises(opteq.ConvergenceError, match="2 of 2 samples"):
        opteq.Equilibrium(expanding(0.9), solver, on_failure="raise")(x)
    quiet = opteq.Equilibrium(expanding(0.9), solver, on_failure="ignore").solve(x)
    assert not quiet.converged.any()


def test_backward_report_and_its_failure() -> None:
    problem = expanding(0.99)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True) * torch.tensor([1.0, 2.0, 3.0])
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-8))
    solution = layer.solve(x)
    assert solution.backward is None
    solution.features.sum().backward()
    assert solution.backward is not None
    assert solution.backward.converged.all()
    assert "MINRES" in solution.backward.method
    assert (solution.backward.residual <= 1e-10).all()
    torch.manual_seed(0)
    hard = opteq.OptEq(op.Dense(30, 30, bound=0.999), None).double()
    short = opteq.Implicit(linear=opteq.CG(tol=1e-12, max_steps=2))
    layer = opteq.Equilibrium(hard, opteq.Anderson(tol=1e-8, max_steps=300), short)
    solution = layer.solve(torch.randn(2, 30, dtype=torch.float64))
    with pytest.warns(opteq.ConvergenceWarning, match="2 of 2 samples: the gradient's linear system was not solved"):
        solution.features.square().sum().backward()
    assert solution.backward.status == (Status.MAX_STEPS, Status.MAX_STEPS)


def test_conjugate_gradients_refuse_an_indefinite_system() -> None:
    layer = opteq.Equilibrium(
        expanding(2.0), opteq.Picard(max_steps=1), opteq.Implicit(linear=opteq.CG()), on_failure="ignore"
    )
    x = torch.ones(1, 3, dtype=torch.float64, requires_grad=True)
    solution = layer.solve(x)
    solution.features.sum().backward()
    assert solution.backward.status == (Status.NOT_A_MINIMUM,)
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("gradient", ROUGH_GRADIENTS.values(), ids=ROUGH_GRADIENTS)
def test_approximate_gradients_say_that_they_are(gradient: Gradient) -> None:
    (case,) = by_name("opteq-relu")
    solution = opteq.Equilibrium(case.problem(), SOLVERS["broyden"], gradient).solve(case.input())
    solution.features.sum().backward()
    assert set(solution.backward.status) == {Status.APPROXIMATE}
    assert not solution.backward.converged.any()


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_a_bad_sample_spoils_no_other(solver: Solver, gradient: Gradient) -> None:
    (case,) = by_name("opteq-relu")
    layer = opteq.Equilibrium(case.problem(), solver, gradient, on_failure="ignore")
    x = case.input(3)
    clean = x.clone().requires_grad_()
    (expected,) = gradients(layer(clean), [clean])
    spoilt = x.clone()
    spoilt[1, 0] = torch.nan
    spoilt.requires_grad_()
    solution = layer.solve(spoilt)
    assert solution.status[1] is Status.NON_FINITE
    expected_status = layer.solve(clean).converged.tolist()
    assert solution.converged.tolist() == [expected_status[0], False, expected_status[2]]
    (found,) = gradients(solution.features, [spoilt])
    keep = [0, 2]
    torch.testing.assert_close(found[keep], expected[keep], rtol=1e-9, atol=1e-12)


def test_the_best_state_is_kept_when_later_ones_are_worse() -> None:
    """A map that comes close to a fixed point and then runs away."""
    values = iter([1.0, 1.001, 5.0, 50.0, float("nan"), 1.0, 1.0])

    def step(y: Tensor) -> Tensor:
        return torch.full_like(y, next(values))

    outcome = opteq.Picard(tol=1e-6, max_steps=5).solve(step, torch.zeros(1, 1, dtype=torch.float64))
    assert float(outcome.state) == 1.0
    assert float(outcome.residual) == pytest.approx(0.001 / 1.001)
    assert outcome.codes.tolist() == [Status.NON_FINITE]


@pytest.mark.parametrize("solver", [opteq.Picard, opteq.Anderson, opteq.Broyden])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_few_steps_are_taken_and_told(solver: type[Solver], steps: int) -> None:
    outcome = solver(tol=1e-14, max_steps=steps).solve(lambda y: y.cos(), torch.zeros(1, 2, dtype=torch.float64))
    assert outcome.steps.tolist() == [steps]
    assert outcome.trace.shape == (steps + 1, 1)
    assert float(outcome.residual) < float(outcome.trace[0])
    assert (outcome.state != 0).all()
