"""Models of others: monDEQ against dense matrices, MDEQ against its own equation, sizes against the tables."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import opteq
from opteq import models
from opteq.common.errors import UserError
from opteq.models.comparators.feedforward import PlainLayers
from opteq.models.comparators.mdeq import MultiscaleStep, Zeros
from opteq.models.comparators.monotone import SPLITTINGS, MonDEQ, scaled_weight
from opteq.models.comparators.monotone_tiers import TieredMonDEQ
from opteq.models.comparators.neural_ode import convolve_with_time
from opteq.models.registry import on_meta_device
from opteq.states import blocks
from opteq.training.validation import solve_reports, without_warnings
from oracles import assert_slopes

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
    x = torch.randn(1, 2, SIDE, SIDE, dtype=torch.float64)
    names = ("A", "B", "gain_A", "gain_B")

    def features(image: Tensor, *weights: Tensor) -> Tensor:
        renamed = {f"problem.{name}": weight for name, weight in zip(names, weights, strict=True)}
        found: Tensor = torch.func.functional_call(layer, renamed, (image,))
        return found

    assert_slopes(features, [x, *(getattr(problem, name) for name in names)])


@pytest.mark.parametrize("name", ["A", "B"])
def test_a_kernel_of_zeros_weighs_nothing(name: str) -> None:
    problem, x = mondeq(), torch.randn(1, 2, SIDE, SIDE, dtype=torch.float64)
    kernel = getattr(problem, name)
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-12, max_steps=500))
    kernel.data.zero_()
    z = layer(x)
    z.sum().backward()
    assert all(weight.grad.isfinite().all() for weight in problem.parameters())
    getattr(problem, f"gain_{name}").data.zero_()
    kernel.data.fill_(1)
    torch.testing.assert_close(layer(x), z)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_kernels_of_any_size_weigh_as_much_as_their_gain(size: float) -> None:
    kernel = torch.randn(2, 2, 3, 3)
    weight = scaled_weight(size * kernel, torch.tensor(0.7), 4, 4)
    torch.testing.assert_close(weight, 0.7 * kernel / kernel.norm())


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
    with pytest.raises(ValueError, match=r"unknown .*splitting 'dr'\. Known: forward-backward, peaceman-rachford"):
        MonDEQ(N, U, splitting="dr")
    with pytest.raises(ValueError, match="smaller than the kernels"):
        opteq.Equilibrium(MonDEQ(N, U))(torch.zeros(1, 2, 2, 2))


def tiered(splitting: str = "peaceman-rachford") -> TieredMonDEQ:
    torch.manual_seed(0)
    alpha = 0.05 if splitting == "forward-backward" else 1.0
    problem = TieredMonDEQ((2, 3, 2), nn.Conv2d(2, 2, 1), m=0.3, splitting=splitting, alpha=alpha).double()
    with torch.no_grad():
        for gain, size in ((problem.gain_A, 1.5), (problem.gain_B, 0.7), (problem.gain_C, 2.0)):
            for one in gain:
                one.fill_(size)
    return problem


def tiered_W(problem: TieredMonDEQ, side: int) -> Tensor:
    """The dense W, from convolutions of images with one pixel and transposed matrices."""
    sizes = [(n, side >> tier, side >> tier) for tier, n in enumerate(problem.channels)]

    def matrix(name: str, tier: int, stride: int = 1) -> Tensor:
        kernel, gain = getattr(problem, name)[tier].detach(), getattr(problem, f"gain_{name}")[tier].detach()
        pixels = torch.eye(math.prod(sizes[tier]), dtype=torch.float64).reshape(-1, *sizes[tier])
        # An impulse response is what torch calls a flipped kernel.
        padded = nn.functional.pad(pixels, (2, 0, 2, 0), mode="circular")
        images = nn.functional.conv2d(padded, (gain / kernel.norm() * kernel).flip(2, 3), stride=stride)
        return images.flatten(1).T

    rows = [math.prod(size) for size in sizes]
    A, S = (
        torch.zeros(sum(rows), sum(rows), dtype=torch.float64),
        torch.zeros(sum(rows), sum(rows), dtype=torch.float64),
    )
    places = [slice(sum(rows[:tier]), sum(rows[: tier + 1])) for tier in range(len(rows))]
    for tier, place in enumerate(places):
        A[place, place] = matrix("A", tier)
        S[place, place] = matrix("B", tier) - matrix("B", tier).T
        if tier + 1 < len(places):
            A[places[tier + 1], place] = matrix("C", tier, stride=2)
            below = matrix("A", tier + 1).T @ matrix("C", tier, stride=2)
            S[places[tier + 1], place], S[place, places[tier + 1]] = -below, below.T
    return (1 - problem.m) * torch.eye(len(A), dtype=torch.float64) - A.T @ A + S


@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_tiered_mondeq_is_the_fixed_point_of_its_dense_matrix(splitting: str) -> None:
    problem, side = tiered(splitting), 12
    W = tiered_W(problem, side)
    assert torch.linalg.eigvalsh(torch.eye(len(W)) - (W + W.T) / 2)[0] >= problem.m - 1e-12
    x = torch.randn(2, 2, side, side, dtype=torch.float64)
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-10, max_steps=500))
    with torch.no_grad():
        solution = layer.solve(x)
    z = [torch.relu(part) if splitting == "peaceman-rachford" else part for part in solution.state]
    flat = torch.cat([part.flatten(1) for part in z], dim=1)
    given = torch.cat([problem.U(x).flatten(1), torch.zeros(2, flat.shape[1] - 2 * side**2)], dim=1)
    torch.testing.assert_close(flat, torch.relu(flat @ W.T + given))
    torch.testing.assert_close(solution.features, z[-1])
    assert problem.certificate().unique


def test_gradients_of_tiered_mondeq() -> None:
    solver = opteq.Anderson(tol=1e-11, max_steps=500)
    layer = opteq.Equilibrium(tiered(), solver, opteq.Implicit(tol=1e-10, max_steps=200))
    weights = dict(layer.named_parameters())

    def features(image: Tensor, *values: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(layer, dict(zip(weights, values, strict=True)), (image,))
        return found

    assert_slopes(features, [torch.randn(1, 2, 12, 12, dtype=torch.float64), *weights.values()])


def test_mistakes_in_tiered_mondeq_are_named() -> None:
    with pytest.raises(ValueError, match=r"TieredMonDEQ.m should lie in \(0, 1\]; got 2"):
        TieredMonDEQ((2, 2), nn.Identity(), m=2.0)
    with pytest.raises(ValueError, match="3 tiers need sides that 4 divides; got 6 x 8"):
        opteq.Equilibrium(tiered())(torch.zeros(1, 2, 6, 8, dtype=torch.float64))


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


def test_the_first_weights_and_the_stem_of_mdeq_are_the_published_ones() -> None:
    torch.manual_seed(0)
    step = MultiscaleStep((8,), expansion=4, groups=4)
    lengths = nn.Conv2d(32, 8, 3).weight.square().sum(dim=(1, 2, 3)).sqrt()
    assert step.blocks[0].narrow.length.mean().item() == pytest.approx(lengths.mean().item(), rel=0.05)
    x, z = torch.randn(2, 8, 4, 4), torch.randn(2, 8, 4, 4)
    torch.testing.assert_close(step(z, x), step.blocks[0](z, x, None))  # a single scale is not mixed
    for scales, halved, sizes, strides in (
        ((8, 8), 0, [3, 3], [1, 1]),
        ((8, 8, 8), 0, [3, 3, 1], [1, 1, 1]),
        ((8, 8), 1, [3, 3, 1], [2, 1, 1]),
        ((8,), 3, [3, 3, 3, 1], [2, 2, 2, 1]),
    ):
        small = {"hidden": scales, "heads": (2,) * len(scales), "last": 8, "expansion": 1, "downsample": halved}
        model = models.create("mdeq-2.5m", **small)
        layers = [part for part in model.stem.modules() if isinstance(part, nn.Conv2d)]
        assert [(part.kernel_size[0], part.stride[0]) for part in layers] == list(zip(sizes, strides, strict=True))
        affine = [norm.affine for norm in model.equilibrium.problem.f.norms]
        assert affine == [False] * (len(scales) if len(scales) > 1 else 0)


@pytest.mark.parametrize("scales", [(8,), (8, 8)])
def test_mdeq_drops_channels_inside_its_step_the_same_ones_in_a_solve(scales: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    small = {"hidden": scales, "heads": (2,) * len(scales), "last": 8, "expansion": 1, "groups": 4, "dropout": 0.5}
    solving = {"solver": "picard", "tol": 0.0, "max_steps": 6, "gradient": "unrolled", "gradient_steps": 6}
    model = models.create("mdeq-2.5m", num_classes=3, **small, **solving).double()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    first, *factors = model.stem(x)
    assert [tuple(factor.shape) for factor in factors] == [(4, size, 1, 1) for size in scales]
    for factor in factors:
        assert set(factor.unique().tolist()) == {0.0, 2.0}
    step, given = model.equilibrium.problem.f, (first, *factors)
    block = step.blocks[0]
    z = torch.randn_like(first)
    inner = block.second(block.narrow(torch.relu(block.first(block.widen(z)))) * factors[0] + first)
    torch.testing.assert_close(block(z, first, factors[0]), block.third(torch.relu(inner + z)))
    state = Zeros(scales)(given)
    for _ in range(6):
        state = step(state, given)
    features = model.equilibrium(given)
    parts = [(out, its) for out, its in zip(blocks(features), blocks(state), strict=True)]
    weights = list(step.parameters())
    losses = [sum(part.sin().sum() for part in side) for side in zip(*parts, strict=True)]
    gradients = [torch.autograd.grad(loss, weights, retain_graph=True) for loss in losses]
    for out, its in [*parts, *zip(*gradients, strict=True)]:
        torch.testing.assert_close(out, its, rtol=1e-6, atol=1e-9)
    assert isinstance(model.eval().stem(x), Tensor)


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
    for _ in range(5):
        losses.append(nn.functional.cross_entropy(model(x), labels))
        optimizer.zero_grad()
        losses[-1].backward()
        assert all(weight.grad is not None for weight in model.parameters())
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    assert model.equilibrium.problem.certificate().unique is None


@pytest.mark.parametrize("gradient", ["adjoint", "direct"])
def test_a_neural_ode_against_small_steps_of_runge_kutta(gradient: str) -> None:
    torch.manual_seed(0)
    options = {"filters": 5, "augment": 2, "cells": 2, "tol": 1e-5, "gradient": gradient}
    model = models.create("augmented-neural-ode-172k", num_classes=3, **options).double()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    field, steps = model.equilibrium.field, 50
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kernel", [1, 3])
def test_time_is_one_more_channel(kernel: int, device: str) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 5, kernel, padding=kernel // 2).double().to(device, memory_format=torch.channels_last)
    h = torch.randn(2, 3, 6, 6, dtype=torch.float64, device=device, requires_grad=True)
    t = torch.tensor(-0.3, dtype=torch.float64, device=device, requires_grad=True)
    joined = conv(torch.cat([h, t.expand(2, 1, 6, 6)], dim=1))
    zeros = torch.zeros(2, 5, 6, 6, dtype=torch.float64, device=device)
    found = convolve_with_time(conv, t, torch.cat([h, zeros], dim=1), multiple=8)
    torch.testing.assert_close(found[:, :5], joined)
    assert found.shape == (2, 8, 6, 6)
    assert not found[:, 5:].any()
    inputs = [h, t, *conv.parameters()]
    gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in (found, joined)]
    torch.testing.assert_close(*gradients)


def test_a_neural_ode_reports_its_evaluations_and_says_when_it_fails() -> None:
    torch.manual_seed(0)
    model = models.create("neural-ode-172k", num_classes=3, filters=4, cells=2)
    x = torch.randn(2, 3, 4, 4)
    calls = []
    hook = model.equilibrium.field.register_forward_hook(lambda *_: calls.append(1))
    plain = model.equilibrium(x)
    hook.remove()
    with without_warnings(model) as layers:
        (report,) = solve_reports(layers)
        assert report.steps.tolist() == [len(calls)] * 2
        assert len(calls) >= 7  # at least one step of dopri5
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model.equilibrium(x), plain, rtol=0, atol=0)
    with torch.no_grad():
        model.equilibrium.field.last.bias.fill_(torch.inf)
    with pytest.raises(UserError, match="the ODE was not solved"):
        model(x)


SMALL = {
    "plain-199k": {"channels": 4, "hidden": (4, 6, 8)},
    "resnet18": {"width": 4, "blocks": (1, 1)},
    "wide-resnet50": {"width": 4, "blocks": (1, 1)},
    "inception-v2": {"unit": 2},
    "hrnet-13m": {"hidden": (4, 6), "modules": (2,), "heads": (2, 3), "last": 8, "first_width": 4},
    "extractor-0.48m": {"stem_widths": (4, 6, 8, 8), "stem_depth": 1},
    "extractor-resnet50": {"extractor_width": 4, "extractor_blocks": (1, 2), "extractor_strides": (1, 2)},
    "fcn-cityscapes": {"extractor_width": 4, "extractor_blocks": (1, 1), "extractor_strides": (1, 2), "head_width": 8},
    "neural-ode-172k": {"filters": 4, "cells": 2},
    "mondeq-1m": {"hidden": (4, 6, 4), "cells": 2},
    "mdeq-single-18m-imagenet": {"hidden": (8,), "heads": (4,), "last": 8, "groups": 4, "on_failure": "ignore"},
}


# The gradient of tiered monDEQ has a test of its own, and MDEQ of one scale is MDEQ with one part.
SLOW = {"mondeq-1m", "mdeq-single-18m-imagenet"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SMALL])
def test_a_small_one_learns_and_is_loaded_again(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = models.create(name, num_classes=3, **SMALL[name]).double()
    labels = torch.tensor([0, 1, 2, 0])
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64) + labels[:, None, None, None]

    def loss() -> Tensor:
        torch.manual_seed(1)  # drops the same features again
        scores = model(x)
        if name == "fcn-cityscapes":
            assert scores.shape == (4, 3, 32, 32)
            scores = scores.mean(dim=(2, 3))
        assert scores.shape == (4, 3)
        return nn.functional.cross_entropy(scores, labels)

    # How the loss falls over many steps is a matter of rounding: normalisations over four samples are curved, and Adam
    # makes the smallest gradients as large as any. Over a short step it falls by what the gradient says.
    first, weights = loss(), list(model.parameters())
    gradients = torch.autograd.grad(first, weights)
    assert all(bool(gradient.any()) for gradient in gradients)
    step = 1e-4 * first.detach() / sum(gradient.square().sum() for gradient in gradients)
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= step * gradient
    gained = (first - loss()).item() / (1e-4 * first.item())
    # MDEQ stops before its fixed point, of which its gradient is.
    assert gained == pytest.approx(1.0, abs=0.8 if name.startswith("mdeq") else 0.1)
    again = models.from_pretrained(model.save_pretrained(tmp_path))
    torch.testing.assert_close(again(x), model.eval()(x))
    assert models.create(name, num_classes=0, **SMALL[name])(x.float()).shape[0] == 4


def test_a_plain_network_is_the_papers_equation() -> None:
    torch.manual_seed(0)
    layers = PlainLayers(3, (4, 5, 6), injected=(2,)).double()
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)

    def conv(z: Tensor, module: nn.Conv2d) -> Tensor:
        windows = nn.functional.unfold(z, 3, padding=1)
        image = module.weight.flatten(1) @ windows
        return (image if module.bias is None else image + module.bias[:, None]).reshape(2, -1, 6, 6)

    z = conv(x, layers.U["0"]).clamp(min=0)
    z = conv(z, layers.W[0]).clamp(min=0)
    z = (conv(z, layers.W[1]) + conv(x, layers.U["2"])).clamp(min=0)
    torch.testing.assert_close(layers(x), z)
    assert [layer.bias is None for layer in layers.W] == [False, True]  # one b for each layer


def test_shapes_inside_hrnet_and_inception() -> None:
    with on_meta_device():
        image = torch.empty(1, 3, 224, 224)
        model = models.create("hrnet-w18")
        branches = model.equilibrium(model.stem(image))
        assert [tuple(part.shape[1:]) for part in branches] == [(18, 56, 56), (36, 28, 28), (72, 14, 14), (144, 7, 7)]
        model = models.create("inception-v2")
        sizes, z = [], model.stem(image)
        for block in model.equilibrium:
            z = block(z)
            sizes.append((z.shape[1], z.shape[2]))
    assert sizes[:3] == [(256, 28), (320, 28), (576, 14)]
    assert sizes[3:] == [(576, 14), (576, 14), (608, 14), (608, 14), (1056, 7), (1024, 7), (1024, 7)]


def test_mistakes_in_options_of_comparators_are_named() -> None:
    with pytest.raises(ValueError, match="widen = 2 has no effect on basic blocks; set bottleneck = true"):
        models.create("resnet18", widen=2)
    with pytest.raises(ValueError, match=r"modules should have one value for each of 3 stages .* got \[1, 1\]"):
        models.create("hrnet-w18", modules=(1, 1))
    with pytest.raises(ValueError, match="heads and hidden should have one value per branch"):
        models.create("hrnet-w18", heads=(1, 1))
