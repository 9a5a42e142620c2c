"""Certified radii: no attack within one changes the prediction, and constants of parts are never exceeded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import opteq
from opteq import models
from opteq.analysis.certified_radius import CertifiedClassifier, _pooling, head_slopes, lipschitz_bound
from opteq.common.errors import UserError
from opteq.models import Classifier
from opteq.models.blocks.pyramid import Pyramid
from opteq.models.blocks.residual import InvertedBlock, ResidualBlock
from opteq.states import blocks

MODELS: dict[str, dict[str, Any]] = {
    "opteq-digits": {"channels": 4, "hidden": [6], "pool": 2},
    "mopteq-193k": {"channels": 4, "hidden": [6, 6, 6], "pool": 1, "diversity": 0.0},
    "opteq-199k": {"channels": 4, "hidden": [5, 6], "injected": [0, 1], "pool": 2},
}


def small(name: str, **more: Any) -> Classifier:
    torch.manual_seed(0)
    options = {**MODELS[name], "solver": "anderson", "tol": 1e-9, "max_steps": 200, **more}
    model = models.create(name, num_classes=3, in_channels=1, **options)
    model(torch.rand(16, 1, 8, 8))  # running averages of something
    return model.double().eval()


def attacked(model: Classifier, x: Tensor, labels: Tensor, radius: Tensor) -> Tensor:
    """The smallest margin that gradient steps find on the sphere of each image's radius."""
    start = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
    length = radius.view(-1, 1, 1, 1)
    delta = start / start.flatten(1).norm(dim=1).view_as(length) * length
    worst = torch.full_like(radius, torch.inf)
    for _ in range(6):
        delta = delta.detach().requires_grad_()
        logits = model(x + delta)
        own = logits.gather(1, labels[:, None]).squeeze(1)
        margin = own - logits.scatter(1, labels[:, None], -torch.inf).amax(dim=1)
        worst = torch.minimum(worst, margin.detach())
        (slope,) = torch.autograd.grad(margin.sum(), delta)
        delta = -slope / slope.flatten(1).norm(dim=1).view_as(length) * length
    return worst


@pytest.mark.parametrize("name", MODELS)
def test_nothing_within_the_radius_changes_the_prediction(name: str) -> None:
    model, x = small(name), torch.rand(3, 1, 8, 8, dtype=torch.float64)
    found = CertifiedClassifier(model)(x)
    assert torch.equal(found.predicted, model(x).argmax(dim=1))
    assert float(found.radius.max()) > 0
    assert bool((attacked(model, x, found.predicted, 0.999 * found.radius) > 0).all())
    assert found.probability == (1.0 if found.source == "weights" else 0.999)


def test_at_the_point_where_the_weights_say_nothing() -> None:
    """With a batch normalisation after U the constant from the weights is unknown; the one at the point is not."""
    model = small("opteq-digits", injection_norm="batch")
    assert model.equilibrium.problem.certificate().lipschitz is None
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    found = CertifiedClassifier(model)(x, steps=20)
    assert found.source == "point"
    assert found.probability == pytest.approx(0.999)
    assert float(found.radius.max()) > 0
    assert bool((attacked(model, x, found.predicted, 0.999 * found.radius) > 0).all())


def test_pixels_that_were_divided_count_as_pixels() -> None:
    model, x = small("opteq-digits"), torch.rand(3, 1, 8, 8, dtype=torch.float64)
    plain, divided = (CertifiedClassifier(model, std)(x).radius for std in ((1.0,), (0.25,)))
    torch.testing.assert_close(divided, plain / 4)


PARTS: dict[str, Callable[[], nn.Module]] = {
    "residual": lambda: ResidualBlock(3, 5, stride=2),
    "inverted": lambda: InvertedBlock(3, 4, stride=2),
    "pyramid": lambda: Pyramid(3, (4, 6), depth=1, levels=(0, 1, 1)),
    "sequence": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)),
}


@pytest.mark.parametrize("part", PARTS)
def test_bounds_of_parts_hold_and_are_not_far_off(part: str) -> None:
    torch.manual_seed(0)
    module = PARTS[part]()
    module.train()(4 * torch.rand(8, 3, 7, 7))
    module.double().eval()
    bound, largest = lipschitz_bound(module), 0.0
    for _ in range(2):
        at = torch.rand(1, 3, 7, 7, dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(lambda v: _joined(module(v)), at).flatten(1)
        largest = max(largest, float(torch.linalg.matrix_norm(jacobian, 2)))
    assert largest <= bound
    assert bound < (100 if part == "pyramid" else 12) * largest  # products of norms add up


def largest_singular_value(module: nn.Module, *shape: int) -> float:
    at = torch.rand(shape, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(module, at).reshape(-1, at.numel())
    return float(torch.linalg.matrix_norm(jacobian, 2))


class Louder(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class LouderSequence(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class LouderConv(nn.Conv2d):
    def _conv_forward(self, *given: Any) -> Tensor:
        return 3 * super()._conv_forward(*given)


class LouderNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *given: 3 * given[-1])
    return module


LOUDER: dict[str, Callable[[], nn.Module]] = {
    "Louder": Louder,
    "LouderSequence": lambda: LouderSequence(nn.ReLU()),
    "LouderConv": lambda: nn.Sequential(LouderConv(3, 3, 1), nn.BatchNorm2d(3)),
    "LouderNorm": lambda: nn.Sequential(nn.Conv2d(3, 3, 1), LouderNorm(3)),
    "ReLU": lambda: hooked(nn.ReLU()),
    "Conv2d": lambda: nn.Sequential(hooked(nn.Conv2d(3, 3, 1)), nn.BatchNorm2d(3)),
    "ResidualBlock": lambda: hooked(ResidualBlock(3, 3)),
    "AvgPool2d": lambda: nn.AvgPool2d(2, divisor_override=1),
}


@pytest.mark.parametrize("name", LOUDER)
def test_what_is_not_as_its_class_says_is_named(name: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(UserError, match=f"no Lipschitz constant is known for a {name}"):
        lipschitz_bound(LOUDER[name]().double().eval())


@pytest.mark.parametrize("wrap", [spectral_norm, weight_norm])
def test_a_parametrised_convolution_is_folded_with_its_normalisation(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(wrap(nn.Conv2d(3, 3, 3, padding=1, bias=False)), nn.BatchNorm2d(3)).double().eval()
    nn.init.constant_(module[1].weight, 20.0)
    state = torch.get_rng_state()
    bound = lipschitz_bound(module)
    assert torch.equal(torch.get_rng_state(), state)
    largest = largest_singular_value(module, 1, 3, 9, 9)
    assert largest <= bound < 1.3 * largest


@pytest.mark.parametrize(("side", "count"), [(1, 4), (2, 4), (3, 4), (5, 3), (8, 3), (8, 4)])
def test_the_norm_of_the_pooling_is_exact(side: int, count: int) -> None:
    """Windows overlap where a side is no multiple of their number, and more than two do where there are more."""
    pool = nn.AdaptiveAvgPool2d(count)
    found = _pooling(pool, torch.Size((side, side)))
    assert found == pytest.approx(largest_singular_value(pool, 1, 1, side, side))


@pytest.mark.parametrize("change", ["weights", "part", "penalty", "eps", "problem"])
def test_constants_follow_the_model(change: str) -> None:
    model, x = small("opteq-digits"), torch.rand(3, 1, 8, 8, dtype=torch.float64)
    certify = CertifiedClassifier(model)
    before = certify(x).radius
    assert torch.equal(certify(x).radius, before)
    if change == "weights":
        model.equilibrium.problem.U.weight.data.mul_(30)  # past the counters of changes
    elif change == "part":
        model.stem.append(nn.Conv2d(4, 4, 1, bias=False).double())
        nn.init.eye_(model.stem[-1].weight[:, :, 0, 0].data.fill_(0)).mul_(30)
    elif change == "penalty":
        model.equilibrium.problem.penalty = opteq.penalties.ELU(1.02)
    elif change == "eps":
        model.stem[0].norm.eps = 1.0
    else:
        model.equilibrium.problem.U = nn.Sequential(model.equilibrium.problem.U, Louder())
        with pytest.raises(UserError, match="known neither from the weights nor in a ball"):
            certify(x)
        return
    found = certify(x)
    torch.testing.assert_close(found.radius, CertifiedClassifier(model)(x).radius)
    assert bool((attacked(model, x, found.predicted, 0.999 * found.radius) > 0).all())
    assert not torch.equal(found.radius, before)


def test_a_model_is_refused_whose_parts_do_something_else() -> None:
    def louder_head(model: Classifier) -> None:
        model.head.norms[0].append(Louder())

    changes: dict[str, Callable[[Classifier], Any]] = {
        "Equilibrium": lambda model: hooked(model.equilibrium),
        "Head": lambda model: hooked(model.head),
        "Linear": lambda model: hooked(model.head.linear),
        "Louder": louder_head,
        "Classifier": hooked,
    }
    x = torch.rand(1, 1, 8, 8, dtype=torch.float64)
    for name, change in changes.items():
        model = small("opteq-digits")
        certify = CertifiedClassifier(model)
        change(model)
        with pytest.raises(UserError, match=f"no Lipschitz constant is known for a {name}"):
            certify(x)


def test_another_problem_than_the_certificate_is_of_has_no_radius() -> None:
    class Other(opteq.OptEq):
        def bind(self, x: Tensor) -> Any:
            return super().bind(30 * x)

    model = small("opteq-digits")
    model.equilibrium.problem.__class__ = Other
    with pytest.raises(UserError, match="known neither from the weights nor in a ball"):
        CertifiedClassifier(model)(torch.rand(1, 1, 8, 8, dtype=torch.float64))


@pytest.mark.parametrize("options", [{}, {"injection_norm": "batch"}])
def test_an_equilibrium_that_was_not_found_has_radius_0(options: dict[str, Any]) -> None:
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    for tol, max_steps, found in ((1e-9, 1, False), (0.0, 1, False), (0.0, 100, True)):
        model = small("opteq-digits", max_steps=max_steps, on_failure="ignore", tol=tol, **options)
        assert CertifiedClassifier(model)(x, steps=20).radius.gt(0).tolist() == [found] * 2


def _joined(made: Any) -> Tensor:
    return torch.cat([part.flatten() for part in blocks(made)])


@pytest.mark.parametrize("options", [{"pool": 3}, {"pool": 1, "readout": "mean"}, {"pool": 2, "head_width": 5}])
def test_slopes_of_the_head(options: dict[str, Any]) -> None:
    model = small("mopteq-193k", **options)
    features = tuple(torch.randn(1, 4, side, side, dtype=torch.float64, requires_grad=True) for side in (8, 8, 8))
    slopes = head_slopes(model.head, features)
    for _ in range(4):
        logits = model.head(features)
        for a, b in ((0, 1), (1, 2), (2, 0)):
            gradient = torch.autograd.grad(logits[0, a] - logits[0, b], features, retain_graph=True)
            size = float(torch.cat([one.flatten() for one in gradient]).norm())
            assert 0 < size <= float(slopes[a, b].detach()) * (1 + 1e-9)
        features = tuple((one + 1).detach().requires_grad_() for one in features)


def test_the_slope_of_an_open_head_is_exact() -> None:
    """Where every unit is on, the head is affine and its slope is the constant."""
    model = small("opteq-digits")
    features = torch.full((1, 4, 8, 8), 1e3, dtype=torch.float64, requires_grad=True)
    logits = model.head(features)
    (gradient,) = torch.autograd.grad(logits[0, 0] - logits[0, 1], features)
    slope = head_slopes(model.head, (features,))[0, 1].detach()
    torch.testing.assert_close(gradient.norm(), slope)


def test_what_has_no_constant_is_named() -> None:
    with pytest.raises(ValueError, match="no Lipschitz constant is known for a ResidualBlock"):
        lipschitz_bound(ResidualBlock(3, 3, attention=True))
    with pytest.raises(ValueError, match="needs a classifier with one equilibrium layer between stem and head"):
        CertifiedClassifier(models.create("resnet18-cifar", num_classes=3))
