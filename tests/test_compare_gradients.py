"""The helper that measures gradients on a user's own layer: right numbers, and no trace of it left behind."""

from __future__ import annotations

import io
import math

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import opteq
from cases import Smoother, TwoParts
from opteq import operators as op
from opteq.analysis import GradientCost, compare_gradients
from opteq.gradients import Gradient
from oracles import unrolled_features


def small_layer(bound: float = 0.9, gradient: Gradient | None = None) -> opteq.Equilibrium:
    torch.manual_seed(0)
    problem = opteq.OptEq(op.Dense(12, 16, bound=bound), nn.Linear(4, 16), "tanh").double()
    problem.W.weight.data.mul_(1.2)  # off the kink of the bound
    return opteq.Equilibrium(problem, opteq.Anderson(tol=1e-10, max_steps=100), gradient)


def batch(rows: int = 8) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def measure(layer: opteq.Equilibrium, gradients: list[Gradient], x: Tensor | None = None) -> list[GradientCost]:
    return compare_gradients(layer, batch() if x is None else x, gradients=gradients, repeats=1, show=False)


def test_angles_are_those_to_the_exact_gradient() -> None:
    layer = small_layer()
    implicit, five, one, many = measure(
        layer, [opteq.Implicit(), opteq.Phantom(), opteq.OneStep(), opteq.Phantom(steps=100)]
    )
    assert implicit.angle < 1e-5
    assert implicit.ratio == pytest.approx(1, abs=1e-7)
    assert many.angle < 1e-4
    assert 0.01 < five.angle < one.angle
    assert one.angle > 1
    assert one.ratio < 0.95  # the sum over later steps is missing


def test_an_angle_against_a_long_unrolling() -> None:
    """The angle of the one-step gradient, computed from nothing but autograd on the problem itself."""
    layer, x = small_layer(), batch().requires_grad_()
    inputs = [x, *layer.parameters()]
    weights = torch.linspace(-1, 2, 8 * 12, dtype=torch.float64).view(8, 12)

    def loss(features: Tensor) -> Tensor:
        return (weights * features).sum()

    exact = torch.autograd.grad(loss(unrolled_features(layer.problem, x)), inputs)
    hidden = layer.problem(x)
    state = layer.solve(x).state.detach()
    rough = torch.autograd.grad(loss(hidden.features(hidden.step(state))), inputs)
    a, b = (torch.cat([part.flatten() for part in side]) for side in (rough, exact))
    degrees = math.degrees(math.acos(float(a @ b / (a.norm() * b.norm()))))
    (row,) = compare_gradients(layer, x, loss, [opteq.OneStep()], repeats=1, show=False)
    # The features' own dependence on W is in the tape of one step, but not that of the state it starts from.
    assert row.angle == pytest.approx(degrees, rel=1e-6)
    assert row.ratio == pytest.approx(float(a.norm() / b.norm()), rel=1e-8)


def test_memory_grows_with_unrolled_steps_and_with_no_others() -> None:
    layer = opteq.Equilibrium(small_layer(0.95).problem, opteq.Picard(tol=1e-13, max_steps=100))
    x = batch(64)
    rows = measure(layer, [opteq.Unrolled(steps=10), opteq.Unrolled(steps=20), opteq.Unrolled(steps=40)], x)
    ten, twenty, forty = (row.kept_bytes for row in rows)
    assert 1.7 * ten < twenty < 2.2 * ten
    assert 1.7 * twenty < forty < 2.2 * twenty
    kept = {}
    for steps in (10, 100):
        one = opteq.Equilibrium(layer.problem, opteq.Picard(tol=1e-13, max_steps=steps))
        (row,) = measure(one, [opteq.Implicit()], x)
        kept[steps] = row.kept_bytes
    # but for the trace of residuals, one number a step and sample
    assert kept[100] - kept[10] <= 90 * 64 * 8
    assert kept[10] < ten / 2


def test_memory_counts_what_the_adjoint_solve_keeps() -> None:
    """At least the slopes of its activation and their roots, beyond what one step keeps."""
    one, implicit = measure(small_layer(), [opteq.OneStep(), opteq.Implicit()], batch(256))
    state = 256 * 16 * 8
    assert one.kept_bytes >= state
    assert implicit.kept_bytes >= one.kept_bytes + state // 2


def test_all_kinds_by_default_and_a_table() -> None:
    page = io.StringIO()
    rows = compare_gradients(small_layer(), batch(), repeats=2, console=Console(file=page, width=120))
    assert [type(row.gradient).__name__ for row in rows] == ["Implicit", "Phantom", "OneStep", "Shine", "Unrolled"]
    for row in rows:
        assert 0 <= row.angle < 90
        assert row.ratio > 0
        assert row.forward_seconds > 0
        assert row.backward_seconds > 0
        assert row.kept_bytes > 0
    text = page.getvalue()
    for words in ("Gradients against the exact one", "Implicit", "Phantom(5, 0.8)", "OneStep()", "angle", "KiB", "ms"):
        assert words in text


def test_it_prints_to_standard_output_unless_told_not_to(capsys: pytest.CaptureFixture[str]) -> None:
    compare_gradients(small_layer(), batch(), gradients=[opteq.OneStep()], repeats=1)
    assert "OneStep" in capsys.readouterr().out
    measure(small_layer(), [opteq.OneStep()])
    assert capsys.readouterr().out == ""


class Restless(nn.Module):
    """An injection with everything that a forward pass can change: statistics, a counter, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.2))
        self.frozen = nn.Dropout(0.5).eval()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.frozen(self.inner(x))


def test_the_layer_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    layer = opteq.Equilibrium(opteq.OptEq(op.Dense(12, 16, bound=0.9), Restless()).double(), opteq.Anderson(tol=1e-8))
    x = batch().requires_grad_()
    layer(x).sum().backward()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters()}
    modes = {name: module.training for name, module in layer.named_modules()}
    last, random, solver, gradient, slope = layer.last, torch.get_rng_state(), layer.solver, layer.gradient, x.grad
    rows = measure(layer, [opteq.Implicit(), opteq.Phantom(steps=200, damping=1.0), opteq.Unrolled()], x)
    # Dropout draws the same numbers in every run, or angles would compare different networks.
    assert all(row.angle < 0.1 for row in rows)
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=0)
    assert {name: module.training for name, module in layer.named_modules()} == modes
    assert not modes["problem.U.frozen"]
    assert (layer.solver, layer.gradient, x.grad) == (solver, gradient, slope)
    assert layer.last is last
    assert torch.equal(torch.get_rng_state(), random)


def test_it_is_left_as_it_was_after_an_error_too() -> None:
    torch.manual_seed(0)
    layer = opteq.Equilibrium(opteq.OptEq(op.Dense(12, 16, bound=0.9), Restless()).double())

    def broken(features: Tensor) -> Tensor:
        raise ArithmeticError("no loss today")

    with pytest.raises(ArithmeticError, match="no loss today"):
        compare_gradients(layer, batch(), broken, show=False)
    assert int(layer.problem.U.calls) == 0


@pytest.mark.parametrize("problem", [Smoother, TwoParts], ids=["written", "tuple"])
def test_problems_written_by_a_user_and_states_of_several_parts(problem: type) -> None:
    torch.manual_seed(0)
    layer = opteq.Equilibrium(problem().double(), opteq.Anderson(tol=1e-10, max_steps=100))
    implicit, one = measure(layer, [opteq.Implicit(), opteq.OneStep()])
    assert implicit.angle < 1e-3 < one.angle


def test_it_works_where_gradients_are_off() -> None:
    with torch.no_grad():
        (row,) = measure(small_layer(), [opteq.Implicit()])
    assert row.angle < 1e-5


def test_what_is_refused() -> None:
    sam = opteq.SAM(regularizer=opteq.regularizers.Ridge())
    with pytest.raises(ValueError, match="SAM does not end at an equilibrium"):
        compare_gradients(opteq.Equilibrium(small_layer().problem, sam), batch())
    with pytest.raises(ValueError, match="repeats should be at least 1; got 0"):
        compare_gradients(small_layer(), batch(), repeats=0)
    with pytest.raises(TypeError, match="gradient should be a gradient such as"):
        compare_gradients(small_layer(), batch(), gradients=["implicit"])


def test_inputs_of_branches_may_differ() -> None:
    torch.manual_seed(0)
    branches = [
        opteq.Branch(opteq.operators.Conv2d(2, 3, 3, bound=0.9), nn.Conv2d(1, 3, 3, padding=1), s) for s in (1, 2)
    ]
    layer = opteq.Equilibrium(opteq.MOptEq(branches)).double()
    x = tuple(torch.randn(2, 1, side, side, dtype=torch.float64) for side in (4, 2))
    (row,) = compare_gradients(layer, x, gradients=[opteq.Implicit(tol=1e-10)], repeats=1, show=False)
    assert row.angle < 0.1  # degrees
