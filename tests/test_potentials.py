"""Potentials: derivatives against autograd, curvature against a fine grid, and the table of known ranges."""

from __future__ import annotations

import math

import pytest
import torch

from opteq import potentials as P

CLASSIC = {
    "Huber": (P.Huber, 0.0),
    "Gaussian": (P.Gaussian, -2 * math.exp(-1.5)),
    "Student": (P.Student, -1 / 8),
    "GemanMcClure": (P.GemanMcClure, -1 / 4),
}


def splines():
    torch.manual_seed(0)
    made = {
        "odd": P.Spline(channels=3, knots=7, reach=2.0, rho=0.5, mu=2.0, scale=0.7, learned=True),
        "free": P.Spline(channels=3, knots=5, reach=2.0, rho=1.0, mu=3.0, odd=False),
        "convex": P.Spline(knots=6, reach=1.5, rho=0.0, mu=4.0),
    }
    for spline in made.values():
        spline.double()
        torch.nn.init.normal_(spline.raw, std=2.0)
    return made


def every():
    made = {name: kind(scale=0.6).double() for name, (kind, _) in CLASSIC.items()}
    return {**made, **splines()}


def grid(potential, count=4001, reach=4.0):
    t = torch.linspace(-reach, reach, count, dtype=torch.float64) + 1e-5 * math.pi
    return t.expand(1, potential.channels or 1, -1)


@pytest.mark.parametrize("name", every())
def test_derivatives_are_those_of_autograd(name):
    potential = every()[name]
    t = grid(potential).clone().requires_grad_()
    (slope,) = torch.autograd.grad(potential(t).sum(), t, create_graph=True)
    assert torch.allclose(slope, potential.derivative(t), atol=1e-12)
    own = potential.derivative(t)
    (second,) = torch.autograd.grad(own.sum(), t)
    assert torch.allclose(second, potential.second(t), atol=1e-12)


@pytest.mark.parametrize("name", every())
def test_value_is_the_integral_of_the_derivative(name):
    potential = every()[name]
    t = grid(potential)
    with torch.no_grad():
        numbers = torch.cumulative_trapezoid(potential.derivative(t), t, dim=-1)
        values = potential(t)
    assert torch.allclose(values[..., 1:] - values[..., :1], numbers, atol=2e-5)
    zero = torch.zeros(1, potential.channels or 1, 1, dtype=torch.float64)
    assert torch.allclose(potential(zero), zero)
    assert torch.allclose(potential.derivative(zero), zero)


@pytest.mark.parametrize("name", every())
def test_curvature_range_is_exact(name):
    potential = every()[name]
    low, high = potential.curvature()
    second = potential.second(grid(potential, 400_001))
    dims = (0, 2) if low.ndim else (0, 1, 2)
    assert torch.allclose(second.amin(dims), low, atol=1e-8)
    assert torch.allclose(second.amax(dims), high, atol=1e-8)


@pytest.mark.parametrize(("kind", "least"), CLASSIC.values(), ids=CLASSIC)
def test_ranges_of_the_table_hold_at_every_scale(kind, least):
    for scale in (0.1, 1.0, 30.0):
        low, high = kind(scale=scale).double().curvature()
        assert float(low) == pytest.approx(least, abs=1e-12)
        assert float(high) == 1.0
    assert float(kind().double().second(torch.zeros((), dtype=torch.float64))) == 1.0


@pytest.mark.parametrize("name", ["odd", "free", "convex"])
def test_splines_pass_gradcheck_for_their_parameters(name):
    potential = splines()[name]
    t = torch.randn(2, potential.channels or 1, 5, dtype=torch.float64)

    def total(raw, log_scale):
        held = {"raw": raw, "log_scale": log_scale}
        slope = torch.func.functional_call(_Derivative(potential), {f"inner.{k}": v for k, v in held.items()}, (t,))
        return slope.sum()

    raw = potential.raw.detach().clone().requires_grad_()
    log_scale = potential.log_scale.detach().clone().requires_grad_(isinstance(potential.log_scale, torch.nn.Parameter))
    assert torch.autograd.gradcheck(total, (raw, log_scale))


class _Derivative(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, t):
        return self.inner.derivative(t)


def test_slopes_stay_in_range_whatever_is_written():
    spline = P.Spline(channels=2, rho=0.3, mu=0.7)
    with torch.no_grad():
        spline.raw.copy_(1e20 * torch.randn_like(spline.raw))
    slopes = spline.slopes()
    assert slopes.min() >= -spline.rho
    assert slopes.max() <= spline.mu
    assert torch.isfinite(slopes).all()


def test_odd_splines_are_odd_and_extreme_arguments_are_safe():
    spline = splines()["odd"].float()
    t = torch.randn(1, 3, 50)
    assert torch.allclose(spline.derivative(-t), -spline.derivative(t))
    far = torch.tensor([0.0, 1e30, -1e30, torch.nan, torch.inf]).expand(1, 3, -1)
    out = spline.derivative(far)
    assert torch.isfinite(out[..., :3]).all()
    assert out[..., 3].isnan().all()


@pytest.mark.parametrize(
    "options",
    [{"knots": 0}, {"rho": -1.0}, {"mu": 0.0}, {"scale": -1.0}, {"channels": 0}, {"odd": 1}, {"learned": "yes"}],
)
def test_bad_options_are_named(options):
    ((name, value),) = options.items()
    with pytest.raises((TypeError, ValueError), match=rf"{name} should .*; got {value!r}"):
        P.Spline(**options)


def test_wrong_number_of_channels_is_named():
    with pytest.raises(ValueError, match=r"3 channels.*\(2, 4\)"):
        P.Student(channels=3)(torch.zeros(2, 4))


def test_gradients_exist_at_zero():
    # |u| has no derivative there, the curve does.
    spline = splines()["odd"]
    t = torch.zeros(1, 3, 1, dtype=torch.float64, requires_grad=True)
    (second,) = torch.autograd.grad(spline.derivative(t).sum(), t)
    assert torch.allclose(second, spline.second(t))


@pytest.mark.parametrize("name", ["Huber", "Gaussian", "Student", "GemanMcClure", "Spline"])
def test_values_that_float16_can_hold_are_finite(name):
    """The square of 1e4 does not fit into float16."""
    u = torch.tensor([0.0, 0.5, 100.0, 1e4, -1e4])
    expected = getattr(P, name)()(u)
    found = getattr(P, name)().half()(u.half())
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["Huber", "Gaussian", "Student", "GemanMcClure"])
def test_small_arguments_keep_their_digits_and_large_ones_are_finite(name):
    potential = getattr(P, name)()
    small = torch.tensor([1e-15, 3e-7, -2e-5, 1e-3, 0.3])
    torch.testing.assert_close(potential(small).double(), potential.double()(small.double()), rtol=1e-6, atol=0)
    far = torch.tensor([1e25, -1e25], requires_grad=True)
    value = potential.float()(far)
    (slope,) = torch.autograd.grad(value.sum(), far)
    assert torch.isfinite(value if name != "Student" else slope).all()
