"""Evidence adds up to the difference of logits; counterfactuals are the equilibria of what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opteq
from opteq import models
from opteq import operators as op
from opteq.analysis.evidence import _spread, class_evidence, piecewise_affine
from opteq.analysis.rescaled import Rescaled, counterfactuals, rescaled_terms
from opteq.common.errors import UserError

SMALL: dict[str, Any] = {"channels": 4, "hidden": [5]}
BRANCHES: dict[str, Any] = {"channels": 4, "hidden": [4, 6], "scales": [1, 2], "bound": 0.9}


def make(name: str, **options: Any) -> models.Classifier:
    """A model in float64 whose equilibria are exact, with statistics as after training."""
    torch.manual_seed(0)
    model = models.create(name, num_classes=4, in_channels=2, **options).double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    for _, layer in models.equilibria(model):
        layer.solver = replace(layer.solver, tol=1e-13, max_steps=2000)
        layer.gradient = opteq.Implicit(tol=1e-13, max_steps=500)
    return model.eval()


def images(count: int = 3) -> Tensor:
    return torch.randn(count, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


MODELS = [
    ("opteq-digits", SMALL),
    ("opteq-162k", {"channels": 4, "hidden": [5, 6], "injected": [1]}),
    ("mopteq-193k", {**BRANCHES, "diversity": 0.01}),
    ("popteq-193k", BRANCHES),
    ("geq-5m", {**BRANCHES, "patch": 2, "split": 2, "projection": 3, "stem_depth": 0}),
    ("opteq-digits", {**SMALL, "head_width": 6}),
]


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_the_shares_add_up(name: str, options: dict[str, Any]) -> None:
    model, x = make(name, **options), images()
    found = class_evidence(model, x)
    with torch.no_grad():
        best = model(x).topk(2, dim=1)
    torch.testing.assert_close(found.difference, best.values[:, 0] - best.values[:, 1])
    assert torch.equal(found.target, best.indices[:, 0])
    assert torch.equal(found.rival, best.indices[:, 1])
    for parts in (
        found.branches().sum(1),
        torch.cat(found.channels(), dim=1).sum(1),
        found.regions().sum((1, 2)),
    ):
        torch.testing.assert_close(parts + found.bias, found.difference)
    torch.testing.assert_close(found.pixels.sum((1, 2, 3)) + found.offset, found.difference)


def test_nothing_but_the_last_bias_is_without_a_share() -> None:
    model, x = make("opteq-digits", **SMALL), images()
    found = class_evidence(model, x)
    bias = model.head.linear.bias
    torch.testing.assert_close(found.bias, (bias[found.target] - bias[found.rival]).detach())


@pytest.mark.parametrize(("name", "options"), [MODELS[0], MODELS[1], MODELS[3]])
def test_pixels_are_exact_within_a_linear_region(name: str, options: dict[str, Any]) -> None:
    """The affine map that evidence reads off at an image is the model's own around it."""
    model, x = make(name, **options), images()
    found = class_evidence(model, x)
    assert found.affine
    slope = found.pixels / x
    nearby = x + 1e-6 * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = model(nearby)
    rows = torch.arange(len(x))
    difference = logits[rows, found.target] - logits[rows, found.rival]
    predicted = (slope * nearby).sum((1, 2, 3)) + found.offset
    torch.testing.assert_close(difference, predicted, rtol=0, atol=1e-11)


def test_smooth_models_are_not_called_affine() -> None:
    assert not piecewise_affine(make("geq-5m", **MODELS[4][1]))
    assert not piecewise_affine(make("opteq-digits", **SMALL, activation="tanh"))
    assert not piecewise_affine(make("opteq-digits", **SMALL, injection_norm="group"))
    assert piecewise_affine(make("opteq-digits", **SMALL, injection_norm="batch"))


def test_a_chosen_pair_and_wrong_ones() -> None:
    model, x = make("opteq-digits", **SMALL), images()
    pair = torch.tensor([0, 1, 2]), torch.tensor([3, 3, 3])
    found = class_evidence(model, x, *pair)
    with torch.no_grad():
        logits = model(x)
    torch.testing.assert_close(found.difference, logits[torch.arange(3), pair[0]] - logits[:, 3])
    with pytest.raises(UserError, match="two different classes"):
        class_evidence(model, x, pair[0], pair[0])
    with pytest.raises(UserError, match="from 0 to 3"):
        class_evidence(model, x, torch.tensor([0, 1, 4]))
    with pytest.raises(TypeError, match="classifier"):
        class_evidence(nn.Linear(2, 2), x)  # type: ignore[arg-type]


def test_spreading_keeps_sums() -> None:
    maps = torch.rand(2, 3, 5, dtype=torch.float64)
    finer = _spread(_spread(maps, 7, 1), 10, 2)
    assert finer.shape == (2, 7, 10)
    torch.testing.assert_close(finer.sum((1, 2)), maps.sum((1, 2)))


@pytest.mark.parametrize("factors", [{"coupling": 0.3}, {"input": 2.0, "quadratic": 1.5}, {"coupling": 0.0}])
def test_a_rescaled_objective_is_minimised(factors: dict[str, float]) -> None:
    torch.manual_seed(0)
    W, U = op.Dense(4, 6, bound=0.9).double(), nn.Linear(3, 6).double()
    x = torch.randn(2, 3, dtype=torch.float64)
    layer = opteq.Equilibrium(Rescaled(opteq.OptEq(W, U), factors), opteq.Anderson(tol=1e-12, max_steps=500))
    state = layer.solve(x).state.detach()
    # The formula as one would write it, minimised by projected gradient steps.
    y = torch.zeros_like(state)
    coupling, given, quadratic = (factors.get(name, 1.0) for name in ("coupling", "input", "quadratic"))
    with torch.no_grad():
        gram, c = W.prepare().weight @ W.prepare().weight.T, U(x)
        for _ in range(1000):
            y = (y - 0.5 * (quadratic * y - coupling * y @ gram - given * c)).clamp_min(0)
    torch.testing.assert_close(state, y, rtol=1e-8, atol=1e-9)


def test_plain_steps_converge_with_a_larger_quadratic_term() -> None:
    torch.manual_seed(0)
    problem = opteq.OptEq(op.Dense(4, 6, bound=0.9), nn.Linear(3, 6))
    layer = opteq.Equilibrium(Rescaled(problem, {"quadratic": 4.0}), opteq.Picard(tol=1e-5, max_steps=100))
    assert bool(layer.solve(torch.randn(3, 3)).converged.all())


def test_factors_of_one_change_nothing() -> None:
    model, x = make("mopteq-193k", **BRANCHES, diversity=0.01), images()
    with torch.no_grad():
        before = model(x)
        for answer in counterfactuals(model, x, factors=(1.0,)):
            torch.testing.assert_close(answer.logits, before, rtol=1e-7, atol=1e-8)
        terms = [answer.term for answer in counterfactuals(model, x, factors=(1.0,))]
        torch.testing.assert_close(model(x), before)
    assert terms == ["quadratic", "input", "heritage", "diversity"]


def test_branches_side_by_side_are_scaled_together() -> None:
    model, x = make("popteq-193k", **BRANCHES), images()
    layer = model.equilibrium
    with torch.no_grad(), rescaled_terms(layer, {"input": 0.0}):
        features = layer(model.stem(x))
    assert all(float(part.abs().max()) < 1e-9 for part in features)  # without an input the state is zero
    with pytest.raises(UserError, match="did you mean 'coupling'"), rescaled_terms(layer, {"couplin": 0.0}):
        model(x)
    assert type(layer.problem).__name__ == "POptEq"


def test_an_objective_without_a_minimum_is_reported() -> None:
    model, x = make("opteq-digits", **SMALL), images()
    model.equilibrium.solver = opteq.Picard(tol=1e-6, max_steps=100)
    found = {(one.term, one.factor): one.converged for one in counterfactuals(model, x, factors=(0.0, 4.0))}
    assert bool(found["coupling", 0.0].all())
    assert not bool(found["coupling", 4.0].any())
