"""Priors on features: every formula against loops, automatic differentiation or an independent minimiser."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import opteq
from lazy import lazily
from opteq import regularizers
from opteq.gradients import Gradient
from opteq.operators import Dense
from opteq.regularizers import HSIC, L1, Decorrelation, Envelope, Incay, Regularizer, Ridge, hsic

optimize, stats = lazily("scipy.optimize"), lazily("scipy.stats")

ALL = [
    Ridge(),
    L1(),
    Incay(),
    Incay(eps=0.3),
    Decorrelation(),
    Decorrelation(eps=0.5),
    HSIC(),
    HSIC(bandwidth=2.5),
    Envelope(Ridge(), weight=0.7),
    Envelope(L1(), weight=0.4),
]
CONVEX = [R for R in ALL if R.convex]
SMOOTH = [R for R in ALL if R.smooth]
COUPLED = [R for R in ALL if R.couples_batch]
SEPARATE = [R for R in ALL if not R.couples_batch]
SHAPES = [(6, 4), (3, 4, 2, 3), (5, 1), (1, 3), (2, 3, 5)]
every = pytest.mark.parametrize("R", ALL, ids=repr)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Quartic(Regularizer):
    """A user's own prior: only a value."""

    name, convex, smooth, couples_batch = "quartic", True, True, False

    def __repr__(self) -> str:  # the same in every process, for the names of tests
        return "Quartic()"

    def value(self, z: Tensor) -> Tensor:
        return z.pow(4).flatten(1).sum(1) / 4


class BatchSum(Regularizer):
    """A user's own prior that couples the batch and has a prox: R = 1/2 |sum_b a_b z_b|^2 with a = 1, 2, 3, ..."""

    name, convex, smooth, couples_batch = "batch sum", True, True, True

    def value(self, z: Tensor) -> Tensor:
        return (self.sum(z).square().sum() / 2 / len(z)).expand(len(z))

    def prox(self, z: Tensor, weight: float) -> Tensor:
        a = torch.arange(1, len(z) + 1, dtype=z.dtype)
        return z - weight / (1 + weight * a @ a) * torch.outer(a, self.sum(z))

    def sum(self, z: Tensor) -> Tensor:
        return torch.arange(1, len(z) + 1, dtype=z.dtype) @ z


# --- values, against loops ------------------------------------------------------------------------------------


def naive(R: Regularizer, z: np.ndarray) -> np.ndarray:
    """The value of R by its definition, one number at a time."""
    B = len(z)
    if isinstance(R, Ridge):
        return np.array([sum(t * t for t in sample.flat) / 2 for sample in z])
    if isinstance(R, L1):
        return np.array([sum(abs(t) for t in sample.flat) for sample in z])
    if isinstance(R, Incay):
        return np.array([2 / (sum(t * t for t in sample.flat) + 2 * R.eps) for sample in z])
    features = [z[:, i] for i in range(z.shape[1])]
    total = 0.0
    if isinstance(R, Decorrelation):
        for a, b in itertools.permutations(features, 2):
            lengths = math.sqrt((a * a).sum() + R.eps) * math.sqrt((b * b).sum() + R.eps)
            total += 0.5 * ((a * b).sum() / lengths) ** 2
    elif isinstance(R, HSIC):
        H = np.eye(B) - np.ones((B, B)) / B

        def kernel(x: np.ndarray) -> np.ndarray:
            return np.array([[math.exp(-((p - q) ** 2).mean() / (2 * R.bandwidth**2)) for q in x] for p in x]).reshape(
                B, B
            )

        for a, b in itertools.combinations(features, 2):
            total += np.trace(kernel(a) @ H @ kernel(b) @ H) / (B - 1) ** 2 if B > 1 else 0.0
    return np.full(B, total / B)


@every_shape
@pytest.mark.parametrize(
    "R", [Ridge(), L1(), Incay(), Incay(0.3), Decorrelation(), Decorrelation(0.5), HSIC(), HSIC(2.5)], ids=repr
)
def test_value_is_the_definition(R: Regularizer, shape: tuple[int, ...]) -> None:
    z = draw(*shape)
    assert R.value(z).shape == (shape[0],)
    np.testing.assert_allclose(R.value(z).numpy(), naive(R, z.numpy()), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("R", SEPARATE, ids=repr)
def test_one_dimensional_features_are_one_value_per_sample(R: Regularizer) -> None:
    z = draw(5)
    torch.testing.assert_close(R.value(z), R.value(z.unsqueeze(1)))
    torch.testing.assert_close(R.gradient(z), R.gradient(z.unsqueeze(1)).squeeze(1))
    torch.testing.assert_close(R.curvature(z, z), R.curvature(z.unsqueeze(1), z.unsqueeze(1)).squeeze(1))


def test_golden_decorrelation() -> None:
    z = torch.tensor([[1.0, 2.0], [2.0, -1.0], [1.0, 1.0]], dtype=torch.float64).T  # rows are features there
    assert Decorrelation().value(z).sum().item() == pytest.approx(1, abs=1e-14)
    expected = torch.tensor([[0.24, -0.12], [0.12, 0.24], [0, 0]], dtype=torch.float64).T
    torch.testing.assert_close(Decorrelation().gradient(z), expected, rtol=0, atol=1e-14)


def test_golden_hsic() -> None:
    z = torch.tensor([[0.0, 1.0], [1.0, 0.0], [3.0, 2.0]], dtype=torch.float64)
    assert HSIC().value(z).sum().item() == pytest.approx(0.224343038090, abs=1e-12)


def test_hsic_of_images_uses_distances_between_whole_maps() -> None:
    """A feature that is constant over its pixels is a number."""
    z = draw(6, 3)
    maps = z[:, :, None, None].expand(6, 3, 2, 2)
    torch.testing.assert_close(HSIC().value(maps), HSIC().value(z))


def test_hsic_tells_dependent_images_from_independent_ones() -> None:
    """Of features of unit variance with 32 x 32 pixels; without their number in the kernel it was a constant."""
    z = draw(6, 2, 32, 32)
    alike = torch.stack([z[:, 0], z[:, 0] + 0.1 * z[:, 1]], dim=1)
    alike[:3] += 3  # two groups of samples, which both features see
    assert HSIC().value(alike).sum() > 1.2 * HSIC().value(z).sum()
    assert HSIC().gradient(alike).abs().max() > 1e-6


def test_hsic_ignores_a_shift_of_features_even_in_single_precision() -> None:
    R = HSIC()
    for shape in [(8, 3), (8, 3, 2, 2)]:
        z = draw(*shape)
        shifted = (z + 100).float()
        torch.testing.assert_close(R.value(shifted).double(), R.value(z), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(R.gradient(shifted).double(), R.gradient(z), rtol=1e-3, atol=1e-5)


# --- derivatives, against automatic differentiation of the value ------------------------------------------------


@every
@every_shape
def test_gradient(R: Regularizer, shape: tuple[int, ...]) -> None:
    z = draw(*shape).requires_grad_()
    (expected,) = torch.autograd.grad(R.value(z).sum(), z)
    actual = R.gradient(z.detach())
    assert actual.shape == z.shape
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@every
@every_shape
def test_curvature(R: Regularizer, shape: tuple[int, ...]) -> None:
    z, v = draw(*shape), draw(*shape, seed=1)
    hessian = torch.autograd.functional.hessian(lambda t: R.value(t).sum(), z)
    expected = (hessian.reshape(z.numel(), z.numel()) @ v.flatten()).reshape(shape)
    torch.testing.assert_close(R.curvature(z, v), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("R", SMOOTH, ids=repr)
def test_gradient_by_finite_differences(R: Regularizer) -> None:
    z, v, h = draw(5, 3), draw(5, 3, seed=1), 1e-5
    slope = (R.value(z + h * v).sum() - R.value(z - h * v).sum()) / (2 * h)
    assert (R.gradient(z) * v).sum().item() == pytest.approx(slope.item(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("R", [*ALL, Quartic()], ids=repr)
def test_derivatives_can_be_taken_where_autograd_is_off(R: Regularizer) -> None:
    z, v = draw(4, 3), draw(4, 3, seed=1)
    expected = R.gradient(z), R.curvature(z, v)
    with torch.no_grad():
        torch.testing.assert_close((R.gradient(z), R.curvature(z, v)), expected)
    with torch.inference_mode():
        inside = draw(4, 3), draw(4, 3, seed=1)
        torch.testing.assert_close((R.gradient(inside[0]), R.curvature(*inside)), expected)


@pytest.mark.parametrize("R", [*SMOOTH, Quartic()], ids=repr)
def test_derivatives_can_be_taken_inside_transformations(R: Regularizer) -> None:
    z, v = draw(4, 3), draw(4, 3, seed=1)
    torch.testing.assert_close(torch.func.vjp(R.gradient, z)[1](v)[0], R.curvature(z, v))
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vjp(lambda v: R.curvature(z, v), v)[1](v)[0], R.curvature(z, v))
    several = torch.stack([z, 2 * z])
    found = torch.func.vmap(R.gradient)(several)
    torch.testing.assert_close(found, torch.stack([R.gradient(one) for one in several]))


@pytest.mark.parametrize("R", [Envelope(L1(), 0.1), Quartic()], ids=repr)
def test_a_layer_with_a_prior_differentiated_by_autograd_can_be_transformed(R: Regularizer) -> None:
    torch.manual_seed(0)
    problem = opteq.OptEq(Dense(3, 4, bound=0.8), regularizer=R, gamma=0.2).double()
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-12))

    def loss(x: Tensor) -> Tensor:
        return layer(x).square().sum()

    x = draw(2, 4).requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(torch.func.grad(loss)(x.detach()), expected)
    one_by_one = torch.func.vmap(torch.func.grad(lambda one: loss(one[None])))(x.detach())
    torch.testing.assert_close(one_by_one, expected)


class Learned(nn.Module, Regularizer):
    """A prior with a parameter: ``1/2 sum a_i z_i^2``."""

    name, convex, smooth, couples_batch = "learned", True, True, False

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([0.3, 0.5, 0.7], dtype=torch.float64))

    def value(self, z: Tensor) -> Tensor:
        return (self.a * z.square()).sum(1) / 2


class LearnedShare(Learned):
    """The same prior with a prox, so that it has an envelope."""

    def prox(self, z: Tensor, weight: float) -> Tensor:
        return z / (1 + weight * self.a)


@pytest.mark.parametrize("gradient", [opteq.Implicit(tol=1e-12), opteq.Phantom(60), opteq.Unrolled(80)], ids=str)
def test_a_prior_inside_an_envelope_can_be_learned(gradient: Gradient) -> None:
    torch.manual_seed(0)
    R = LearnedShare()
    problem = opteq.OptEq(Dense(3, 4, bound=0.8), nn.Linear(4, 4), "tanh", regularizer=Envelope(R, 0.5)).double()
    assert any(parameter is R.a for parameter in problem.parameters())
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-13, max_steps=300), gradient, on_failure="ignore")
    x = torch.randn(2, 4, dtype=torch.float64)

    def loss() -> Tensor:
        return layer(x).square().sum()

    (found,) = torch.autograd.grad(loss(), R.a)
    for i in range(3):
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                R.a[i] += step
                values.append(loss())
                R.a[i] -= step
        assert found[i] == pytest.approx(float(values[0] - values[1]) / 2e-5, rel=1e-5, abs=1e-8)
    twin = copy.deepcopy(problem)
    assert twin.regularizer.regularizer is twin.regularizer_regularizer
    assert twin.state_dict().keys() == problem.state_dict().keys()
    twin.regularizer = Envelope(Ridge(), 0.5)
    assert not any("regularizer" in name for name in twin.state_dict())


def test_a_prior_that_a_solver_selects_by_belongs_to_the_layer() -> None:
    R = LearnedShare()
    layer = opteq.Equilibrium(
        opteq.OptEq(Dense(3, 4, bound=0.8), nn.Linear(4, 4), "tanh").double(),
        opteq.SAM(regularizer=R, gamma=0.1, eta=0.5, max_steps=6, tol=1e-9),
        opteq.Unrolled(6),
        on_failure="ignore",
    )
    assert "solver_regularizer.a" in dict(layer.named_parameters())
    layer(torch.randn(2, 4, dtype=torch.float64)).square().sum().backward()
    assert R.a.grad is not None
    assert R.a.grad.abs().max() > 0
    layer.solver = opteq.Anderson()
    assert "solver_regularizer.a" not in dict(layer.named_parameters())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("gradient", [opteq.Implicit(tol=1e-12), opteq.Phantom(60), opteq.Unrolled(80)], ids=str)
@pytest.mark.parametrize("deep", [False, True])
def test_a_prior_can_be_learned(deep: bool, gradient: Gradient, frozen: bool) -> None:
    """By what its gradient does to the features, though these are constants when a step is differentiated."""
    torch.manual_seed(0)
    W, R = Dense(3, 4, bound=0.8), Learned()
    prior = {"activation": "tanh", "regularizer": R, "gamma": 0.5}
    problem = opteq.DeepOptEq([(W, nn.Linear(4, 4))], **prior) if deep else opteq.OptEq(W, nn.Linear(4, 4), **prior)
    if frozen:
        problem.requires_grad_(False)
        R.requires_grad_(True)
    layer = opteq.Equilibrium(problem.double(), opteq.Picard(tol=1e-14, max_steps=300), gradient, on_failure="ignore")
    x = draw(2, 4)
    (found,) = torch.autograd.grad(layer(x).sin().sum(), R.a)
    with torch.no_grad():
        for index in range(3):
            values = []
            for move in (1e-6, -2e-6):
                R.a[index] += move
                values.append(layer(x).sin().sum())
            R.a[index] += 1e-6
            torch.testing.assert_close((values[0] - values[1]) / 2e-6, found[index], rtol=1e-6, atol=1e-8)
    R.requires_grad_(False)
    assert not R.gradient(x[:, :3]).requires_grad


@pytest.mark.parametrize("R", [*SMOOTH, Quartic()], ids=repr)
def test_gradient_and_curvature_are_themselves_differentiable(R: Regularizer) -> None:
    z, v, u = draw(4, 3), draw(4, 3, seed=1), draw(4, 3, seed=2)
    non_leaf = (1.0 * z.clone().requires_grad_()).requires_grad_()
    (through,) = torch.autograd.grad(R.gradient(non_leaf), non_leaf, v)
    torch.testing.assert_close(through, R.curvature(z, v))
    direction = v.clone().requires_grad_()
    (transposed,) = torch.autograd.grad(R.curvature(z, direction), direction, u)
    torch.testing.assert_close(transposed, R.curvature(z, u))  # a Hessian is symmetric


def test_third_derivatives_of_the_default_curvature() -> None:
    z, v = draw(4, 3).requires_grad_(), draw(4, 3, seed=1)
    (third,) = torch.autograd.grad(Quartic().curvature(z, v).sum(), z)
    torch.testing.assert_close(third, 6 * z.detach() * v)


def test_a_value_alone_makes_a_regularizer() -> None:
    R, z, v = Quartic(), draw(4, 3), draw(4, 3, seed=1)
    torch.testing.assert_close(R.gradient(z), z**3)
    torch.testing.assert_close(R.curvature(z, v), 3 * z**2 * v)
    assert R.gradient_lipschitz is None
    with pytest.raises(NotImplementedError, match="Quartic has no proximal operator"):
        R.prox(z, 1.0)


def test_a_constant_gradient_has_zero_curvature() -> None:
    class Linear(Quartic):
        def value(self, z: Tensor) -> Tensor:
            return z.sum(1)

        def gradient(self, z: Tensor) -> Tensor:
            return torch.ones_like(z)

    assert torch.equal(Linear().curvature(draw(2, 3), draw(2, 3)), torch.zeros(2, 3, dtype=torch.float64))


def test_answers_are_not_views_of_the_arguments() -> None:
    z, v = draw(4, 3), draw(4, 3, seed=1)
    for answer in (Ridge().gradient(z), Ridge().curvature(z, v), L1().prox(z, 0.0)):
        answer.zero_()
    assert torch.equal(z, draw(4, 3))
    assert torch.equal(v, draw(4, 3, seed=1))


# --- proximal operators, against minimisers -----------------------------------------------------------------------


@pytest.mark.parametrize("R", CONVEX, ids=repr)
@pytest.mark.parametrize("weight", [0.0, 0.3, 2.0])
def test_prox_of_numbers_is_the_minimiser_on_a_grid(R: Regularizer, weight: float) -> None:
    for number in (-1.7, -0.2, 0.0, 0.9, 3.1):
        z = torch.tensor([[number]], dtype=torch.float64)
        found = optimize.minimize_scalar(
            lambda p, number=number: (
                weight * R.value(torch.tensor([[p]], dtype=torch.float64)).item() + (p - number) ** 2 / 2
            ),
            bounds=(-4, 4),
            options={"xatol": 1e-9},
            method="bounded",
        )
        assert R.prox(z, weight).item() == pytest.approx(found.x, abs=2e-6)


@pytest.mark.parametrize("R", CONVEX, ids=repr)
def test_prox_satisfies_its_optimality_condition(R: Regularizer) -> None:
    z, w = draw(5, 3, 2), 0.6
    p = R.prox(z, w)
    force = (z - p) / w  # must be a subgradient of R at p
    if isinstance(R, L1):
        assert bool((force.abs() <= 1 + 1e-12).all())
        nonzero = p != 0
        assert 0 < int(nonzero.sum()) < p.numel()  # the test sees both branches
        torch.testing.assert_close(force[nonzero], p[nonzero].sign())
    else:
        torch.testing.assert_close(force, R.gradient(p), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("R", [Incay(), Decorrelation(), HSIC()], ids=repr)
def test_no_prox_says_so(R: Regularizer) -> None:
    with pytest.raises(NotImplementedError, match=f"{type(R).__name__} has no proximal operator.*use its gradient"):
        R.prox(draw(3, 2), 1.0)


def test_incay_prox_would_not_be_single_valued() -> None:
    """At z = 0 and a large weight two opposite points are equally good, and both beat zero."""
    R, w = Incay(), 9.0
    p = torch.tensor([[math.sqrt(2 * math.sqrt(w) - 2)]], dtype=torch.float64)
    cost = [(w * R.value(q) + q.square().sum() / 2).item() for q in (p, -p, 0 * p)]
    assert cost[0] == cost[1] < cost[2]
    torch.testing.assert_close(w * R.gradient(p), -p)  # stationary


# --- the Moreau envelope --------------------------------------------------------------------------------------------


def test_envelope_of_ridge_is_a_smaller_weight() -> None:
    z, w = draw(4, 3), 0.7
    torch.testing.assert_close(Envelope(Ridge(), w).value(z), w / (1 + w) * Ridge().value(z))


def test_envelope_of_l1_is_the_huber_function() -> None:
    z, w = draw(4, 3), 0.7
    huber = torch.nn.functional.huber_loss(z, torch.zeros_like(z), reduction="none", delta=w).sum(1)
    torch.testing.assert_close(Envelope(L1(), w).value(z), huber)


@pytest.mark.parametrize("R", [Ridge(), L1()], ids=repr)
def test_a_proximal_layer_minimises_the_envelope_and_not_the_regularizer(R: Regularizer) -> None:
    A, b, w = draw(3, 3, seed=4), draw(3, seed=5), 0.5
    Q = A @ A.T / 3 + 0.1 * torch.eye(3, dtype=torch.float64)  # phi(z) = 1/2 z'Qz - b'z
    T = torch.linalg.inv(torch.eye(3, dtype=torch.float64) + Q)  # prox_phi(z) = T (z + b)
    z = torch.zeros(1, 3, dtype=torch.float64)
    for _ in range(3000):
        z = (R.prox(z, w) + b) @ T
    slope = z @ Q - b
    torch.testing.assert_close(slope + Envelope(R, w).gradient(z), torch.zeros_like(z), atol=1e-10, rtol=0)

    def total(p: np.ndarray, penalty: Regularizer, weight: float) -> float:
        t = torch.from_numpy(p)[None]
        return (t @ Q @ t.T / 2 - t @ b + weight * penalty.value(t)).item()

    def argmin(penalty: Regularizer, weight: float) -> np.ndarray:
        options = {"xatol": 1e-9, "fatol": 1e-14, "maxiter": 4000}
        return optimize.minimize(total, np.ones(3), (penalty, weight), "Nelder-Mead", options=options).x

    assert np.abs(argmin(Envelope(R, w), 1.0) - z.numpy()[0]).max() < 1e-5
    assert np.abs(argmin(R, w) - z.numpy()[0]).max() > 0.05


def test_envelope_of_a_regularizer_that_couples_the_batch() -> None:
    M, z = Envelope(BatchSum(), 0.5), draw(4, 3)
    assert M.couples_batch
    assert not Envelope(L1(), 0.5).couples_batch
    value = M.value(z)
    assert torch.equal(value, value[0].expand(4))
    w, square = 0.5, 1 + 4 + 9 + 16
    torch.testing.assert_close(value.sum(), w / (1 + w * square) * BatchSum().value(z).sum())
    leaf = z.clone().requires_grad_()
    torch.testing.assert_close(M.gradient(z), *torch.autograd.grad(M.value(leaf).sum(), leaf))


# --- corrections of the printed operators -------------------------------------------------------------------------


def test_incay_expands_where_the_printed_operator_shrinks() -> None:
    z, w, R = draw(6, 4), 0.1, Incay(eps=0.5)
    scale = 4 * w / (z.square().sum(1, keepdim=True) + 2 * R.eps).square()
    step = z - w * R.gradient(z)
    torch.testing.assert_close(step, (1 + scale) * z)
    printed = (1 - scale) * z
    assert bool((step.norm(dim=1) > z.norm(dim=1)).all())
    assert bool((printed.norm(dim=1) < z.norm(dim=1)).all())
    assert R.value(step).sum() < R.value(z).sum() < R.value(printed).sum()


def test_incay_has_the_second_form_inside() -> None:
    z, eps = draw(6, 4), 0.3
    torch.testing.assert_close(Incay(eps / 2).value(z) / 2, 1 / (z.square().sum(1) + eps))


def test_decorrelation_gradient_by_projections_and_the_printed_operator() -> None:
    z = draw(6, 4)
    rows = list(z.T)

    def project(onto: Tensor, x: Tensor) -> Tensor:
        return onto * (onto @ x) / (onto @ onto)

    right, printed = [], []
    for i, row in enumerate(rows):
        pull = sum(project(other, row) / (row @ row) for j, other in enumerate(rows) if j != i)
        right.append(2 * (pull - project(row, pull)))
        printed.append(pull + project(row, pull))
    actual = Decorrelation().gradient(z)
    torch.testing.assert_close(actual, torch.stack(right, 1))
    difference = (actual - torch.stack(printed, 1)).norm() / actual.norm()
    assert difference > 0.5
    step = 1e-3
    assert Decorrelation().value(z - step * actual).sum() < Decorrelation().value(z).sum()


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 3), st.integers(0, 10_000), st.floats(-6, 6))
def test_decorrelation_gradient_is_at_right_angles_to_each_feature(
    batch: int, features: int, pixels: int, seed: int, exponent: float
) -> None:
    shape = (batch, features) + (2,) * pixels
    z = draw(*shape, seed=seed, scale=10.0**exponent)
    products = (z * Decorrelation().gradient(z)).transpose(0, 1).flatten(1).sum(1)
    assert products.abs().max() < 1e-12
    factors = 1 + torch.arange(features, dtype=z.dtype).reshape((1, features) + (1,) * pixels)
    torch.testing.assert_close(Decorrelation().value(z * factors), Decorrelation().value(z))


# --- edges: dead features, tiny batches ----------------------------------------------------------------------------


@pytest.mark.parametrize("R", [Decorrelation(), Decorrelation(eps=0.1)], ids=repr)
@pytest.mark.parametrize("shape", [(5, 4), (3, 4, 2, 2)], ids=str)
def test_dead_features_add_nothing(R: Decorrelation, shape: tuple[int, ...]) -> None:
    z, v = draw(*shape), draw(*shape, seed=1)
    z[:, 1] = 0
    alive = [0, 2, 3]
    torch.testing.assert_close(R.value(z), R.value(z[:, alive]))
    torch.testing.assert_close(R.gradient(z)[:, alive], R.gradient(z[:, alive]))
    assert torch.equal(R.gradient(z)[:, 1], torch.zeros_like(z[:, 1]))
    leaf = z.clone().requires_grad_()
    torch.testing.assert_close(*torch.autograd.grad(R.value(leaf).sum(), leaf), R.gradient(z))
    assert bool(R.curvature(z, v).isfinite().all())
    if R.eps == 0:
        torch.testing.assert_close(R.curvature(z, v)[:, alive], R.curvature(z[:, alive], v[:, alive]))
        assert torch.equal(R.curvature(z, v)[:, 1], torch.zeros_like(z[:, 1]))
    assert R.value(torch.zeros_like(z)).sum() == 0
    assert torch.equal(R.gradient(torch.zeros_like(z)), torch.zeros_like(z))


def test_decorrelation_eps_bounds_the_gradient_of_nearly_dead_features() -> None:
    z = draw(5, 4)
    z[:, 1] *= 1e-6
    assert Decorrelation().gradient(z)[:, 1].norm() > 1e4
    assert Decorrelation(eps=0.1).gradient(z)[:, 1].norm() < 1e-3


@every
def test_a_dead_feature_gives_no_nan(R: Regularizer) -> None:
    for z in (torch.zeros(4, 3), torch.zeros(4, 3, 2, 2)):
        for answer in (R.value(z), R.gradient(z), R.curvature(z, torch.ones_like(z))):
            assert bool(answer.isfinite().all())


def test_a_batch_of_one() -> None:
    z = draw(1, 4)
    assert Decorrelation().value(z).item() == pytest.approx(6)  # all cosines are 1 or -1: m (m - 1) / 2
    assert Decorrelation().gradient(z).abs().max() < 1e-12
    R = HSIC()
    assert R.value(z).item() == 0
    assert torch.equal(R.gradient(z), torch.zeros_like(z))
    assert torch.equal(R.curvature(z, z), torch.zeros_like(z))


@every
@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 2, 2), (4, 0)], ids=str)
def test_empty_features(R: Regularizer, shape: tuple[int, ...]) -> None:
    z = torch.zeros(shape)
    assert R.value(z).shape == (shape[0],)
    assert bool(R.value(z).isfinite().all())
    assert R.gradient(z).shape == R.curvature(z, z).shape == shape
    if R.convex:
        assert R.prox(z, 1.0).shape == shape


@pytest.mark.parametrize("R", COUPLED, ids=repr)
def test_batch_values_are_shared_equally(R: Regularizer) -> None:
    value = R.value(draw(5, 3))
    assert torch.equal(value, value[0].expand(5))
    assert value[0] > 0


@pytest.mark.parametrize("R", SEPARATE, ids=repr)
def test_a_batch_is_its_samples(R: Regularizer) -> None:
    z, v = draw(5, 3, 2), draw(5, 3, 2, seed=1)
    ones = [slice(i, i + 1) for i in range(5)]
    torch.testing.assert_close(R.value(z), torch.cat([R.value(z[i]) for i in ones]))
    torch.testing.assert_close(R.gradient(z), torch.cat([R.gradient(z[i]) for i in ones]))
    torch.testing.assert_close(R.curvature(z, v), torch.cat([R.curvature(z[i], v[i]) for i in ones]))


@pytest.mark.parametrize("R", [Decorrelation(), HSIC()], ids=repr)
def test_order_of_features_and_samples_does_not_matter(R: Regularizer) -> None:
    z = draw(5, 4, 2)
    torch.testing.assert_close(R.value(z.flip(0)), R.value(z))
    torch.testing.assert_close(R.value(z.flip(1)), R.value(z))
    torch.testing.assert_close(R.gradient(z.flip(0, 1)), R.gradient(z).flip(0, 1))


# --- HSIC: chunks -----------------------------------------------------------------------------------------------------


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    R, z, v = HSIC(), draw(6, 5, 2), draw(6, 5, 2, seed=1)
    whole = R.value(z), R.gradient(z), R.curvature(z, v)
    for chunk in (1, 80, 200):
        monkeypatch.setattr(hsic, "_CHUNK", chunk)
        torch.testing.assert_close((R.value(z), R.gradient(z), R.curvature(z, v)), whole)


def test_exact_hsic_keeps_few_kernel_matrices_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    kernel = HSIC._kernel

    def watched(self: object, x: Tensor) -> Tensor:
        answer = kernel(self, x)  # type: ignore[arg-type]
        sizes.append(answer.numel())
        return answer

    monkeypatch.setattr(HSIC, "_kernel", watched)
    monkeypatch.setattr(hsic, "_CHUNK", 3 * 6 * 6)
    HSIC().gradient(draw(6, 20))
    assert max(sizes) == 3 * 6 * 6
    assert sum(sizes) == 2 * 20 * 6 * 6


# --- flags and constants ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("R", CONVEX, ids=repr)
def test_convex_means_below_the_chord(R: Regularizer) -> None:
    for seed in range(50):
        a, b = draw(4, 3, seed=seed, scale=2.0), draw(4, 3, seed=100 + seed, scale=0.5)
        for t in (0.2, 0.5, 0.9):
            chord = t * R.value(a).sum() + (1 - t) * R.value(b).sum()
            assert R.value(t * a + (1 - t) * b).sum() <= chord + 1e-12


@pytest.mark.parametrize("R", [R for R in ALL if not R.convex], ids=repr)
def test_not_convex_has_a_counterexample(R: Regularizer) -> None:
    pairs = [(draw(4, 3, seed=s), draw(4, 3, seed=100 + s)) for s in range(50)]
    gap = max((R.value((a + b) / 2).sum() - (R.value(a).sum() + R.value(b).sum()) / 2).item() for a, b in pairs)
    assert gap > 1e-3


@every
def test_smooth_means_a_gradient_without_jumps(R: Regularizer) -> None:
    z = draw(4, 3)
    z[0, 0] = 0.0  # where the absolute value has its kink
    jump = [(R.gradient(z + h) - R.gradient(z - h)).norm().item() for h in (1e-3, 1e-6)]
    if R.smooth:
        assert jump[1] < 2e-3 * jump[0] + 1e-12
    else:
        assert jump[1] >= 1


@every
def test_couples_batch_means_that_a_sample_feels_its_mates(R: Regularizer) -> None:
    z = draw(4, 3)
    other = torch.cat([z[:1], draw(3, 3, seed=1)])
    same = torch.allclose(R.gradient(z)[0], R.gradient(other)[0], rtol=1e-12, atol=0)
    assert same is not R.couples_batch


KNOWN_LIPSCHITZ = [R for R in ALL if R.gradient_lipschitz is not None]


@pytest.mark.parametrize("R", KNOWN_LIPSCHITZ, ids=repr)
def test_gradient_lipschitz_is_never_exceeded(R: Regularizer) -> None:
    bound = R.gradient_lipschitz
    assert bound is not None
    worst = 0.0
    for seed in range(200):
        a = draw(1, 3, seed=seed, scale=10 ** (seed % 5 - 3.0))
        b = a + draw(1, 3, seed=1000 + seed, scale=10 ** (seed % 7 - 4.0))
        worst = max(worst, ((R.gradient(a) - R.gradient(b)).norm() / (a - b).norm()).item())
    assert worst <= bound * (1 + 1e-9)
    if not isinstance(R, Envelope):
        assert worst > 0.9 * bound  # and it is the constant, not only a bound


def test_which_lipschitz_constants_are_known() -> None:
    assert Ridge().gradient_lipschitz == 1
    assert Incay(eps=0.5).gradient_lipschitz == 4
    assert Envelope(L1(), 3.0).gradient_lipschitz == 1
    assert [R.gradient_lipschitz for R in (L1(), Decorrelation(), HSIC())] == [None] * 3


def test_incay_eigenvalues() -> None:
    """Those of the derivation of its Lipschitz constant: across z, along z, and the largest positive one."""
    R, z = Incay(eps=0.4), draw(1, 3)
    square = z.square().sum().item()
    across = torch.linalg.cross(z, draw(1, 3, seed=1))
    torch.testing.assert_close(R.curvature(z, across), -4 / (square + 0.8) ** 2 * across)
    torch.testing.assert_close(R.curvature(z, z), (12 * square - 3.2) / (square + 0.8) ** 3 * z)
    peak = z * math.sqrt(0.8 / square)
    torch.testing.assert_close(R.curvature(peak, peak), peak / (4 * 0.4**2))


# --- precision, devices, Python -----------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 2, 2)], ids=str)
def test_low_precision(R: Regularizer, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    z, v = draw(*shape, dtype=dtype), draw(*shape, seed=1, dtype=dtype)
    assert R.value(z).dtype == torch.float32
    torch.testing.assert_close(R.value(z).double(), R.value(z.double()), rtol=1e-5, atol=1e-6)
    # Computed in float32, so nothing is lost but the last rounding to dtype.
    tolerance = {"rtol": max(torch.finfo(dtype).eps, 1e-4), "atol": 1e-5}
    assert R.gradient(z).dtype == R.curvature(z, v).dtype == dtype
    torch.testing.assert_close(R.gradient(z).double(), R.gradient(z.double()), **tolerance)
    torch.testing.assert_close(R.curvature(z, v).double(), R.curvature(z.double(), v.double()), **tolerance)
    if R.convex:
        assert R.prox(z, 0.3).dtype == dtype
        torch.testing.assert_close(R.prox(z, 0.3).double(), R.prox(z.double(), 0.3), **tolerance)


@every
def test_float64_stays_float64(R: Regularizer) -> None:
    assert R.value(draw(3, 2)).dtype == R.gradient(draw(3, 2)).dtype == torch.float64


def test_sums_do_not_overflow_in_half_precision() -> None:
    z = torch.full((1, 100), 100.0, dtype=torch.float16)  # |z|^2 = 1e6 > 65504
    assert Ridge().value(z).item() == 5e5
    assert Incay().value(z).item() == pytest.approx(2e-6, rel=1e-4)


@every
def test_autocast_takes_no_digits(R: Regularizer) -> None:
    z, v = draw(6, 4, 2, dtype=torch.float32), draw(6, 4, 2, seed=1, dtype=torch.float32)
    expected = R.value(z), R.gradient(z), R.curvature(z, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = R.value(z), R.gradient(z), R.curvature(z, v)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("R", [Incay(), Decorrelation(), HSIC()], ids=repr)
def test_compiles_into_one_graph(R: Regularizer) -> None:
    def step(z: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return R.value(z), R.gradient(z), R.curvature(z, v)

    z, v = draw(6, 4), draw(6, 4, seed=1)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(z, v), step(z, v))


@every
def test_functional_transforms_agree(R: Regularizer) -> None:
    z = draw(5, 3)
    torch.testing.assert_close(torch.func.grad(lambda t: R.value(t).sum())(z), R.gradient(z))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every
def test_gpu_agrees_without_waiting_for_the_host(R: Regularizer) -> None:
    z, v = draw(6, 4, 2), draw(6, 4, 2, seed=1)
    on_gpu = z.cuda(), v.cuda()
    R.curvature(*on_gpu)  # libraries may wait when they are first loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = R.value(on_gpu[0]), R.gradient(on_gpu[0]), R.curvature(*on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = R.value(z), R.gradient(z), R.curvature(z, v)
    torch.testing.assert_close(tuple(t.cpu() for t in actual), expected, rtol=1e-9, atol=1e-11)


@every
def test_is_plain_data(R: Regularizer) -> None:
    assert pickle.loads(pickle.dumps(R)) == R == copy.deepcopy(R)
    assert hash(R) == hash(copy.deepcopy(R))
    assert pickle.loads(pickle.dumps(R)).couples_batch == R.couples_batch
    with pytest.raises(AttributeError):
        R.eps = 2.0  # type: ignore[attr-defined]


# --- names and errors ------------------------------------------------------------------------------------------------


def test_get() -> None:
    kinds = {"ridge": Ridge, "l1": L1, "incay": Incay, "decorrelation": Decorrelation, "hsic": HSIC}
    for name, kind in kinds.items():
        found = regularizers.get(name)
        assert type(found) is kind
        assert found.name == name
    mine = Incay(eps=0.2)
    assert regularizers.get(mine) is mine


def test_get_errors() -> None:
    with pytest.raises(ValueError, match=r"unknown regularizer 'rigde'; did you mean 'ridge'\?"):
        regularizers.get("rigde")
    with pytest.raises(TypeError, match=r"a regularizer is a name or an instance, .* got <class .*Ridge'>"):
        regularizers.get(Ridge)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Incay(eps=0.0), ValueError, "Incay.eps should be a positive finite number; got 0.0"),
        (lambda: Incay(eps=math.inf), ValueError, "Incay.eps should be a positive finite number; got inf"),
        (lambda: Incay(eps="1"), TypeError, "Incay.eps should be a positive number; got '1'"),
        (lambda: Incay(eps=True), TypeError, "Incay.eps should be a positive number; got True"),
        (lambda: Decorrelation(eps=-1), ValueError, "Decorrelation.eps should be at least 0 and finite; got -1"),
        (lambda: HSIC(bandwidth=math.nan), ValueError, "HSIC.bandwidth should be a positive finite number; got nan"),
        (lambda: Envelope("l1", 1.0), TypeError, "Envelope: regularizer should be a Regularizer, such as L1"),
        (lambda: Envelope(HSIC(), 1.0), ValueError, r"Envelope: regularizer should be convex, .*got HSIC\("),
        (lambda: Envelope(Quartic(), 1.0), ValueError, "Envelope: regularizer should have a prox; .*Quartic"),
        (lambda: Envelope(L1(), 0.0), ValueError, "Envelope.weight should be a positive finite number; got 0.0"),
        (lambda: Ridge().prox(draw(2, 2), -1.0), ValueError, "Ridge.weight should be at least 0"),
        (lambda: L1().prox(draw(2, 2), -1.0), ValueError, "L1.weight should be at least 0"),
        (lambda: L1().prox(draw(2, 2), torch.ones(1)), TypeError, "L1.weight should be a number of at least 0"),
        (lambda: Envelope(L1(), 1.0).prox(draw(2, 2), math.inf), ValueError, "Envelope.weight should be at least 0"),
        (lambda: HSIC(kernel="laplace"), TypeError, "HSIC has no option 'kernel'"),
    ],
)
def test_bad_options(make: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()  # type: ignore[operator]


@every
def test_bad_features(R: Regularizer) -> None:
    with pytest.raises(TypeError, match=r"features should be real floating-point numbers; got torch\.int64"):
        R.value(torch.ones(3, 2, dtype=torch.int64))
    dims, wanted = (1, r"a batch and a feature dimension, \(B, m, \.\.\.\)") if R.couples_batch else (0, "a batch dim")
    with pytest.raises(ValueError, match=f"features need {wanted}.*; got shape"):
        R.gradient(torch.ones((3,) * dims))
    with pytest.raises(ValueError, match=r"v should have the shape of z, \(3, 2\); got \(2,\)"):
        R.curvature(torch.ones(3, 2), torch.ones(2))


def test_numbers_of_numpy_are_numbers() -> None:
    assert Incay(eps=np.float32(0.5)).gradient_lipschitz == 4


class Unseen(Regularizer):
    """Learned, but no module: an optimiser would not see its weight."""

    name, convex, smooth, couples_batch = "unseen", True, True, False
    gradient_lipschitz = None

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(()))

    def value(self, z: Tensor) -> Tensor:
        return self.weight * z.square().sum(1)

    def prox(self, z: Tensor, weight: float) -> Tensor:
        return z / (1 + 2 * weight * self.weight)


@pytest.mark.parametrize(
    "build",
    [
        lambda W, prior: opteq.OptEq(W, regularizer=prior),
        lambda W, prior: opteq.OptEq(W, regularizer=opteq.regularizers.Envelope(prior, 0.1)),
        lambda W, prior: opteq.DeepOptEq([(W, nn.Linear(4, 4))], regularizer=prior),
        lambda W, prior: opteq.Splitting(opteq.OptEq(W), prior, 0.1),
        lambda W, prior: opteq.Equilibrium(opteq.OptEq(W), opteq.SAM(regularizer=prior, gamma=0.1, eta=0.5)),
    ],
    ids=["opteq", "envelope", "deep", "splitting", "sam"],
)
def test_a_parameter_of_a_prior_that_is_no_module_is_refused(build: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match=r"holds weight, .* derive Unseen from torch.nn.Module as well: class Unseen"):
        build(Dense(4, 4, bound=0.9), Unseen())
