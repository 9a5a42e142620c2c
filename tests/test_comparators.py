"""Models of others: monDEQ against dense matrices, MDEQ against its own equation, sizes against the tables."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import opteq
from opteq import models
from opteq.models.comparators.mdeq import MultiscaleStep, Zeros
from opteq.problems.monotone import SPLITTINGS, MonDEQ

N, SIDE = 3, 4


def mondeq(splitting: str = "peaceman-rachford", **options: float) -> MonDEQ:
    torch.manual_seed(0)
    problem = MonDEQ(N, nn.Conv2d(2, N, 3, padding=1), m=0.3, splitting=splitting, **options).double()
    with torch.no_grad():
        problem.gain_A.fill_(1.5)
        problem.gain_B.fill_(0.7)
    return problem


def circular(kernel: Tensor, gain: Tensor) -> Tensor:
    """The matrix of the circular convolution whose impulse response is the kernel, entry by entry."""
    kernel = (gain / kernel.norm() * kernel).detach()
    matrix = torch.zeros(N, SIDE, SIDE, N, SIDE, SIDE, dtype=torch.float64)
    for row in range(SIDE):
        for column in range(SIDE):
            for i in range(3):
                for j in range(3):
                    matrix[:, (row + i) % SIDE, (column + j) % SIDE, :, row, column] += kernel[:, :, i, j]
    return matrix.reshape(N * SIDE**2, -1)


def dense_W(problem: MonDEQ) -> Tensor:
    A, B = circular(problem.A, problem.gain_A), circular(problem.B, problem.gain_B)
    return (1 - problem.m) * torch.eye(len(A), dtype=torch.float64) - A.T @ A + B - B.T


@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_mondeq_is_the_fixed_point_of_its_dense_matrix(splitting: str) -> None:
    problem = mondeq(splitting, alpha=0.1 if splitting == "forward-backward" else 1.0)
    W = dense_W(problem)
    least = torch.linalg.eigvalsh(torch.eye(len(W)) - (W + W.T) / 2)[0]
    assert least >= problem.m - 1e-12  # strongly monotone, as the certificate says
    x = torch.randn(2, 2, SIDE, SIDE, dtype=torch.float64)
    z = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-12, max_steps=500))(x)
    expected = torch.relu(z.flatten(1) @ W.T + problem.U(x).flatten(1))
    torch.testing.assert_close(z.flatten(1), expected)


@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_gradients_of_mondeq(splitting: str) -> None:
    problem = mondeq(splitting, alpha=0.1 if splitting == "forward-backward" else 1.0)
    solver = opteq.Anderson(tol=1e-13, max_steps=500)
    layer = opteq.Equilibrium(problem, solver, opteq.Implicit(tol=1e-12, max_steps=200))
    x = torch.randn(1, 2, SIDE, SIDE, dtype=torch.float64, requires_grad=True)
    names = ("A", "B", "gain_A", "gain_B")
    given = [getattr(problem, name).detach().clone().requires_grad_() for name in names]

    def features(image: Tensor, *weights: Tensor) -> Tensor:
        renamed = {f"problem.{name}": weight for name, weight in zip(names, weights, strict=True)}
        found: Tensor = torch.func.functional_call(layer, renamed, (image,))
        return found

    assert torch.autograd.gradcheck(features, (x, *given), fast_mode=True, atol=1e-6)


def test_mondeq_is_an_ordinary_module() -> None:
    layer = opteq.Equilibrium(mondeq().float(), opteq.Anderson(tol=1e-5, max_steps=200))
    x = torch.randn(1, 2, SIDE, SIDE)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(again(x), layer(x))
        with torch.no_grad():
            again.problem.gain_A.mul_(3)
        assert not torch.allclose(again(x), layer(x), atol=1e-3)
    certificate = layer.problem.certificate()
    assert (certificate.exists, certificate.unique, certificate.contraction) == (True, True, None)


def test_mistakes_in_mondeq_are_named() -> None:
    U = nn.Conv2d(2, N, 3, padding=1)
    with pytest.raises(ValueError, match=r"m should lie in \(0, 1\]; got 2"):
        MonDEQ(N, U, m=2.0)
    with pytest.raises(ValueError, match="splitting should be one of peaceman-rachford, forward-backward; got 'dr'"):
        MonDEQ(N, U, splitting="dr")
    with pytest.raises(ValueError, match="smaller than the kernels"):
        opteq.Equilibrium(MonDEQ(N, U))(torch.zeros(1, 2, 2, 2))


def test_the_large_mdeq_has_the_size_of_its_own_configuration() -> None:
    # Its 11.1M parameters are printed as 10M and as 11M; the other sizes are those of tests/test_models.py.
    assert models.describe("mdeq-10m").parameters == pytest.approx(11e6, rel=0.02)


def test_a_step_of_mdeq_uses_every_scale_and_the_input() -> None:
    torch.manual_seed(0)
    channels = (4, 8, 8)
    step = MultiscaleStep(channels, expansion=2, groups=2).double()
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64, requires_grad=True)
    start = Zeros(channels)(x)
    z = tuple(torch.randn_like(part).requires_grad_() for part in start)
    assert [tuple(part.shape) for part in z] == [(2, 4, 8, 8), (2, 8, 4, 4), (2, 8, 2, 2)]
    image = step(z, x)
    assert [part.shape for part in image] == [part.shape for part in z]
    for part in image:
        assert all(
            bool(grad.abs().sum() > 0) for grad in torch.autograd.grad(part.sin().sum(), (*z, x), retain_graph=True)
        )
    # Samples do not depend on each other.
    alone = step(tuple(part[:1] for part in z), x[:1])
    torch.testing.assert_close(alone, tuple(part[:1] for part in image))
    with pytest.raises(ValueError, match="3 scales need sides that 4 divides; got 6 x 8"):
        Zeros(channels)(torch.zeros(1, 4, 6, 8))


@pytest.mark.parametrize("gradient", ["implicit", "one-step", "unrolled"])
def test_mdeq_learns_by_each_of_its_gradients(gradient: str) -> None:
    torch.manual_seed(0)
    small = {"hidden": (8, 8), "heads": (2, 2), "last": 8, "expansion": 1, "groups": 4, "dropout": 0.0, "max_steps": 8}
    if gradient != "one-step":
        small["gradient_steps"] = 8
    model = models.create("mdeq-2.5m", num_classes=3, gradient=gradient, on_failure="ignore", **small)
    x, labels = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        losses.append(nn.functional.cross_entropy(model(x), labels))
        optimizer.zero_grad()
        losses[-1].backward()
        assert all(weight.grad is not None for weight in model.parameters())
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    assert model.equilibrium.problem.certificate().unique is None


def test_a_neural_ode_against_small_steps_of_runge_kutta() -> None:
    torch.manual_seed(0)
    model = models.create("augmented-neural-ode-172k", num_classes=3, filters=5, augment=2, cells=2, tol=1e-5).double()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    field, steps = model.equilibrium.field, 20
    h = torch.cat([x, torch.zeros(2, 2, 4, 4, dtype=torch.float64)], dim=1)
    for step in range(steps):
        t, dt = torch.tensor(step / steps, dtype=torch.float64), 1 / steps
        one = field(t, h)
        two = field(t + dt / 2, h + dt / 2 * one)
        three = field(t + dt / 2, h + dt / 2 * two)
        h = h + dt / 6 * (one + 2 * two + 2 * three + field(t + dt, h + dt * three))
    found = model.equilibrium(x)
    # ReLUs have kinks, so that steps of a fixed length are less accurate than their order says.
    torch.testing.assert_close(found, h, rtol=1e-2, atol=1e-3)
    gradients = [torch.autograd.grad(out.square().sum(), [x, field.middle.weight]) for out in (found, h)]
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).norm() < 0.03 * theirs.norm()
