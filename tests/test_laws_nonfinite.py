"""Law 6 for values that are not finite: non-finite in, non-finite out, for that sample and no other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import opteq
from all_cases import CASES
from cases import Case
from opteq.solvers import Status
from opteq.states import blocks

INDEPENDENT = [case for case in CASES if not case.couples_batch]
PATHS = pytest.mark.parametrize("fast", [False, True], ids=["plain", "fast"])


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


@PATHS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "entry"])
@pytest.mark.parametrize("case", INDEPENDENT, ids=[case.name for case in INDEPENDENT])
def test_a_gradient_that_is_not_finite_stays_so(case: Case, whole: bool, bad: float, fast: bool) -> None:
    layer = opteq.Equilibrium(case.problem(), on_failure="ignore")
    x = case.input(3)
    with opteq.fast_paths(fused=fast, graphs=fast):
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
