"""Law 6 for values that are not finite: non-finite in, non-finite out, for that sample and no other."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import opteq
from all_cases import CASES
from cases import Case, by_name
from opteq.gradients import Gradient
from opteq.models.comparators.monotone import MonDEQ
from opteq.solvers import Status
from opteq.states import blocks

INDEPENDENT = [case for case in CASES if not case.couples_batch]


def pulled(layer: opteq.Equilibrium, x: Tensor, bad: float | None, whole: bool) -> tuple[Tensor, list[Tensor]]:
    """The gradients of ``x`` and of the weights where the gradient that arrives at the second sample is ``bad``."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    features = blocks(layer(x))
    arriving = [torch.linspace(-1, 2, part.numel(), dtype=part.dtype).reshape(part.shape) for part in features]
    if bad is not None:
        arriving[0][1].view(-1)[slice(None) if whole else slice(1)] = bad
    torch.autograd.backward(features, arriving)
    assert x.grad is not None
    return x.grad, [p.grad for p in layer.parameters() if p.grad is not None]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "entry"])
@pytest.mark.parametrize("case", INDEPENDENT, ids=[case.name for case in INDEPENDENT])
def test_a_gradient_that_is_not_finite_stays_so(case: Case, whole: bool, bad: float) -> None:
    layer = opteq.Equilibrium(case.problem(), on_failure="ignore")
    x = case.input(3)
    with opteq.engine.off():
        clean, _ = pulled(layer, x, None, whole)
        spoilt, weights = pulled(layer, x, bad, whole)
    assert not torch.isfinite(spoilt[1]).all()
    assert all(not torch.isfinite(weight).all() for weight in weights[:1])
    torch.testing.assert_close(spoilt[[0, 2]], clean[[0, 2]], rtol=1e-9, atol=1e-12)
    assert layer.last is not None
    report = layer.last[1].report
    assert report is not None
    assert report.codes.tolist() == [0, int(Status.NON_FINITE), 0]


def test_a_scaler_of_gradients_sees_it() -> None:
    """GMRES gave exact zeros here, so that a scaler of mixed precision would have kept its scale."""
    W, U = opteq.operators.Dense(4, 8, bound=0.9), torch.nn.Linear(3, 8)
    layer = opteq.Equilibrium(opteq.DeepOptEq([(W, U)], alpha=0.8), on_failure="ignore")
    (layer(torch.randn(2, 3)).sum() * float("nan")).backward()
    assert all(not torch.isfinite(p.grad).all() for p in layer.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    "gradient",
    [opteq.Implicit(), opteq.OneStep(), opteq.Phantom(3), opteq.Shine()],
    ids=lambda value: type(value).__name__,
)
def test_a_unit_that_is_off_does_not_swallow_a_gradient(gradient: Gradient) -> None:
    """ReLU's derivative is zero there, and torch's own backward pass takes zero times NaN for zero."""
    torch.manual_seed(0)
    problem = opteq.GEQ(opteq.operators.Dense(8, 4, bound=0.9), torch.nn.Linear(3, 8), opteq.kernels.Linear())
    layer = opteq.Equilibrium(problem.double(), opteq.Broyden(tol=1e-8), gradient, on_failure="ignore")
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    z = layer(x)
    sent = torch.ones_like(z)
    row, unit = (z == 0).nonzero()[0].tolist()
    sent[row, unit] = torch.nan
    z.backward(sent)
    assert x.grad is not None
    assert (~torch.isfinite(x.grad)).all(dim=1).tolist() == [index == row for index in range(3)]


def test_features_that_are_cut_off_do_not_swallow_a_gradient() -> None:
    """The ReLU of Peaceman-Rachford splitting comes after its state."""
    torch.manual_seed(0)
    problem = MonDEQ(3, torch.nn.Conv2d(1, 3, 3, padding=1), 3, 0.5, "peaceman-rachford").double()
    layer = opteq.Equilibrium(problem, on_failure="ignore")
    x = torch.randn(3, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    z = layer(x)
    sent = torch.ones_like(z)
    place = (z == 0).nonzero()[0].tolist()
    sent[tuple(place)] = torch.nan
    z.backward(sent)
    assert x.grad is not None
    assert (~torch.isfinite(x.grad)).flatten(1).all(dim=1).tolist() == [index == place[0] for index in range(3)]


SOLVERS = {
    "picard": opteq.Picard(tol=1e-8, max_steps=500),
    "anderson": opteq.Anderson(tol=1e-8),
    "broyden": opteq.Broyden(tol=1e-8),
}


@pytest.mark.parametrize("tape", [True, False], ids=["tape", "no tape"])
@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((case, "anderson") for case in INDEPENDENT),
        *itertools.product(by_name("opteq-relu deep mopteq-conv written-tuple"), ("picard", "broyden")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_sample_that_is_not_finite_is_lost_alone(case: Case, name: str, tape: bool) -> None:
    x, solver = case.input(3), SOLVERS[name]
    spoilt = x.clone()
    spoilt[1].view(-1)[0] = torch.nan
    layer = opteq.Equilibrium(case.problem(), solver, on_failure="ignore")
    with opteq.engine.off(), torch.set_grad_enabled(tape):
        clean = layer.solve(x[[0, 2]])
        found = layer.solve(spoilt)
        plain = blocks(layer(spoilt))
    assert found.status[1] is Status.NON_FINITE
    assert [found.status[0], found.status[2]] == list(clean.status)
    assert found.steps[[0, 2]].tolist() == clean.steps.tolist()
    for name in ("features", "state"):
        for whole, alone in zip(blocks(getattr(found, name)), blocks(getattr(clean, name)), strict=True):
            assert torch.isnan(whole[1]).all()
            torch.testing.assert_close(whole[[0, 2]], alone, rtol=1e-9, atol=1e-12)
    for a, b in zip(plain, blocks(found.features), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def relu_layer(**options: object) -> opteq.Equilibrium:
    torch.manual_seed(0)
    return opteq.Equilibrium(
        opteq.OptEq(opteq.operators.Dense(3, 5, bound=0.9), torch.nn.Linear(4, 5)).double(), **options
    )


def test_warn_warns_once_and_names_the_input() -> None:
    layer = relu_layer()
    x = torch.ones(3, 4, dtype=torch.float64)
    x[1, 2] = torch.nan
    with pytest.warns(opteq.ConvergenceWarning, match=r"1x NON_FINITE(.|\n)*1 values .* first at index \(1, 2\)"):
        features = layer(x)
    assert torch.isnan(features[1]).all()
    assert torch.isfinite(features[[0, 2]]).all()
    layer(x)  # filterwarnings turns a second one into an error


def test_raise_raises() -> None:
    x = torch.ones(3, 4, dtype=torch.float64)
    x[1, 2] = torch.inf
    with pytest.raises(ValueError, match=r"the input has 1 values that are not finite, the first at index \(1, 2\)"):
        relu_layer(on_failure="raise")(x)


def test_mates_keep_their_gradients() -> None:
    layer, x = relu_layer(on_failure="ignore"), torch.randn(3, 4, dtype=torch.float64)
    (expected,) = torch.autograd.grad(layer(inputs := x[[0, 2]].requires_grad_()).sum(), inputs)
    spoilt = x.clone()
    spoilt[1] = torch.nan
    (found,) = torch.autograd.grad(layer(spoilt.requires_grad_())[[0, 2]].sum(), spoilt)
    torch.testing.assert_close(found[[0, 2]], expected, rtol=1e-7, atol=1e-9)


def test_an_objective_that_knows_missing_values_may_have_them() -> None:
    """NaN marks a pixel that was not seen: the problem says what that means, and every step is finite."""

    class Inpainting(opteq.HiddenProblem):
        penalty = "identity"

        def smooth(self, y: Tensor, x: Tensor) -> Tensor:
            seen = ~torch.isnan(x)
            gap = torch.where(seen, y - torch.where(seen, x, 0.0), 0.0)
            return 0.1 * gap.square().sum(1) + 0.1 * (y[:, 1:] - y[:, :-1]).square().sum(1)

    x = torch.tensor([[1.0, torch.nan, 3.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
    solution = opteq.Equilibrium(Inpainting(), on_failure="raise").solve(x)
    assert torch.isfinite(solution.features).all()
