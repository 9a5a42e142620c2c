"""The attack stays where it may go, finds what there is to find, and leaves the model as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from opteq import models
from opteq.analysis import PGD
from opteq.models import Classifier

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def normalised(pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(values, dtype=pixels.dtype).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (pixels - mean) / std


def pixels_of(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(values, dtype=images.dtype).view(1, 3, 1, 1) for values in (MEAN, STD))
    return images * std + mean


def small(**options: Any) -> Classifier:
    """An equilibrium network with everything that an attack could disturb: batch normalisation, dropout, norms."""
    torch.manual_seed(0)
    usual = {"channels": 4, "hidden": [6], "pool": 1, "dropout": 0.3, "injection_norm": "batch", "tol": 1e-5}
    return models.create("opteq-digits", num_classes=3, **{**usual, **options})


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    epsilon=st.sampled_from([1 / 255, 8 / 255, 0.3, 1.0]),
    steps=st.integers(1, 4),
    step_size=st.sampled_from([None, 0.01, 1.0]),
    random_start=st.booleans(),
    seed=st.integers(0, 3),
)
def test_it_stays_in_the_ball_and_in_the_range_of_pixels(
    epsilon: float, steps: int, step_size: float | None, random_start: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    pixels = torch.rand(4, 3, 5, 5, dtype=torch.float64).round(decimals=1)  # some are black or white already
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).double()
    moved = PGD(epsilon, steps, step_size, random_start)(
        model, normalised(pixels), torch.tensor([0, 1, 2, 0]), MEAN, STD
    )
    found = pixels_of(moved)
    assert float((found - pixels).abs().max()) <= epsilon + 1e-12
    assert float(found.min()) >= -1e-12
    assert float(found.max()) <= 1 + 1e-12
    assert not moved.requires_grad
    assert float((found - pixels).abs().max()) > 0


@pytest.mark.parametrize("random_start", [False, True])
def test_it_finds_the_worst_image_of_a_linear_model(random_start: bool) -> None:
    """Of two classes with a linear score, the worst image of a ball is known: every pixel against its weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 2)).double()
    pixels, labels = torch.rand(6, 3, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1, 0])
    moved = PGD(0.1, steps=10, random_start=random_start)(model, normalised(pixels), labels, MEAN, STD)
    weight = model[1].weight.detach()
    against = (weight[1 - labels] - weight[labels]).sign().view_as(pixels)
    torch.testing.assert_close(pixels_of(moved), (pixels + 0.1 * against).clamp(0, 1), atol=1e-12, rtol=0)


@pytest.mark.parametrize("gradient", ["implicit", "phantom"])
def test_it_raises_the_loss_of_every_image(gradient: str) -> None:
    model, pixels, labels = small(gradient=gradient), torch.rand(8, 3, 8, 8), torch.arange(8) % 3
    model(normalised(torch.rand(32, 3, 8, 8)))  # running averages of something
    x = normalised(pixels)

    def losses(images: Tensor) -> Tensor:
        return F.cross_entropy(model.eval()(images), labels, reduction="none").detach()

    gentle, thorough = (PGD(8 / 255, steps, random_start=False)(model, x, labels, MEAN, STD) for steps in (1, 10))
    assert bool((losses(gentle) > losses(x)).all())
    assert float(losses(thorough).mean()) >= float(losses(gentle).mean())


def test_the_model_is_left_as_it_was() -> None:
    model, x, labels = small().train(), torch.rand(5, 3, 8, 8), torch.tensor([0, 1, 2, 0, 1])
    model.stem.eval()  # a part that its owner has frozen
    F.cross_entropy(model(x), labels).backward()
    frozen = next(model.head.parameters())
    frozen.grad = None
    before = copy.deepcopy(model)
    chance = torch.get_rng_state()
    with torch.no_grad():  # a caller who measures has gradients off
        PGD(8 / 255, 3)(model, x, labels, noise=torch.zeros_like(x))
    assert torch.equal(torch.get_rng_state(), chance)
    buffers, parameters = dict(before.named_buffers()), dict(before.named_parameters())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    for name, parameter in model.named_parameters():
        old = parameters[name]
        assert torch.equal(parameter, old), name
        assert parameter.requires_grad
        assert (parameter.grad is None) == (parameter is frozen)
    assert [module.training for module in model.modules()] == [module.training for module in before.modules()]
    assert model.training
    assert not model.stem.training


def test_an_attack_does_not_depend_on_batch_mates() -> None:
    model, x = small().double(), torch.rand(5, 3, 8, 8, dtype=torch.float64)
    labels, noise = torch.tensor([0, 1, 2, 0, 1]), 2 * torch.rand(5, 3, 8, 8, dtype=torch.float64) - 1
    attack = PGD(8 / 255, 3)
    whole = attack(model, x, labels, noise=noise)
    alone = [attack(model, x[i : i + 1], labels[i : i + 1], noise=noise[i : i + 1]) for i in range(5)]
    torch.testing.assert_close(whole, torch.cat(alone), atol=1e-12, rtol=0)


def test_the_start_is_the_one_given() -> None:
    model, x, labels = small(), torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    noise = 2 * torch.rand_like(x) - 1
    first, again = (PGD(0.1, 2)(model, x, labels, noise=noise) for _ in range(2))
    assert torch.equal(first, again)
    other = PGD(0.1, 2)(model, x, labels, noise=-noise)
    assert not torch.equal(first, other)
    torch.manual_seed(1)
    drawn = PGD(0.1, 2)(model, x, labels)
    torch.manual_seed(1)
    assert torch.equal(drawn, PGD(0.1, 2)(model, x, labels))


def test_shares_of_classes_are_labels_too() -> None:
    model, x, labels = small(), torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    attack = PGD(0.1, 2, random_start=False)
    assert torch.equal(attack(model, x, labels), attack(model, x, F.one_hot(labels, 3).float()))


def test_maps_of_classes_are_labels_too() -> None:
    """A pixel without a class pulls at nothing: with a model of single pixels, it stays where it is."""
    torch.manual_seed(0)
    x, labels = torch.rand(2, 3, 4, 4) / 2 + 0.25, torch.randint(0, 5, (2, 4, 4))
    labels[:, 0] = 255
    moved = PGD(0.1, 2, random_start=False)(nn.Conv2d(3, 5, 1), x, labels)
    assert torch.equal(moved[:, :, 0], x[:, :, 0])
    assert float((moved[:, :, 1:] - x[:, :, 1:]).abs().min()) > 0.05


class Broken(nn.Module):
    """Its gradient is NaN for the first image of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        which = torch.arange(len(x))[:, None] == 0
        return self.linear(x.flatten(1)) + torch.where(which, 0 * x.flatten(1)[:, :1], x.new_ones(1)).sqrt()


def test_where_there_is_no_gradient_a_image_stays() -> None:
    torch.manual_seed(0)
    x = torch.rand(3, 3, 2, 2) / 2 + 0.25
    moved = PGD(0.1, 3, random_start=False)(Broken(), x, torch.tensor([0, 1, 0]))
    assert bool(moved.isfinite().all())
    assert float((moved[1:] - x[1:]).abs().min()) > 0.05
    assert float((moved[0].flatten()[0] - x[0].flatten()[0]).abs()) == 0


def test_bfloat16() -> None:
    model, x, labels = small(tol=1e-2), torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    with torch.autocast("cpu", torch.bfloat16):
        moved = PGD(0.1, 3)(model, x, labels)
    assert moved.dtype == torch.float32
    assert 0 < float((moved - x).abs().max()) <= 0.1 + 1e-6


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"epsilon": 0.0}, ValueError, r"PGD.epsilon should be a positive finite number; got 0.0"),
        ({"epsilon": 8}, ValueError, r"PGD.epsilon should lie in \(0, 1\]; got 8"),
        ({"epsilon": 0.1, "steps": 0}, ValueError, "PGD.steps should be at least 1; got 0"),
        ({"epsilon": 0.1, "step_size": -1.0}, ValueError, "PGD.step_size should be a positive finite number"),
        ({"epsilon": 0.1, "random_start": 1}, TypeError, "PGD.random_start should be True or False; got 1"),
        ({"epsilon": 0.1, "step": 3}, TypeError, "PGD has no option 'step'; did you mean 'steps'?"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PGD(**options)


@pytest.mark.parametrize(("mean", "std"), [((0.5,), (0.0,)), ((0.5, 0.5), (1.0, 1.0)), ((0.5,) * 3, (1.0,))])
def test_wrong_normalisation(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"one value for each of 3 channels, or one for all, std above 0; got \("):
        PGD(0.1)(nn.Flatten(), torch.rand(2, 3, 1, 1), torch.tensor([0, 1]), mean, std)
