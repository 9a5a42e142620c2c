"""The numbered statements of the GEQ paper: what holds, corrected where needed, and counterexamples."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import opteq
from opteq import kernels
from opteq import operators as op
from opteq.problems.geq import GEQ

EXACT = opteq.Anderson(tol=1e-13, max_steps=1000)


def dense(matrix: Tensor) -> op.Dense:
    made = op.Dense(matrix.shape[1], matrix.shape[0]).double()
    made.weight.data.copy_(matrix)
    return made


def scaled(matrix: Tensor, norm: float) -> Tensor:
    return matrix * (norm / torch.linalg.matrix_norm(matrix, 2))


def geq(W: Tensor, U: Tensor, gamma: float) -> GEQ:
    injection = nn.Linear(U.shape[1], U.shape[0], bias=False).double()
    injection.weight.data.copy_(U)
    return GEQ(dense(W), injection, kernels.Gaussian(gamma))


def solved(problem: opteq.problems.Problem, x: Tensor) -> Tensor:
    with torch.no_grad():
        return opteq.Equilibrium(problem, EXACT, on_failure="raise").solve(x).state


def opteq_states(W: Tensor, c: Tensor) -> Tensor:
    """``z = relu(W' W z + c)`` by plain iteration: the paper's form of OptEq, written without this library."""
    z = torch.zeros_like(c)
    for _ in range(300):
        z = torch.relu(z @ (W.T @ W) + c)
    return z


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_proposition_1_the_kernel_is_a_product_of_features_of_all_orders() -> None:
    """Its n^i features of order i are tensor powers with factor sqrt((2 gamma)^i / i!), with 1 / (2 gamma) before the
    product. The factor exp(-gamma |Wz|^2) depends on the state, so this is an identity of objectives alone."""
    gamma = 0.3
    W, U = scaled(normal(0, 3, 4), 0.9), scaled(normal(1, 3, 5), 0.9)
    x, z = normal(2, 6, 5), normal(3, 6, 4).relu()
    c, image = x @ U.T, z @ W.T
    powers = [torch.ones(6, 1, dtype=torch.float64)] * 2
    product = torch.ones(6, dtype=torch.float64)
    for order in range(1, 9):
        powers = [torch.einsum("bi,bj->bij", p, v).flatten(1) for p, v in zip(powers, (c, image), strict=True)]
        product = product + (2 * gamma) ** order / math.factorial(order) * (powers[0] * powers[1]).sum(1)
    outer = torch.exp(-gamma * (c.square().sum(1) + image.square().sum(1)))
    problem = geq(W, U, gamma)
    with torch.no_grad():
        value = problem(x).objective(z)
    expected = z.square().sum(1) / 2 - outer * product / (2 * gamma)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_lemma_1_how_far_weights_move_an_equilibrium(seed: int) -> None:
    """|dz| <= |d(W'W)| |c| / (1 - m)^2 + |dc| / (1 - m): the display of the appendix with its factors in order."""
    W = scaled(normal(seed, 6, 6), 0.9)
    other = scaled(W + 0.05 * normal(seed + 10, 6, 6), 0.9)
    c = normal(seed + 20, 50, 6)
    moved = c + 0.1 * normal(seed + 30, 50, 6)
    found = (opteq_states(W, c) - opteq_states(other, moved)).norm(dim=1)
    m, change = 0.81, torch.linalg.matrix_norm(W.T @ W - other.T @ other, 2)
    bound = change * c.norm(dim=1) / (1 - m) ** 2 + (c - moved).norm(dim=1) / (1 - m)
    assert (found <= bound * (1 + 1e-9)).all()


def test_proposition_2_leaves_out_how_the_weight_changes() -> None:
    """Its step for GEQ takes exp(-gamma |r|^2) as a constant; one unit with gamma r^2 = 1.5 moves further than that."""
    w, gamma, change = 0.9, 0.3, 1e-4
    r = math.sqrt(1.5 / gamma)
    z = math.exp(-1.5) * w * r
    c = r + w * z  # at which z is the equilibrium
    problem = geq(torch.tensor([[w]], dtype=torch.float64), torch.eye(1, dtype=torch.float64), gamma)
    states = solved(problem, torch.tensor([[c], [c + change]], dtype=torch.float64))
    assert states[0].item() == pytest.approx(z, abs=1e-10)
    beta = math.exp(-1.5)
    frozen = beta * w * change / (1 - beta * w * w)
    assert (states[1] - states[0]).abs().item() > 2 * frozen


def test_remark_1_on_its_range() -> None:
    """For beta < 0.8 and mu, m > 0.9 the terms of GEQ's bound are the smaller ones."""
    beta, mu = torch.rand(2, 10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    beta, mu = 0.8 * beta, 0.949 + 0.05 * mu
    m = 0.9 + (mu**2 - 0.9) * torch.rand(10_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert (beta * mu / (1 - beta * m) < 1 / (1 - m)).all()
    assert ((2 * mu * beta + 1) / (1 - beta * m) <= 1 / (1 - m)).all()


def test_remark_2_asks_for_what_cannot_be_and_is_true_all_the_same() -> None:
    """B < 1 and sqrt(gamma) < 0.2 make every weight at least exp(-0.04), never below 0.8; GEQ's certified constant is
    below OptEq's mu / (1 - mu^2) for every gamma."""
    x = normal(0, 500, 5)
    x = 0.99 * x / x.norm(dim=1, keepdim=True)
    for mu in (0.3, 0.7, 0.95):
        W, U = scaled(normal(1, 5, 6), mu), scaled(normal(2, 5, 5), mu)
        problem = geq(W, U, 0.039)
        r = x @ U.T - solved(problem, x) @ W.T
        assert torch.exp(-0.039 * r.square().sum(1)).min() >= math.exp(-0.04)
        for gamma in (0.01, 0.3, 5.0):
            assert geq(W, U, gamma).certificate().lipschitz < mu / (1 - mu**2)


def test_lemma_3_is_per_unit() -> None:
    """E[relu(u x) relu(u y)] for Gaussian u, by quadrature over the plane that x and y span."""
    x, y = torch.tensor([1.0, 0.5], dtype=torch.float64), torch.tensor([-0.3, 0.8], dtype=torch.float64)
    nodes = torch.linspace(-8, 8, 1201, dtype=torch.float64)
    a, b = torch.meshgrid(nodes, nodes, indexing="ij")
    density = torch.exp(-(a**2 + b**2) / 2) / (2 * math.pi) * (nodes[1] - nodes[0]) ** 2
    found = (torch.relu(a * x[0] + b * x[1]) * torch.relu(a * y[0] + b * y[1]) * density).sum().item()
    angle = torch.arccos((x @ y) / (x.norm() * y.norm())).item()
    printed = (x.norm() * y.norm()).item() / (2 * math.pi) * (math.sin(angle) + (math.pi - angle) * math.cos(angle))
    assert found == pytest.approx(printed, abs=1e-4)


def test_proposition_4_is_refuted_for_opteq_by_opposite_inputs() -> None:
    """The bound is 0 where x_2 = -x_1; units that W couples have a positive similarity. One that always holds is
    n E[u^2] |x_1| |x_2| / (2 (1 - mu^2)^2)."""
    W = torch.full((2, 2), 0.45, dtype=torch.float64)
    x = torch.tensor([1.0], dtype=torch.float64)
    U = normal(0, 20_000, 2, 1)
    first, second = (opteq_states(W, (U * sign * x).sum(-1)) for sign in (1.0, -1.0))
    similarity = (first * second).sum(1).mean().item()
    assert similarity > 0.2
    assert similarity <= 2 * 1.0 / (2 * (1 - 0.81) ** 2)


@pytest.mark.parametrize("gamma", [0.02, 0.3, 2.0])
def test_proposition_4_corrected_for_geq(gamma: float) -> None:
    """At every pair of samples z_1 z_2 <= mu^2 b_1 b_2 |U x_1| |U x_2| with the weights b, and
    b_1 b_2 <= exp(gamma B^2 |W|^2) exp(-gamma/4 s^2 |x_1 - x_2|^2), s the least singular value of U."""
    mu = 0.9
    W, U = scaled(normal(0, 6, 7), mu), scaled(normal(1, 6, 4), 0.95)
    x = 2 * normal(2, 400, 4)
    z = solved(geq(W, U, gamma), x)
    c = x @ U.T
    weight = torch.exp(-gamma * (c - z @ W.T).square().sum(1))
    first, second = slice(0, 200), slice(200, 400)
    similarity = (z[first] * z[second]).sum(1)
    both = weight[first] * weight[second]
    assert (similarity <= mu**2 * both * c[first].norm(dim=1) * c[second].norm(dim=1) * (1 + 1e-9) + 1e-12).all()
    least, largest = torch.linalg.svdvals(U)[-1], z.norm(dim=1).max()
    apart = (x[first] - x[second]).square().sum(1)
    bound = torch.exp(gamma * largest**2 * mu**2 - gamma / 4 * least**2 * apart)
    assert (both <= bound * (1 + 1e-9)).all()


def test_remark_3_needs_gamma_in_its_threshold() -> None:
    """Beyond 2 sqrt(log D / gamma) / s, D exp(-gamma/4 s^2 d^2) is at most 1; at the printed distance it is not."""
    gamma, reach, mu, least = 0.1, 5.0, 0.99, 1.0
    log_d = gamma * reach**2 * mu**2

    def log_factor(distance: float) -> float:
        return log_d - gamma / 4 * least**2 * distance**2

    assert log_factor(2 * math.sqrt(log_d / gamma) / least) == pytest.approx(0, abs=1e-12)
    assert log_factor(2 * math.sqrt(log_d) / least) > 1
