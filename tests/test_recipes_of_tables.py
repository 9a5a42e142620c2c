"""The models of the papers' smaller tables: each trains on random images, and its equilibria are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from opteq import models
from opteq.models.families.geq import NormalisedInjection
from opteq.training import load_recipe

KERNELS = [f"mopteq-8m-cifar100-{kernel}" for kernel in ("sigmoid", "polynomial")]
ABLATION = [f"mopteq-193k-cifar10-ablation{suffix}" for suffix in ("", "-no-diversity", "-no-heritage", "-no-ties")]
ATTACKED = ["mopteq-193k-cifar10-pgd", "mopteq-193k-cifar10-pgd-perturbation"]
SIX = ["mopteq-8m-cifar100-randaugment", "mopteq-8m-cifar100-superclasses", "geq-8m-cifar100-superclasses"]
NAMES = [*KERNELS, *ABLATION, *ATTACKED, *SIX]


def trains(name: str, side: int, **smaller: Any) -> None:
    """Two steps of the recipe's optimiser, on attacked images where it says so."""
    torch.manual_seed(0)
    recipe = load_recipe(name)
    model = models.create(recipe.model.name, num_classes=10, **{**recipe.model.options, **smaller}, on_failure="raise")
    images, labels = torch.rand(4, 3, side, side), torch.arange(4)
    optimiser = torch.optim.SGD(model.parameters(), lr=recipe.optimizer.lr, momentum=recipe.optimizer.momentum)
    attack, losses = recipe.adversary.training(), []
    for _ in range(2):
        seen = images if attack is None else attack(model, images, labels)
        loss = F.cross_entropy(model(seen), labels)
        optimiser.zero_grad()
        loss.backward()
        for part, parameter in model.named_parameters():
            assert parameter.grad is not None, part
            assert bool(parameter.grad.isfinite().all()), part
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    features = model.equilibrium(model.stem(images))
    for z in features if isinstance(features, tuple) else (features,):
        assert float(z.detach().square().mean()) > 1e-8  # not the equilibrium at zero, which sees no input


@pytest.mark.parametrize("name", NAMES)
def test_it_trains(name: str) -> None:
    """With fewer channels, on smaller images."""
    branches = len(load_recipe(name).model.options.get("scales", [1] * (6 if "8m" in name else 3)))
    side = 16 if branches == 6 else 8
    trains(name, side, channels=16, hidden=[8] * branches)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KERNELS, "mopteq-8m-cifar100-randaugment"])
def test_it_trains_at_its_own_size(name: str) -> None:
    trains(name, 32)


def test_samples_are_brought_to_a_length() -> None:
    torch.manual_seed(0)
    inner = nn.Conv2d(3, 5, 3, padding=1)
    x = torch.randn(4, 3, 6, 6)
    found, plain = NormalisedInjection(inner, 2.5)(x), inner(x)
    assert found.flatten(1).norm(dim=1).tolist() == pytest.approx([2.5] * 4, rel=1e-5)
    torch.testing.assert_close(F.normalize(found.flatten(1)), F.normalize(plain.flatten(1)))
    assert torch.autograd.gradcheck(
        NormalisedInjection(inner.double(), 2.5), torch.randn(2, 3, 3, 3).double().requires_grad_()
    )
    nothing = NormalisedInjection(nn.Identity(), 1.0)(torch.zeros(2, 3))
    assert torch.equal(nothing, torch.zeros(2, 3))
    half = NormalisedInjection(nn.Identity(), 1.0)(torch.full((1, 70_000), 8.0, dtype=torch.float16))
    assert half.dtype == torch.float16
    assert float(half.float().norm()) == pytest.approx(1, rel=1e-2)
    with pytest.raises(ValueError, match="input_length should be a finite number above 0"):
        models.create("geq-5m", input_length=0.0)
