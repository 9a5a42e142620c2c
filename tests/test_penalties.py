"""Penalties and activations, against autograd, quadrature, numerical conjugates and scipy's special functions."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import opteq
from lazy import lazily
from opteq import penalties
from opteq.operators import Dense
from opteq.penalties import (
    ELU,
    ElementwisePenalty,
    FromActivation,
    HardTanh,
    Identity,
    LeakyReLU,
    LinearActivation,
    Penalty,
    ReLU,
    Sigmoid,
    Softplus,
    Softsign,
    SoftThreshold,
    Tanh,
)
from opteq.penalties.scaled import ScaledPenalty
from opteq.penalties.smooth import dilogarithm
from opteq.regularizers import Ridge
from opteq.solvers import SAM, Solver

integrate, optimize, special = (lazily(f"scipy.{part}") for part in ("integrate", "optimize", "special"))

ASINH = FromActivation(
    torch.asinh,
    lipschitz=1.0,
    name="asinh",
    antiderivative=lambda t: t * torch.asinh(t) - torch.hypot(t, torch.ones_like(t)) + 1,
    value=lambda y: y.cosh() - y.square() / 2,
)

ALL: list[ElementwisePenalty] = [
    Identity(),
    ReLU(),
    LeakyReLU(),
    LeakyReLU(slope=0.3),
    LeakyReLU(slope=1),
    Tanh(),
    Sigmoid(),
    Softplus(),
    ELU(),
    ELU(alpha=0.8),
    ELU(alpha=2.0),
    SoftThreshold(),
    SoftThreshold(threshold=1.5),
    SoftThreshold(threshold=0),
    HardTanh(),
    Softsign(),
    ASINH,
]

# Each: the domain of f, and where sigma has a kink.
DOMAIN: dict[str, Callable[[ElementwisePenalty], tuple[float, float]]] = {
    "relu": lambda _: (0.0, math.inf),
    "softplus": lambda _: (0.0, math.inf),
    "sigmoid": lambda _: (0.0, 1.0),
    "tanh": lambda _: (-1.0, 1.0),
    "hardtanh": lambda _: (-1.0, 1.0),
    "softsign": lambda _: (-1.0, 1.0),
    "elu": lambda p: (-p.alpha, math.inf),  # type: ignore[attr-defined]
}


def domain(penalty: ElementwisePenalty) -> tuple[float, float]:
    return DOMAIN.get(penalty.name, lambda _: (-math.inf, math.inf))(penalty)


def kinks(penalty: ElementwisePenalty) -> list[float]:
    if isinstance(penalty, SoftThreshold):
        return [-penalty.threshold, penalty.threshold]
    return [-1.0, 1.0] if penalty.name == "hardtanh" else [0.0]


every = pytest.mark.parametrize("penalty", ALL, ids=repr)


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def grad(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    at = at.detach().requires_grad_()
    (result,) = torch.autograd.grad(function(at).sum(), at)
    return result


POINTS = torch.cat(
    [torch.linspace(-6, 6, 97, dtype=torch.float64), float64(-1e3, -60.0, -25.0, -0.1, 0.1, 25.0, 60.0, 1e3)]
)


# ---------------------------------------------------------------- the pair: sigma is the prox of f


@every
def test_prox_minimises_the_penalty_plus_the_distance(penalty: ElementwisePenalty) -> None:
    low, high = (max(-9.0, domain(penalty)[0]), min(9.0, domain(penalty)[1]))
    grid = torch.linspace(low, high, 20001, dtype=torch.float64)
    t = torch.linspace(-4, 4, 33, dtype=torch.float64)[:, None]

    def objective(y: Tensor) -> Tensor:
        return penalty.value(y) + (y - t).square() / 2

    best, where = objective(grid).min(dim=1)
    chosen = objective(penalty.prox(t))[:, 0]
    assert (chosen <= best + 1e-12).all()
    assert (chosen >= best - 1e-5).all()  # no better than a fine grid can be: f is not too small at the prox
    assert (grid[where] - penalty.prox(t)[:, 0]).abs().max() < 0.02


@every
def test_gradient_of_value_is_inverse_activation_minus_identity(penalty: ElementwisePenalty) -> None:
    t = POINTS[(POINTS.abs() < 30) & (penalty.derivative(POINTS) > 1e-4)]
    y = penalty.prox(t)
    inside = (y > domain(penalty)[0]) & (y < domain(penalty)[1])
    assert inside.sum() > 15
    torch.testing.assert_close(grad(penalty.value, y)[inside], (t - y)[inside], rtol=1e-9, atol=1e-9)


@every
def test_conjugate_of_the_antiderivative(penalty: ElementwisePenalty) -> None:
    # sup over t of y t - sigma~(t) equals f(y) + y^2/2 - k
    for y in penalty.prox(torch.linspace(-3, 3, 7, dtype=torch.float64)).unique().tolist():
        found = optimize.minimize_scalar(
            lambda t, y=y: float(penalty.antiderivative(float64(t))) - y * t,
            bounds=(-50, 50),
            method="bounded",
            options={"xatol": 1e-8},
        )
        expected = float(penalty.value(float64(y))) + y * y / 2 - penalty.offset
        assert -found.fun == pytest.approx(expected, abs=1e-9)


@every
def test_offset(penalty: ElementwisePenalty) -> None:
    at_zero = penalty.prox(float64(0.0))
    assert penalty.offset == pytest.approx(float(penalty.value(at_zero) + at_zero.square() / 2), abs=1e-14)


def test_golden_values() -> None:
    def value(penalty: ElementwisePenalty, y: float) -> float:
        return float(penalty.value(float64(y)))

    assert value(LeakyReLU(slope=0.1), -2.0) == pytest.approx(18, abs=1e-12)
    assert value(Tanh(), 0.5) == pytest.approx(0.005812035941, abs=1e-12)
    assert value(Softplus(), 1.0) == pytest.approx(0.408754287349, abs=1e-12)
    assert value(ELU(alpha=0.7), -0.3) == pytest.approx(0.031153684826, abs=1e-12)


def test_a_threshold_of_0_is_the_identity() -> None:
    """Its slope at 0 was 0, and 0 was a kink."""
    t = float64(-math.inf, -1.0, 0.0, 2.0, math.inf)
    none, identity = SoftThreshold(threshold=0), Identity()
    scaled = ScaledPenalty(none, torch.full((1,), 0.3))
    for name in ("prox", "derivative", "value", "distance_to_kink"):
        assert torch.equal(getattr(none, name)(t), getattr(identity, name)(t))
    for name in ("prox", "derivative", "distance_to_kink"):
        assert torch.equal(getattr(scaled, name)(t[None])[0], getattr(identity, name)(t))
    assert torch.equal(grad(none.prox, t), torch.ones(5, dtype=torch.float64))


# ---------------------------------------------------------------- derivative and antiderivative


@every
def test_derivative_is_autograd_of_prox_even_at_kinks(penalty: ElementwisePenalty) -> None:
    t = torch.cat([POINTS, float64(*kinks(penalty))])
    torch.testing.assert_close(penalty.derivative(t), grad(penalty.prox, t), rtol=1e-10, atol=1e-14)


@every
def test_derivative_against_differences(penalty: ElementwisePenalty) -> None:
    t = torch.linspace(-5, 5, 101, dtype=torch.float64) + 0.0123  # misses every kink by more than the step
    step = 1e-5
    slope = (penalty.prox(t + step) - penalty.prox(t - step)) / (2 * step)
    torch.testing.assert_close(penalty.derivative(t), slope, rtol=1e-8, atol=1e-8)


@every
def test_antiderivative_has_prox_as_gradient(penalty: ElementwisePenalty) -> None:
    t = torch.cat([POINTS, float64(*kinks(penalty))])
    torch.testing.assert_close(grad(penalty.antiderivative, t), penalty.prox(t), rtol=1e-12, atol=1e-14)


@every
def test_antiderivative_against_quadrature(penalty: ElementwisePenalty) -> None:
    for t in (-30.0, -3.0, -0.4, 0.0, 1e-4, 0.7, 5.0, 30.0):
        breaks = [k for k in kinks(penalty) if min(0, t) < k < max(0, t)]
        expected, _ = integrate.quad(
            lambda s: float(penalty.prox(float64(s))),
            0,
            t,
            points=breaks or None,
            epsabs=1e-12,
            epsrel=1e-12,
            limit=200,
        )
        assert float(penalty.antiderivative(float64(t))) == pytest.approx(expected, rel=1e-11, abs=1e-12)


@every
def test_second_derivative_of_the_antiderivative(penalty: ElementwisePenalty) -> None:
    t = torch.cat([POINTS, float64(0.0)]).requires_grad_()
    (first,) = torch.autograd.grad(penalty.antiderivative(t).sum(), t, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), t)
    # Softplus: through the dilogarithm, whose rounding error is absolute.
    torch.testing.assert_close(second, penalty.derivative(t).detach(), rtol=1e-9, atol=1e-12)


@every
def test_slopes_lie_between_zero_and_the_lipschitz_constant_which_is_reached(penalty: ElementwisePenalty) -> None:
    t = torch.cat([POINTS, torch.linspace(-1, 1, 40001, dtype=torch.float64)])
    slope = penalty.derivative(t)
    assert slope.min() >= 0
    assert slope.max() <= penalty.lipschitz
    assert slope.max() > penalty.lipschitz - 1e-3


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@every
@settings(deadline=None, max_examples=60, derandomize=True)
@given(a=FINITE, b=FINITE)
def test_prox_is_monotone_and_lipschitz(penalty: ElementwisePenalty, a: float, b: float) -> None:
    low, high = sorted((a, b))
    at_low, at_high = penalty.prox(float64(low, high)).tolist()
    assert math.isfinite(at_low)
    assert math.isfinite(at_high)
    rounding = 8 * torch.finfo(torch.float64).eps * max(abs(at_low), abs(at_high))
    assert at_high >= at_low - rounding
    # Halved, for high - low can overflow.
    assert at_high / 2 - at_low / 2 <= penalty.lipschitz * (high / 2 - low / 2) * (1 + 1e-15) + rounding


@every
@settings(deadline=None, max_examples=40, derandomize=True)
@given(t=st.floats(min_value=-(2.0**126), max_value=2.0**126, width=32))  # twice of it is finite
def test_gradients_are_finite_for_any_float32(penalty: ElementwisePenalty, t: float) -> None:
    point = torch.tensor([t, -t, 0.0])
    state = penalty.prox(point)
    assert grad(penalty.prox, point).isfinite().all()
    assert grad(penalty.antiderivative, point).isfinite().all()
    if penalty is not ASINH:  # whose f, a cosh, overflows by nature
        assert penalty.value(state).isfinite().all() or state.abs().max() > 1e18
        assert grad(penalty.value, state).isfinite().all() or state.abs().max() > 1e18
        assert grad(penalty.value, point).isfinite().all() or point.abs().max() > 1e18


# ---------------------------------------------------------------- domain


@every
def test_infinite_outside_the_domain_and_flat_there(penalty: ElementwisePenalty) -> None:
    low, high = domain(penalty)
    outside = float64(
        *(
            edge + side * gap
            for edge, side in ((low, -1), (high, 1))
            if math.isfinite(edge)
            for gap in (1e-12, 1.0, 50.0)
        )
    )
    assert (penalty.value(outside) == math.inf).all()
    assert (grad(penalty.value, outside) == 0).all() if len(outside) else True
    inside = penalty.prox(POINTS)
    assert penalty.value(inside).isfinite().all()
    if not math.isfinite(low):
        assert penalty.value(float64(-50.0)).isfinite().all()


@pytest.mark.parametrize(
    ("penalty", "edge", "expected"),
    [
        (ReLU(), 0.0, 0.0),
        (Tanh(), 1.0, math.log(2) - 0.5),
        (Tanh(), -1.0, math.log(2) - 0.5),
        (Sigmoid(), 0.0, 0.0),
        (Sigmoid(), 1.0, -0.5),
        (Softplus(), 0.0, math.pi**2 / 6),
        (ELU(alpha=0.8), -0.8, 0.8 - 0.32),
        (HardTanh(), -1.0, 0.0),
        (Softsign(), 1.0, math.inf),
        (Softsign(), -1.0, math.inf),
    ],
    ids=repr,
)
def test_at_the_edge(penalty: ElementwisePenalty, edge: float, expected: float) -> None:
    for dtype in (torch.float64, torch.float32):
        y = torch.tensor([edge], dtype=dtype)
        assert float(penalty.value(y)) == pytest.approx(expected, rel=1e-6)
        assert grad(penalty.value, y).isfinite().all()


@pytest.mark.parametrize(
    ("penalty", "edge", "sign"),
    [
        (Tanh(), 1.0, 1),
        (Tanh(), -1.0, -1),
        (Sigmoid(), 0.0, -1),
        (Sigmoid(), 1.0, 1),
        (Softplus(), 0.0, -1),
        (ELU(), -1.0, -1),
    ],
    ids=repr,
)
def test_gradient_at_the_edge_points_inwards(penalty: ElementwisePenalty, edge: float, sign: int) -> None:
    # The true derivative is infinite; what is returned is large, and of its sign.
    assert float(grad(penalty.value, float64(edge))) * sign > 15


def test_a_nan_stays_one() -> None:
    for penalty in ALL:
        for result in (penalty.prox, penalty.value, penalty.antiderivative):
            assert result(float64(math.nan)).isnan().all(), (penalty, result)


@pytest.mark.parametrize("penalty", [Tanh(), Sigmoid(), Softplus(), ELU(), Softsign()], ids=str)
def test_a_gradient_of_nan_passes_a_saturated_unit(penalty: ElementwisePenalty) -> None:
    t = torch.tensor([-1e20, -1e8, 1e8, 1e20], requires_grad=True)
    y = penalty.prox(t)
    assert y.isfinite().all()
    (slope,) = torch.autograd.grad(y, t, torch.full_like(y, torch.nan))
    assert slope.isnan().all()


def test_softplus_penalty_near_its_edge() -> None:
    y = float64(1e-300, 1e-100, 1e-20, 1e-10, 1e-5, 0.1, math.log(2), 0.7, 5.0, 50.0)
    expected = y + torch.log(-torch.expm1(-y)) - y  # sigma^{-1}(y) - y
    torch.testing.assert_close(grad(Softplus().value, y), expected, rtol=1e-12, atol=1e-15)


@every
def test_bounded_flag(penalty: ElementwisePenalty) -> None:
    far = penalty.prox(float64(-1e30, 1e30)).abs().max()
    assert penalty.bounded == bool(far <= 1)
    assert penalty.bounded == all(math.isfinite(edge) for edge in domain(penalty))


# ---------------------------------------------------------------- precision and shapes


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_dtypes(penalty: ElementwisePenalty, dtype: torch.dtype) -> None:
    t = torch.linspace(-3, 3, 24).reshape(2, 3, 4).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert penalty.prox(t).dtype == penalty.derivative(t).dtype == dtype
    at_t = penalty.linearise(t)
    assert at_t.factor(t).dtype == at_t.factor_adjoint(t).dtype == dtype
    y = penalty.prox(t)
    for result in (penalty.value(y), penalty.antiderivative(t), penalty.total(y), penalty.potential(t)):
        assert result.dtype == wide
    # The formulas run in float32 or better on the numbers that the low precision holds.
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(
        penalty.potential(t).double(), penalty.potential(t.double()), rtol=tolerance, atol=tolerance
    )
    if not (isinstance(penalty, ELU) and dtype in (torch.bfloat16, torch.float16)):  # the edge is rounded, next test
        torch.testing.assert_close(penalty.total(y).double(), penalty.total(y.double()), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("penalty", [p for p in ALL if p is not ASINH], ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_the_penalty_of_an_activation_is_finite_however_it_is_rounded(
    penalty: ElementwisePenalty, dtype: torch.dtype
) -> None:
    # tanh(10), elu(-20), softsign(1e4), ... are rounded to the edge of the domain, or past it.
    t = torch.tensor([-6e4, -1e3, -20.0, -9.0, -3.0, 0.0, 3.0, 9.0, 20.0, 1e3, 6e4], dtype=dtype)
    y = penalty.prox(t)
    assert penalty.value(y).isfinite().all()
    assert grad(penalty.value, y).isfinite().all()
    assert grad(penalty.antiderivative, t).isfinite().all()


def test_rounding_past_the_edge_costs_nothing() -> None:
    y = torch.tensor([-0.8], dtype=torch.bfloat16)
    assert float(y) < -0.8
    assert float(ELU(alpha=0.8).value(y)) == pytest.approx(0.8 - 0.8**2 / 2, abs=1e-3)


def test_softplus_has_no_step_where_torch_starts_to_cut() -> None:
    t = torch.linspace(15, 45, 3001, dtype=torch.float64)
    torch.testing.assert_close(Softplus().prox(t), torch.logaddexp(t, torch.zeros_like(t)), rtol=1e-15, atol=0)


def test_large_values_do_not_overflow_in_float16() -> None:
    t = torch.tensor([[6e4]], dtype=torch.float16)
    exact = float(t) ** 2 / 2
    assert float(ReLU().potential(t)) == pytest.approx(exact)
    assert float(Softplus().potential(t)) == pytest.approx(exact, rel=1e-6)


@every
def test_totals_sum_over_everything_but_the_batch(penalty: ElementwisePenalty) -> None:
    t = torch.randn(3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = penalty.prox(t)
    torch.testing.assert_close(penalty.total(y), torch.stack([penalty.value(sample).sum() for sample in y]))
    torch.testing.assert_close(penalty.potential(t), torch.stack([penalty.antiderivative(s).sum() for s in t]))
    assert penalty.total(y[:, 0, 0]).shape == (3,)
    assert penalty.total(y[:0]).shape == (0,)


def test_one_entry_outside_makes_the_sample_infinite() -> None:
    assert ReLU().total(torch.tensor([[1.0, -1.0], [1.0, 1.0]])).tolist() == [math.inf, 0.0]


@every
def test_linearisation(penalty: ElementwisePenalty) -> None:
    t = torch.cat([POINTS, float64(-1e5)])  # where slopes underflow
    v = torch.linspace(-1, 2, len(t), dtype=torch.float64)
    at_t = penalty.linearise(t)
    torch.testing.assert_close(at_t.factor(at_t.factor_adjoint(v)), penalty.derivative(t) * v)
    if penalty.derivative(t.requires_grad_()).requires_grad:
        assert grad(lambda s: penalty.linearise(s).factor(v), t).isfinite().all()


# ---------------------------------------------------------------- the dilogarithm


def test_dilogarithm_against_scipy() -> None:
    ends = torch.logspace(-300, -1, 200, dtype=torch.float64)
    x = torch.cat([torch.linspace(-1, 1, 4001, dtype=torch.float64), ends, -ends, 1 - ends])
    expected = torch.from_numpy(special.spence((1 - x).numpy()))
    # scipy's argument 1 - x has lost the digits of a tiny x, where Li2(x) = x to float64.
    expected = torch.where(x.abs() < 1e-17, x, expected)
    torch.testing.assert_close(dilogarithm(x), expected, rtol=1e-13, atol=1e-15)


def test_dilogarithm_gradient() -> None:
    x = torch.linspace(-1, 0.999, 2000, dtype=torch.float64)
    torch.testing.assert_close(grad(dilogarithm, x), -torch.log1p(-x) / x, rtol=1e-12, atol=0)
    assert float(grad(dilogarithm, float64(0.0))) == 1
    torch.autograd.gradgradcheck(dilogarithm, float64(-0.9, -0.3, 0.0, 0.3, 0.8).requires_grad_())


def test_dilogarithm_takes_the_complement_where_one_rounds() -> None:
    rest = float64(1e-30)
    x = (1 - rest).requires_grad_()
    rest.requires_grad_()
    (slope,) = torch.autograd.grad(dilogarithm(x, rest), rest)
    assert float(slope) == pytest.approx(math.log(1e-30))  # -Li2'(1 - w) = ln(w)/(1-w)


# ---------------------------------------------------------------- a linear activation


def positive_definite(n: int = 4) -> Tensor:
    random = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return random @ random.mT + 0.1 * torch.eye(n, dtype=torch.float64)


def test_linear_activation_is_the_prox_of_its_penalty() -> None:
    S = positive_definite()
    sigma = LinearActivation(4, torch.linalg.cholesky(S))
    t = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = sigma.prox(t)
    torch.testing.assert_close(y, t @ S)
    torch.testing.assert_close(sigma(t), y)
    quadratic = torch.einsum("bi,ij,bj->b", y, torch.linalg.inv(S), y) / 2 - y.square().sum(1) / 2
    torch.testing.assert_close(sigma.total(y), quadratic)
    # stationary: grad f(y) + y - t = 0, and f + |y|^2/2 is convex
    torch.testing.assert_close(grad(sigma.total, y), t - y, rtol=1e-9, atol=1e-9)
    # conjugate: <y, t> - potential(t) = f(y) + |y|^2/2 - k
    torch.testing.assert_close(
        (y * t).sum(1) - sigma.potential(t), sigma.total(y) + y.square().sum(1) / 2 - sigma.offset
    )
    torch.testing.assert_close(grad(sigma.potential, t), y)
    assert sigma.lipschitz == pytest.approx(float(torch.linalg.matrix_norm(S, ord=2)))
    assert (sigma.bounded, sigma.name) == (False, "linear")


def test_linear_activation_acts_on_channels() -> None:
    sigma = LinearActivation(3, init=torch.randn(3, 3, generator=torch.Generator().manual_seed(3)))
    image = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(4))
    out = sigma.prox(image)
    S = (sigma.factor @ sigma.factor.mT).detach()
    torch.testing.assert_close(out[1, :, 2, 3], S @ image[1, :, 2, 3])
    torch.testing.assert_close(out, F.conv2d(image, S[:, :, None, None]))
    pixels = image.permute(0, 2, 3, 1).flatten(0, 2)
    torch.testing.assert_close(sigma.total(image), sigma.total(pixels).reshape(2, -1).sum(1))
    assert sigma.total(image[:0]).shape == sigma.potential(image[:0]).shape == (0,)


def test_linear_activation_factors() -> None:
    sigma = LinearActivation(3, init=torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5)))
    u, v = torch.randn(2, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    at = sigma.linearise(u)
    torch.testing.assert_close((at.factor(u) * v).sum(), (u * at.factor_adjoint(v)).sum())
    torch.testing.assert_close(at.factor(at.factor_adjoint(v)), sigma.prox(v))


class Call(nn.Module):
    """One method of an activation as a module's forward, for ``functional_call``."""

    def __init__(self, sigma: LinearActivation, method: str) -> None:
        super().__init__()
        self.sigma = sigma
        self.method = method

    def forward(self, t: Tensor) -> Tensor:
        result: Tensor = getattr(self.sigma, self.method)(t)
        return result


@pytest.mark.parametrize("method", ["prox", "total", "potential"])
def test_linear_activation_learns(method: str) -> None:
    sigma = LinearActivation(2, init=float64(1.0, 0.2, -0.1, 0.8).reshape(2, 2))
    assert [name for name, _ in sigma.named_parameters()] == ["factor"]
    y = float64(0.3, -0.4, 0.5, 0.9).reshape(2, 2).requires_grad_()
    module = Call(sigma, method)

    def run(y: Tensor, factor: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"sigma.factor": factor}, (y,))

    assert torch.autograd.gradcheck(run, (y, sigma.factor))


def test_linear_activation_is_an_ordinary_module() -> None:
    sigma = LinearActivation(2)
    torch.testing.assert_close(sigma.total(torch.randn(3, 2)), torch.zeros(3))  # S = I is the identity: f = 0
    assert repr(sigma) == "LinearActivation(n=2)"
    again = pickle.loads(pickle.dumps(copy.deepcopy(sigma)))
    again.load_state_dict(sigma.state_dict())
    assert penalties.get(sigma) is sigma
    for dtype in (torch.bfloat16, torch.float16):
        low = torch.ones(3, 2, dtype=dtype)
        assert again.prox(low).dtype == dtype
        assert again.total(low).dtype == again.potential(low).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exact = torch.full((1, 2), 1.001)
        assert float(again.potential(exact).detach()) == pytest.approx(1.001**2, rel=1e-6)


def test_linear_activation_refuses_wrong_shapes() -> None:
    with pytest.raises(ValueError, match=r"init should be a \(3, 3\) factor.*got shape \(2, 2\)"):
        LinearActivation(3, init=torch.eye(2))
    with pytest.raises(ValueError, match=r"LinearActivation\.init should be invertible; .* from 2.0e\+00 to .*e-"):
        LinearActivation(2, init=torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"LinearActivation\.init should have entries, all of them finite; got .*nan"):
        LinearActivation(2, init=torch.full((2, 2), math.nan))
    with pytest.raises(TypeError, match=r"LinearActivation\.init should be a tensor of real numbers; got 3"):
        LinearActivation(2, init=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"LinearActivation\.n should be at least 1; got 0"):
        LinearActivation(0)
    with pytest.raises(ValueError, match=r"acts on dim 1, of size 3; got a tensor of shape \(5, 2\)"):
        LinearActivation(3).prox(torch.ones(5, 2))
    with pytest.raises(ValueError, match=r"acts on dim 1, of size 3; got a tensor of shape \(3,\)"):
        LinearActivation(3).total(torch.ones(3))


# ---------------------------------------------------------------- a user's own activation


def test_own_activation_without_formulas_serves_networks_but_not_values() -> None:
    penalty = FromActivation(F.relu6, lipschitz=1.0, name="relu6", bounded=True)
    t = float64(-1.0, 0.5, 7.0)
    assert penalty.prox(t).tolist() == [0.0, 0.5, 6.0]
    assert penalty.derivative(t).tolist() == [0.0, 1.0, 0.0]
    assert (penalty.bounded, penalty.offset) == (True, 0.0)
    assert repr(penalty) == "FromActivation('relu6', lipschitz=1.0)"
    with pytest.raises(NotImplementedError, match=r"'relu6' was given no formula for its value.*pass value="):
        penalty.total(t)
    with pytest.raises(NotImplementedError, match=r"no formula for its antiderivative.*pass antiderivative="):
        penalty.potential(t)


# None of them is known to contract, so that solvers would like to look at a merit.
NETWORKS = {
    "opteq": lambda penalty: opteq.OptEq(Dense(3, 4), activation=penalty),
    "gaussian": lambda penalty: opteq.GEQ(Dense(3, 4, bound=2.0), activation=penalty),
    "sigmoid": lambda penalty: opteq.GEQ(Dense(4, 3, bound=0.8), None, opteq.kernels.Sigmoid(), penalty),
    "mopteq": lambda penalty: opteq.MOptEq(
        [opteq.Branch(Dense(3, 4, bound=0.6)) for _ in range(2)], diversity=0.05, smoothing=0.2, activation=penalty
    ),
    "parallel": lambda penalty: opteq.Parallel([opteq.OptEq(Dense(3, 4), activation=p) for p in (penalty, "relu")]),
}


@pytest.mark.parametrize("solver", [opteq.Anderson(tol=1e-9), SAM(regularizer=Ridge())], ids=["anderson", "sam"])
@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_can_be_solved_with_an_own_activation_without_formulas(network: str, solver: Solver) -> None:
    torch.manual_seed(0)
    problem = NETWORKS[network](FromActivation(torch.tanh, lipschitz=1.0)).double()
    torch.manual_seed(0)
    known = NETWORKS[network](Tanh()).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    found, expected = (opteq.Equilibrium(p, solver, on_failure="ignore")(x) for p in (problem, known))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


def test_derivative_of_an_own_activation_can_be_differentiated_and_needs_no_graph() -> None:
    penalty = FromActivation(torch.tanh, lipschitz=1.0)
    t = float64(-0.5, 0.3)
    y = torch.tanh(t)
    torch.testing.assert_close(grad(penalty.derivative, t), -2 * y * (1 - y.square()))
    with torch.no_grad():
        torch.testing.assert_close(penalty.derivative(t), 1 - y.square())


@pytest.mark.parametrize(
    "function", [F.gelu, F.silu, F.mish, F.hardswish, torch.sin, torch.abs], ids=lambda f: f.__name__
)
def test_own_activation_must_not_decrease(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"'mine' decreases, and is thus the prox of no penalty.*sigma\(-") as error:
        FromActivation(function, lipschitz=2.0, name="mine")
    # The place named is one where it does decrease.
    places = [float(part.split(")")[0]) for part in str(error.value).split("sigma(")[1:]]
    low, high = function(float64(*places)).tolist()
    assert high < low


def trainable() -> Callable[[Tensor], Tensor]:
    return nn.PReLU(dtype=torch.float64)


@pytest.mark.parametrize(
    ("function", "lipschitz", "message"),
    [
        (lambda t: 2 * t, 1.0, r"steeper than lipschitz=1.0; give its largest slope; sigma\(-100\) = -200"),
        (lambda t: torch.where(t > 50, t / 0, t), 1.0, "should be finite"),
        (lambda t: torch.softmax(t, 0), 1.0, "should be elementwise"),
        (lambda t: t.sort().values, 1.0, "should be elementwise"),
        (lambda t: t.detach().tanh(), 1.0, "rises without a gradient: write it without detach"),
        (lambda t: torch.from_numpy(np.tanh(t.detach().numpy())), 1.0, "rises without a gradient"),
        (lambda t: t[:5], 1.0, r"keep shape and dtype.*shape \(5,\)"),
        (lambda t: t.float(), 1.0, "keep shape and dtype.*torch.float32"),
        (lambda t: None, 1.0, "keep shape and dtype.*NoneType"),
        (torch.tanh, 0.0, "FromActivation.lipschitz should be a positive finite number; got 0.0"),
        (trainable(), 1.0, "has trainable parameters"),
    ],
)
def test_own_activation_is_checked(function: Callable[[Tensor], Tensor], lipschitz: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FromActivation(function, lipschitz=lipschitz, name="mine")


def test_own_activation_needs_types() -> None:
    with pytest.raises(TypeError, match="function should be callable; got 'relu'"):
        FromActivation("relu", lipschitz=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lipschitz should be a positive number; got None"):
        FromActivation(torch.tanh, lipschitz=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lipschitz"):
        FromActivation(torch.tanh)  # type: ignore[call-arg]


def test_formulas_of_an_own_activation_are_checked() -> None:
    with pytest.raises(ValueError, match="is not the derivative of the given antiderivative"):
        FromActivation(torch.asinh, 1.0, antiderivative=lambda t: t.square())
    with pytest.raises(ValueError, match="antiderivative of 'custom' should be 0 at 0; got 1"):
        FromActivation(F.relu, 1.0, antiderivative=lambda t: F.relu(t).square() / 2 + 1)
    with pytest.raises(ValueError, match="is not the prox of the given value"):
        FromActivation(torch.asinh, 1.0, value=lambda y: y.cosh())


@pytest.mark.parametrize("known", [p for p in ALL if p is not ASINH], ids=repr)
def test_own_activation_agrees_with_the_known_ones(known: ElementwisePenalty) -> None:
    own = FromActivation(known.prox, known.lipschitz, antiderivative=known.antiderivative, value=known.value)
    assert own.offset == pytest.approx(known.offset)
    torch.testing.assert_close(own.derivative(POINTS), known.derivative(POINTS))
    torch.testing.assert_close(own.total(known.prox(POINTS)), known.total(known.prox(POINTS)))


# ---------------------------------------------------------------- names and options


def test_names_give_the_defaults() -> None:
    assert penalties.names() == [
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
    for name in penalties.names():
        assert penalties.get(name).name == name
        assert penalties.get(name) in ALL
    assert penalties.get(ELU(alpha=0.3)) == ELU(alpha=0.3)


@pytest.mark.parametrize("name", ["gelu", "GELU", "silu", "swish", "mish", "sine", "hardswish"])
def test_activations_that_are_no_prox_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is not monotone.*prox of no penalty.*'softplus', 'elu' and 'relu'"):
        penalties.get(name)


def test_unknown_names_and_types() -> None:
    with pytest.raises(ValueError, match="unknown activation 'rellu'; did you mean 'relu'"):
        penalties.get("rellu")
    with pytest.raises(TypeError, match=r"a name or a Penalty.*got <.*relu.*FromActivation\(function"):
        penalties.get(torch.relu)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a name or a Penalty.*got ReLU"):
        penalties.get(nn.ReLU())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LeakyReLU(slope=0), ValueError, "LeakyReLU.slope should be a positive finite number; got 0"),
        (lambda: LeakyReLU(slope=1.5), ValueError, r"LeakyReLU.slope should lie in \(0, 1\]; got 1.5"),
        (lambda: LeakyReLU(slope="a"), TypeError, "LeakyReLU.slope should be a positive number; got 'a'"),
        (lambda: ELU(alpha=-1.0), ValueError, "ELU.alpha should be a positive finite number; got -1.0"),
        (lambda: ELU(alpha=math.inf), ValueError, "ELU.alpha should be a positive finite number; got inf"),
        (lambda: SoftThreshold(threshold=-0.1), ValueError, "SoftThreshold.threshold should be .*got -0.1"),
        (lambda: SoftThreshold(threshold=math.nan), ValueError, "SoftThreshold.threshold should be .*got nan"),
        (lambda: SoftThreshold(threshold=False), TypeError, "SoftThreshold.threshold should be .*got False"),
        (lambda: ReLU(slope=0.1), TypeError, "slope"),
        (Penalty, TypeError, "abstract"),
    ],
)
def test_options_are_checked(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("penalty", [p for p in ALL if p is not ASINH], ids=repr)
def test_penalties_are_values(penalty: ElementwisePenalty) -> None:
    assert pickle.loads(pickle.dumps(penalty)) == copy.deepcopy(penalty) == penalty
    assert len({penalty, copy.copy(penalty)}) == 1
    with pytest.raises(AttributeError):
        penalty.slope = 0.5  # type: ignore[attr-defined]


@every
def test_transforms(penalty: ElementwisePenalty) -> None:
    t = torch.linspace(-2, 2, 6, dtype=torch.float64).reshape(2, 3)
    for method in (penalty.prox, penalty.derivative, penalty.antiderivative, penalty.value):
        torch.testing.assert_close(torch.func.vmap(method)(t), method(t))
    slopes = torch.func.vmap(torch.func.vmap(torch.func.grad(penalty.antiderivative)))(t)
    torch.testing.assert_close(slopes, penalty.prox(t))


def test_everything_compiles_into_one_graph() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def compiled(t: Tensor) -> list[tuple[Tensor, ...]]:
        return [evaluate(penalty, t) for penalty in ALL]

    def evaluate(penalty: ElementwisePenalty, t: Tensor) -> tuple[Tensor, ...]:
        y = penalty.prox(t)
        return y, penalty.linearise(t).factor(y), penalty.total(y), penalty.potential(t)

    t = torch.linspace(-2, 2, 6).reshape(2, 3)
    torch.testing.assert_close(compiled(t), [evaluate(penalty, t) for penalty in ALL])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_nothing_waits_for_the_host() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        here = torch.linspace(-2, 2, 24).reshape(2, 3, 4).to(dtype)
        t = here.cuda().requires_grad_()
        for penalty in ALL:
            penalty.linearise(penalty.prox(t))  # libraries and kernels are loaded here
            torch.cuda.set_sync_debug_mode("error")
            try:
                y = penalty.prox(t)
                at_t = penalty.linearise(t)
                product = at_t.factor(at_t.factor_adjoint(t))
                potential, total = penalty.potential(t), penalty.total(y)
                (slope,) = torch.autograd.grad(potential.sum() + total.sum(), t)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            tolerance = 1e-5 if dtype in (torch.float32, torch.float64) else 2e-2
            torch.testing.assert_close(y.cpu(), penalty.prox(here), rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(product.cpu(), penalty.derivative(here) * here, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(potential.cpu(), penalty.potential(here), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(total.cpu(), penalty.total(y.cpu()), rtol=1e-5, atol=1e-5)
            assert slope.isfinite().all()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_linear_activation_on_a_gpu() -> None:
    sigma = LinearActivation(3, torch.linalg.cholesky(positive_definite(3)))
    t = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(2, 3, 4)
    expected = sigma.prox(t), sigma.potential(t), sigma.total(t)
    sigma, t = sigma.cuda(), t.cuda()
    sigma.potential(sigma.prox(t))
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = sigma.prox(t), sigma.potential(t)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = *found, sigma.total(t)  # a linear solve waits, to see whether its matrix is invertible
    torch.testing.assert_close([part.cpu() for part in found], list(expected))


@pytest.mark.parametrize("penalty", ALL, ids=repr)
def test_project_is_the_nearest_point_of_the_domain(penalty: ElementwisePenalty) -> None:
    y = torch.linspace(-3, 3, 601, dtype=torch.float64)
    inside = y[torch.isfinite(penalty.value(y))]
    projected = penalty.project(y)
    assert torch.isfinite(penalty.value(projected)).all()
    nearest = inside[(y[:, None] - inside).abs().argmin(dim=1)]
    torch.testing.assert_close(projected, nearest, rtol=0, atol=0.0101)  # the grid's spacing: an edge may lie between
    torch.testing.assert_close(penalty.project(projected), projected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("name", "slope"),
    [
        ("tanh", lambda t: 4 / (2 + np.exp(2 * t) + np.exp(-2 * t))),
        ("sigmoid", lambda t: 1 / (2 + np.exp(t) + np.exp(-t))),
        ("softsign", lambda t: 1 / (1 + np.abs(t)) ** 2),
    ],
)
def test_slopes_of_saturated_units_are_relatively_accurate(
    name: str, slope: Callable[[Any], Any], dtype: torch.dtype
) -> None:
    t = torch.cat([-torch.logspace(-6, 1.6, 60), torch.logspace(-6, 1.6, 60)]).to(dtype)
    expected = slope(t.to(torch.float64).numpy().astype(np.longdouble))
    found = penalties.get(name).derivative(t).numpy().astype(np.longdouble)
    assert np.max(np.abs(found - expected) / expected) < 60 * torch.finfo(dtype).eps
