"""Certified radii: no attack within one changes the prediction, and constants of parts are never exceeded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opteq import models
from opteq.analysis.certified_radius import CertifiedClassifier, head_slopes, lipschitz_bound
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
