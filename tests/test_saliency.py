"""Saliency maps and objective terms against gradients, finite differences and the problems' own values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import opteq
from opteq import operators as op
from opteq.analysis.grad_cam import grad_cam
from opteq.analysis.saliency import saliency_map
from opteq.analysis.terms import equilibrium_inputs, objective_terms


def classifier(problem: opteq.problems.Problem | None = None, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(1)
    problem = problem or opteq.OptEq(op.Conv2d(4, 6, 3, bound=0.9), nn.Conv2d(2, 6, 3, padding=1))
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-10, max_steps=200))
    stem, head = nn.Conv2d(1, 2, 3, padding=1), nn.Sequential(nn.Flatten(), nn.LazyLinear(outputs))
    model = nn.Sequential(stem, layer, head).double()
    model(torch.zeros(1, 1, 6, 6, dtype=torch.float64))
    return model


def make_images(count: int = 2) -> Tensor:
    return torch.rand(count, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_without_noise_it_is_the_length_of_the_scores_gradient() -> None:
    model, x = classifier(), make_images()
    target = torch.tensor([2, 0])
    found = saliency_map(model, x, target, samples=1, noise=0, blur=0)
    eps = 1e-5
    for row, column in ((0, 0), (2, 3), (5, 4)):
        ends = []
        for sign in (1, -1):
            moved = x.clone()
            moved[:, 0, row, column] += sign * eps
            logits = model(moved).detach()
            ends.append(logits.gather(1, target[:, None]).squeeze(1) - logits.mean(1))
        torch.testing.assert_close(found[:, row, column], ((ends[0] - ends[1]) / (2 * eps)).abs(), rtol=1e-4, atol=1e-8)


def test_channels_are_joined_by_their_length() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(2 * 4, 2, bias=False))
    x = torch.rand(3, 2, 2, 2)
    weight = model[1].weight.detach()
    slope = (weight[1] - weight.mean(0)).reshape(2, 2, 2)
    found = saliency_map(model, x, torch.ones(3, dtype=torch.int64))
    torch.testing.assert_close(found, slope.square().sum(0).sqrt().expand(3, 2, 2))


def test_the_predicted_class_is_explained_unless_told_otherwise() -> None:
    model, x = classifier(), make_images()
    predicted = model(x).argmax(1)
    torch.testing.assert_close(saliency_map(model, x, samples=2), saliency_map(model, x, predicted, samples=2))
    other = saliency_map(model, x, (predicted + 1) % 3, samples=2)
    assert not torch.allclose(saliency_map(model, x, samples=2), other)


def test_the_same_seed_draws_the_same_map_and_images_do_not_see_each_other() -> None:
    model, x = classifier(), make_images(2)
    first = saliency_map(model, x, samples=3)
    torch.testing.assert_close(first, saliency_map(model, x, samples=3), rtol=0, atol=0)
    assert not torch.allclose(first, saliency_map(model, x, samples=3, seed=1))
    torch.testing.assert_close(saliency_map(model, x[:1], samples=1), saliency_map(model, x, samples=1)[:1])


def test_noise_averages_over_kinks() -> None:
    class Rough(nn.Module):
        def forward(self, x: Tensor) -> Tensor:  # a slope of 1 with ripples of slope 50 upon it
            score = (x + torch.sin(500 * x) / 10).flatten(1).sum(1)
            return torch.stack([score, -score], dim=1)

    x, target = torch.rand(1, 1, 8, 8), torch.zeros(1, dtype=torch.int64)
    plain = saliency_map(Rough(), x, target, samples=1, noise=0, blur=0)
    smooth = saliency_map(Rough(), x, target, samples=400, noise=0.1, blur=0)
    assert plain.std() > 5 * smooth.std()


def test_the_blur_keeps_constants_and_spreads_points() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 2, bias=False))
    model[1].weight.data.zero_()[0] = 1.0
    x, target = torch.rand(1, 1, 16, 16), torch.zeros(1, dtype=torch.int64)
    torch.testing.assert_close(saliency_map(model, x, target, blur=2.0), torch.full((1, 16, 16), 0.5))
    model[1].weight.data.zero_()[0, 16 * 8 + 8] = 2.0
    spread = saliency_map(model, x, target, blur=1.0)[0]
    torch.testing.assert_close(spread[8, 9] / spread[8, 8], torch.tensor(-0.5).exp())
    torch.testing.assert_close(spread[9, 9] / spread[8, 8], torch.tensor(-1.0).exp())


def test_the_model_keeps_its_mode_and_its_gradients() -> None:
    model = classifier()
    model.train()
    model[2].eval()
    saliency_map(model, make_images(), samples=1)
    objective_terms(model, make_images())
    assert model.training
    assert not model[2].training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples should be a positive integer; got 0"),
        ({"noise": -1.0}, "noise should be a finite number of at least 0; got -1.0"),
        ({"blur": float("nan")}, "blur should be a finite number"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, r"target should have one class per image, shape \(2,\)"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        saliency_map(classifier(), make_images(), **options)  # type: ignore[arg-type]


def test_a_map_needs_images() -> None:
    with pytest.raises(ValueError, match=r"needs images \(batch, channels, height, width\); got \(2, 3\)"):
        saliency_map(nn.Linear(3, 2), torch.rand(2, 3))


def test_terms_add_up_to_the_objective() -> None:
    model, x = classifier(), make_images(3)
    (terms,) = objective_terms(model, x)
    layer = model[1]
    with torch.no_grad():
        hidden = layer.problem(model[0](x))
        end = layer.solve(model[0](x)).state
        torch.testing.assert_close(terms.total_start(), hidden.objective(hidden.start()))
        torch.testing.assert_close(terms.total_end(), hidden.objective(end))
    assert (terms.layer, terms.reason) == ("1", None)
    assert list(terms.start) == list(terms.end) == ["penalty", "quadratic", "coupling", "input"]
    assert (terms.total_end() < terms.total_start()).all()


def test_several_equilibria_are_told_in_running_order_with_their_own_inputs() -> None:
    torch.manual_seed(0)
    first, second = (opteq.Equilibrium(opteq.OptEq(op.Dense(4, 5, bound=0.9), nn.Linear(n, 5))) for n in (3, 4))
    model = nn.Sequential(first, nn.Tanh(), second)
    x = torch.randn(2, 3)
    names = [terms.layer for terms in objective_terms(model, x)]
    assert names == ["0", "2"]
    given = equilibrium_inputs(model, x)
    torch.testing.assert_close(given[1][2], torch.tanh(first(x)))
    assert not model[0].problem._forward_pre_hooks  # nothing is left behind


def test_branches_are_merged_by_name() -> None:
    parts = [opteq.Branch(op.Conv2d(2, 3, 3, bound=0.9), nn.Conv2d(2, 3, 1), scale) for scale in (1, 2)]
    (terms,) = objective_terms(classifier(opteq.POptEq(parts, fuse="sum")), make_images())
    assert "1.coupling" in terms.end
    merged = terms.merged()
    assert list(merged.end) == ["penalty", "quadratic", "coupling", "input"]
    torch.testing.assert_close(merged.end["input"], terms.end["0.input"] + terms.end["1.input"])
    torch.testing.assert_close(merged.total_end(), terms.total_end())


def test_a_problem_without_an_objective_says_why() -> None:
    layers = [(op.Dense(4, 5, bound=0.9), nn.Linear(3, 5)) for _ in range(3)]
    (terms,) = objective_terms(opteq.Equilibrium(opteq.DeepOptEq(layers)), torch.randn(2, 3))
    assert terms.layer == ""
    assert "only one or two layers have a joint objective" in str(terms.reason)
    with pytest.raises(ValueError, match="there are no terms"):
        terms.total_end()
    (terms,) = objective_terms(opteq.Equilibrium(opteq.DeepOptEq(layers[:2])), torch.randn(2, 3))
    assert list(terms.end) == ["objective"]
    for W, _ in layers:
        W.bound = None
        W.weight.data.mul_(6)  # no layer is a prox now, and its envelope is not to be found
    layer = opteq.Equilibrium(opteq.DeepOptEq(layers[:2], activation="tanh"), on_failure="ignore")
    (terms,) = objective_terms(layer, torch.randn(2, 3))
    assert "preimage was not found" in str(terms.reason)


def test_a_model_without_equilibria_has_no_terms() -> None:
    assert objective_terms(nn.Linear(3, 2), torch.randn(2, 3)) == []


def test_grad_cam_of_a_pooled_linear_head_is_a_class_activation_map() -> None:
    """There the gradient of a logit by a feature is its weight over the number of places: CAM, by hand."""
    torch.manual_seed(0)
    layer = opteq.Equilibrium(
        opteq.OptEq(op.Conv2d(4, 6, 3, bound=0.9), nn.Conv2d(2, 6, 3, padding=1)), opteq.Anderson(tol=1e-10)
    )
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    model = opteq.models.Classifier(nn.Conv2d(1, 2, 3, padding=1), layer, head, {"name": "mine", "num_classes": 3})
    model, x, target = model.double().train(), make_images(), torch.tensor([2, 0])
    found = grad_cam(model, x, target)
    assert model.training
    features = layer(model.stem(x)).detach()
    wanted = torch.einsum("bc,bchw->bhw", head[2].weight[target], features).clamp_min(0) / 36
    torch.testing.assert_close(found.double(), wanted.detach(), atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(grad_cam(model, x), grad_cam(model, x, model.eval()(x).argmax(dim=1)))
    with pytest.raises(ValueError, match=r"target should have one class per image, shape \(2,\); got \(1,\)"):
        grad_cam(model, x, target[:1])
    with pytest.raises(TypeError, match=r"Grad-CAM needs a classifier of opteq.models; got Sequential"):
        grad_cam(classifier(), x)
