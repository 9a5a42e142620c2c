"""The prox of a penalty times a step length, against a search on a grid and against finite differences."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import opteq
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


def test_a_clamp_is_found_in_few_steps():
    """Where sigma is flat the root is an end of its bracket, which bisection would take all its steps to reach."""
    steps = []

    def clamp(v):
        steps.append(1)
        return v.clamp(0, 0.5)

    box = penalties.FromActivation(clamp, lipschitz=1.0)
    steps.clear()
    u = torch.linspace(-3, 3, 101).expand(5, -1)
    found = ScaledPenalty(box, LENGTHS.float()).prox(u)
    assert torch.allclose(found, u.clamp(0, 0.5), atol=1e-6)
    assert len(steps) <= 20


class Simplex(penalties.Penalty):  # y >= 0, sum y = 1
    name, lipschitz, bounded, degree, has_potential = "simplex", 1.0, True, 0, False

    def prox(self, t):
        ordered = t.sort(dim=1, descending=True).values
        shifts = (ordered.cumsum(1) - 1) / torch.arange(1, t.shape[1] + 1, dtype=t.dtype)
        return (t - shifts.amax(1, keepdim=True)).clamp(min=0)

    def total(self, y):
        inside = (y >= 0).all(1) & ((y.sum(1) - 1).abs() < 1e-6)
        return torch.where(inside, 0.0, torch.inf).to(y.dtype)

    def linearise(self, t):
        on = (self.prox(t) > 0).to(t.dtype)

        def project(v):
            return on * (v - (on * v).sum(1, keepdim=True) / on.sum(1, keepdim=True))

        return penalties.Linearised(project, project, project)


class Groups(penalties.Penalty):  # 0.3 times the sum of the norms of pairs of entries
    name, lipschitz, degree, has_potential = "groups", 1.0, 1, False

    def prox(self, t):
        pairs = t.unflatten(1, (-1, 2))
        return (pairs * (1 - 0.3 / pairs.norm(dim=-1, keepdim=True)).clamp(min=0)).flatten(1)

    def total(self, y):
        return 0.3 * y.unflatten(1, (-1, 2)).norm(dim=-1).sum(1)

    def linearise(self, t):
        pairs = t.unflatten(1, (-1, 2))
        norm = pairs.norm(dim=-1, keepdim=True)
        along, share = pairs / norm, (1 - 0.3 / norm).clamp(min=0)

        def product(v, share, on):
            v = v.unflatten(1, (-1, 2))
            radial = along * (along * v).sum(-1, keepdim=True)
            return (on * radial + share * (v - radial)).flatten(1)

        on = (share > 0).to(t.dtype)
        root = partial(product, share=share.sqrt(), on=on)
        return penalties.Linearised(root, root, partial(product, share=share, on=on))


class Program(opteq.Objective):
    def __init__(self, penalty):
        super().__init__()
        self.penalty = penalty
        self.A = torch.nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))

    def terms(self, y, x):
        return {"square": 0.5 * (y @ self.A).square().sum(1) + 0.05 * y.square().sum(1), "linear": (x * y).sum(1)}


@pytest.mark.parametrize("penalty", [Simplex(), Groups()])
def test_a_penalty_that_mixes_entries_has_the_minimiser_and_the_gradient_of_its_objective(penalty):
    torch.manual_seed(0)
    solver = opteq.FISTA(tol=1e-12, measure="error", max_steps=10_000)
    layer = opteq.Equilibrium(Program(penalty), solver, opteq.Implicit(tol=1e-12, max_steps=100)).double()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    solution = layer.solve(x)
    assert solution.converged.all()
    values = layer.problem(x).objective(solution.state)
    for _ in range(20):  # no other point of the domain has a lower objective
        other = penalty.prox(solution.state + 0.1 * torch.randn(4, 6))
        assert (values <= layer.problem(x).objective(other)).all()
    assert torch.autograd.gradcheck(lambda x, A: layer(x), (x, layer.problem.A), atol=1e-6, fast_mode=True)


def test_a_penalty_that_mixes_entries_has_to_declare_its_degree():
    class Unknown(Simplex):
        def prox(self, t):
            return 0.5 * super().prox(t)

    with pytest.raises(TypeError, match="declare its degree: 0 for a constraint, 1 for a norm"):
        ScaledPenalty(Unknown(), torch.ones(1))


@pytest.mark.parametrize("degree", [2, "0", True])
def test_a_degree_is_zero_or_one(degree):
    penalty = Simplex()
    penalty.degree = degree
    with pytest.raises(ValueError, match=rf"Simplex.degree should be 0 .* 1 .* or None; got {degree!r}"):
        ScaledPenalty(penalty, torch.ones(1))
