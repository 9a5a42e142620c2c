"""The prox of a penalty times a step length, against a search on a grid and against finite differences."""

from __future__ import annotations

import pytest
import torch

from opteq import penalties
from opteq.penalties.scaled import ScaledPenalty

KINDS = [
    "identity",
    "relu",
    "leaky_relu",
    "tanh",
    "sigmoid",
    "softplus",
    "elu",
    "soft_threshold",
    "hardtanh",
    "softsign",
]
LENGTHS = torch.tensor([0.05, 0.7, 1.0, 3.0, 40.0], dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_the_prox_minimises_what_it_should(kind):
    penalty = penalties.get(kind)
    u = torch.linspace(-2.5, 2.5, 11, dtype=torch.float64).expand(5, -1)
    found = ScaledPenalty(penalty, LENGTHS).prox(u)
    low, high = penalty.domain
    grid = torch.linspace(max(low, -8), min(high, 8), 32_001, dtype=torch.float64)
    values = penalty.value(grid)
    for row, t in enumerate(LENGTHS):
        for column in range(0, 11, 2):
            objective = t * values + (grid - u[row, column]).square() / 2
            assert abs(found[row, column] - grid[objective.argmin()]) < 2e-3


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_those_of_finite_differences(kind):
    scaled = ScaledPenalty(penalties.get(kind), LENGTHS)
    u = torch.linspace(-2.53, 2.47, 9, dtype=torch.float64).expand(5, -1).contiguous().requires_grad_()
    assert torch.autograd.gradcheck(scaled.prox, (u,), atol=1e-5, fast_mode=True)
    (slope,) = torch.autograd.grad(scaled.prox(u).sum(), u)
    assert torch.allclose(slope, scaled.derivative(u), atol=1e-9)
    local = scaled.linearise(u.detach())
    v = torch.randn_like(u)
    assert torch.allclose(local.factor(local.factor_adjoint(v)), slope * v, atol=1e-9)


@pytest.mark.parametrize("kind", ["leaky_relu", "tanh", "sigmoid", "softplus", "elu", "softsign"])
def test_roots_solve_their_equation_to_rounding_in_few_steps(kind, monkeypatch):
    """``t a + (1 - t) sigma(a) = u``; the slope of a prox is that at the root, so the root itself has to be right."""
    penalty, steps = penalties.get(kind), []
    derivative = type(penalty).derivative
    monkeypatch.setattr(type(penalty), "derivative", lambda self, a: (steps.append(1), derivative(self, a))[1])
    u, t = torch.linspace(-3, 3, 101, dtype=torch.float64).expand(3, -1), LENGTHS[:3, None]
    root = ScaledPenalty(penalty, LENGTHS[:3])._root(u, t)
    assert len(steps) <= 20
    both = t * root + (1 - t) * penalty.prox(root)
    assert (both - u).abs().max() <= 1e-14
    seen = torch.func.vmap(lambda one: ScaledPenalty(penalty, LENGTHS[:1]).prox(one[None]))(u[:1])  # all steps
    torch.testing.assert_close(seen[0], ScaledPenalty(penalty, LENGTHS[:1]).prox(u[:1]), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("kind", ["leaky_relu", "tanh", "sigmoid", "softplus", "elu", "softsign"])
def test_second_derivatives_are_those_of_finite_differences(kind):
    scaled = ScaledPenalty(penalties.get(kind), LENGTHS)
    u = torch.linspace(-2.53, 2.47, 9, dtype=torch.float64).expand(5, -1).contiguous().requires_grad_()
    assert torch.autograd.gradgradcheck(scaled.prox, (u,), atol=1e-5, fast_mode=True)
