"""Training beyond the contraction bound: the Jacobian penalty and limit against dense Jacobians, bounds that grow."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import opteq
from opteq import models
from opteq import operators as op
from opteq.common.errors import UserError
from opteq.training import load_recipe, train
from opteq.training.optim.bounds import GrowingBounds
from opteq.training.optim.jacobian import RadiusLimit, squared_jacobian, squared_radius
from opteq.training.optim.losses import Loss, cross_entropy
from opteq.training.recipe.sections import LossSection, TrainSection
from oracles import dense_jacobian


def ring(activation: str = "tanh") -> opteq.MOptEq:
    torch.manual_seed(0)
    branches = [opteq.Branch(op.Dense(3, 3 + i, bound=1.5), nn.Linear(4, 3 + i)) for i in range(2)]
    return opteq.MOptEq(branches, diversity=0.1, smoothing=0.3, activation=activation).double()


def test_all_probes_together_give_the_dense_jacobian() -> None:
    problem = ring()
    hidden = problem(torch.zeros(1, 4, dtype=torch.float64))
    state = tuple(torch.randn_like(part).tanh() for part in hidden.start())
    jacobian = dense_jacobian(hidden.step, state)
    total = sum(
        squared_jacobian(hidden, state, tuple(v[None] for v in row.split([3, 4])))
        for row in torch.eye(7, dtype=torch.float64)
    )
    torch.testing.assert_close(total, jacobian.square().sum()[None] / 7)
    gradients = torch.autograd.grad(total.sum(), list(problem.parameters()), allow_unused=True)
    step = 1e-6
    weight = problem.branch_list()[0].W.weight
    with torch.no_grad():
        sizes = []
        for sign in (1, -1):
            weight[0, 0] += sign * step
            moved = problem(torch.zeros(1, 4, dtype=torch.float64)).step
            sizes.append(float(dense_jacobian(moved, state).square().sum()) / 7)
            weight[0, 0] -= sign * step
    index = [p is weight for p in problem.parameters()].index(True)
    assert float(gradients[index][0, 0]) == pytest.approx((sizes[0] - sizes[1]) / (2 * step), rel=1e-4)


def test_one_random_probe_is_right_on_average() -> None:
    problem = ring("relu")
    x = torch.randn(1, 4, dtype=torch.float64)
    alone = problem(x)
    first = tuple(torch.rand_like(part) for part in alone.start())
    many = problem(x.expand(20_000, 4))
    values = squared_jacobian(many, tuple(part.expand(20_000, -1).contiguous() for part in first))
    jacobian = dense_jacobian(alone.step, first)
    assert float(values.detach().mean()) == pytest.approx(float(jacobian.square().sum()) / 7, rel=0.03)


def test_the_radius_is_that_of_the_dense_jacobian() -> None:
    problem = ring("relu")
    x = torch.randn(5, 4, dtype=torch.float64)
    hidden = problem(x)
    state = tuple(torch.rand_like(part) for part in hidden.start())
    found = squared_radius(hidden, state, iterations=300)
    for row in range(5):
        alone = problem(x[row : row + 1])
        jacobian = dense_jacobian(alone.step, tuple(part[row : row + 1] for part in state))
        assert float(found[row].detach().sqrt()) == pytest.approx(
            float(torch.linalg.eigvals(jacobian).abs().max()), rel=1e-3
        )


def test_closed_forms_have_the_gradient_of_the_step() -> None:
    torch.manual_seed(0)
    branches = [opteq.Branch(op.Dense(3, 3 + i, bound=1.5), nn.Linear(4, 3 + i)) for i in range(2)]
    problem = opteq.MOptEq(branches, activation="leaky_relu").double()
    x = torch.randn(5, 4, dtype=torch.float64)
    hidden = problem(x)
    assert hidden.quadratic
    state = tuple(torch.randn_like(part) for part in hidden.start())
    weights = [branch.W.weight for branch in problem.branch_list()]
    found = torch.autograd.grad(squared_radius(hidden, state).sum(), weights, retain_graph=True)
    hidden.quadratic = False  # by the derivative of the step's own derivative
    expected = torch.autograd.grad(squared_radius(hidden, state).sum(), weights)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_the_radius_at_states_without_a_norm(dtype: torch.dtype) -> None:
    """At zero there is no direction; squares of the last state overflow, those of the tiny one underflow."""
    W = op.Dense(5, 5, bound=None)
    W.weight.data = 1.3 * torch.eye(5)
    hidden = opteq.OptEq(W, activation="leaky_relu").to(dtype)(torch.zeros(4, 5, dtype=dtype))
    limits = torch.finfo(dtype)
    state = torch.tensor([0.0, 1.0, limits.tiny, limits.max / 2], dtype=dtype)[:, None].expand(4, 5)
    found = squared_radius(hidden, state.clone())
    # The slope at exactly zero is that of the negative side.
    expected = torch.tensor([0.01, 1, 1, 1], dtype=torch.float64) * 1.3**2
    torch.testing.assert_close(found.detach().double().sqrt(), expected, rtol=2e-3, atol=0)


def test_below_the_limit_nothing_is_added() -> None:
    torch.manual_seed(0)
    model = models.create("mopteq-193k", channels=4, hidden=[3, 3], scales=[1, 2], diversity=0.0)
    x, labels = torch.randn(3, 3, 8, 8), torch.arange(3)
    extra = {}
    for limit in (0.01, 5.0, 1e300):
        with Loss(LossSection(), 0.0, model, jacobian=4.0, jacobian_limit=limit) as loss:
            logits = model(x)
            extra[limit] = float((loss(logits, labels) - cross_entropy(logits, labels)).detach())
    assert extra[0.01] > 0
    assert extra[5.0] == extra[1e300] == 0
    with pytest.raises(ValueError, match="no effect without jacobian"):
        TrainSection(epochs=1, batch_size=1, jacobian_limit=0.9)


@pytest.mark.parametrize("name", ["mopteq-193k", "inhibition-0.48m"])
def test_it_enters_the_loss_of_training(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = {"channels": 4, "hidden": [3, 3], "scales": [1, 2]}
    model = models.create(name, **small, **({"diversity": 0.0} if "mopteq" in name else {}))
    seen: list[object] = []
    model.equilibrium.register_observer(lambda hidden, state: seen.append(state))  # a user's own
    x, labels = torch.randn(3, 3, 8, 8), torch.arange(3)
    with Loss(LossSection(), 0.0, model, jacobian=4.0) as loss:
        torch.manual_seed(1)
        logits = model(x)
        total = loss(logits, labels)
        extra = float((total - cross_entropy(logits, labels)).detach())
        total.backward()
        assert extra > 0
        assert all(weight.grad is not None for weight in model.parameters())
        model.save_pretrained(tmp_path)  # as a training does, in the middle of which the layer is observed
        model.eval()(x)  # a test pass in between leaves nothing behind
        torch.manual_seed(1)
        again = model.train()(x)
        assert float((loss(again, labels) - cross_entropy(again, labels)).detach()) == pytest.approx(extra, rel=1e-2)
    model(x)
    assert not loss._penalty.found
    assert len(seen) == 4
    assert models.from_pretrained(tmp_path).config == model.config


def test_models_without_an_equilibrium_are_refused() -> None:
    with pytest.raises(UserError, match="needs a model with an equilibrium"):
        Loss(LossSection(), 0.0, models.create("resnet18-cifar", width=4), jacobian=1.0)
    explicit = models.create("mopteq-193k", channels=3, hidden=[4, 4], scales=[1, 2], feedback="explicit")
    with pytest.raises(UserError, match="fixed number of steps"):
        Loss(LossSection(), 0.0, explicit, jacobian=1.0)


def dense_radii(layer: opteq.Equilibrium, x: torch.Tensor) -> list[float]:
    """Spectral radii of a step's Jacobian at the equilibria of ``x``, sample by sample."""
    radii = []
    for row in x.split(1):
        with torch.no_grad():
            state = layer.solve(row).state
        radii.append(float(torch.linalg.eigvals(dense_jacobian(layer.problem(row).step, state)).abs().max()))
    return radii


def scaled(factor: float, W: op.Dense) -> op.Dense:
    W.weight.data.mul_(factor)
    return W


def unbounded(kind: str) -> opteq.Problem:
    torch.manual_seed(0)
    if kind == "ring":
        branches = [opteq.Branch(scaled(1.6, op.Dense(3, 4, bound=None)), nn.Linear(5, 4)) for _ in range(2)]
        return opteq.MOptEq(branches, activation="leaky_relu")
    if kind == "deep":
        layers = [(scaled(2.0, op.Dense(4, 6, bound=None)), nn.Linear(5, 6)) for _ in range(3)]
        return opteq.DeepOptEq(layers, alpha=1.0, activation="leaky_relu")
    if kind == "separable":
        return opteq.OptEq(op.SeparableConv2d(4, 5, 3, bound=None), nn.Conv2d(5, 5, 1), activation="leaky_relu")
    return opteq.OptEq(op.Dense(4, 6, bound=None), nn.Linear(5, 6), activation="leaky_relu")


@pytest.mark.parametrize("kind", ["dense", "ring", "deep", "separable"])
def test_weights_are_scaled_to_the_limit_of_the_radius(kind: str) -> None:
    """Of what a step multiplies nothing is forgotten: the radius ends at the limit, and not far below it."""
    layer = opteq.Equilibrium(unbounded(kind).double(), solver=opteq.Anderson(tol=1e-10, max_steps=500))
    x = torch.randn(3, 5, *([3, 3] if kind == "separable" else []), dtype=torch.float64)
    limit = RadiusLimit(layer, 0.2)
    before = max(dense_radii(layer, x))
    assert before > 0.25
    for _ in range(12):  # equilibria move with the weights, and one step at most halves the feedback
        layer(x)
        limit.apply()
    assert max(dense_radii(layer, x)) == pytest.approx(0.2, rel=0.15)
    kept = [weight.clone() for weight in layer.parameters()]
    limit.limit = 0.9
    layer(x)
    limit.apply()
    layer.eval()(x)  # tests are not looked at
    assert not limit.found[0]
    limit.close()
    layer(x)
    assert not limit.found[0]
    torch.testing.assert_close(list(layer.parameters()), kept, rtol=0, atol=0)


def test_limits_and_a_users_own_observer_do_not_replace_each_other() -> None:
    layer = opteq.Equilibrium(unbounded("dense"))
    x, seen = torch.randn(3, 5), []

    def own(hidden: object, state: torch.Tensor) -> None:
        seen.append(state.shape)

    first = RadiusLimit(layer, 0.2)
    layer.register_observer(own)
    second = RadiusLimit(layer, 0.5)
    layer(x)
    assert (len(seen), len(first.found[0]), len(second.found[0])) == (1, 1, 1)
    copied = copy.deepcopy(layer)  # observers stay with the layer that they were given to
    copied(x)
    assert (len(seen), len(first.found[0])) == (1, 1)
    first.close()
    layer(x)
    assert (len(seen), len(first.found[0]), len(second.found[0])) == (2, 1, 2)


def test_batches_without_equilibria_are_skipped_and_weaken_feedback() -> None:
    W = op.Dense(4, 4, bound=None)
    W.weight.data = 1.5 * torch.eye(4)
    solver = opteq.Picard(tol=1e-6, max_steps=6)
    layer = opteq.Equilibrium(opteq.OptEq(W, nn.Identity()), solver=solver, on_failure="ignore")
    x = torch.ones(100, 4)
    limit = RadiusLimit(layer, 0.9)
    assert not bool(limit.apply())
    layer(-x)  # with nothing active there is an equilibrium, and no feedback
    assert not bool(limit.apply())
    assert float(W.weight.detach()[0, 0]) == 1.5
    for lost in (2, 3):
        layer(torch.cat([-x[lost:], x[:lost]]))
        assert bool(limit.apply()) == (lost == 3)
    # From a radius of 2.25 to half of it, and on to the limit.
    assert float(W.weight.detach()[0, 0]) ** 2 == pytest.approx(0.9)


def test_steps_at_equilibria_whose_feedback_expands_are_skipped() -> None:
    """Zero is an equilibrium, which the solver finds at once; its gradient is not one that helps."""
    W = op.Dense(4, 4, bound=None)
    W.weight.data = 1.5 * torch.eye(4)
    layer = opteq.Equilibrium(opteq.OptEq(W, nn.Identity(), activation="tanh"))
    limit = RadiusLimit(layer, 0.9)
    layer(torch.zeros(3, 4))
    assert layer.last[0].residual.max() == 0
    assert bool(limit.apply())
    for _ in range(3):
        layer(torch.zeros(3, 4))
        skipped = bool(limit.apply())
    assert not skipped
    assert float(W.weight.detach()[0, 0]) ** 2 == pytest.approx(0.9)


@pytest.mark.slow
def test_feedback_without_a_bound_is_trained_within_its_limit(tmp_path: Path) -> None:
    """Without the limit, most samples of this training are lost in the second epoch, and the guard stops it."""
    options = {
        "train.epochs": 2, "train.radius": 0.9, "train.clip": 1, "optimizer.lr": 0.3, "model.name": "mopteq-193k",
        "model.options.bound": "none", "model.options.hidden": "[12,12,12]", "model.options.channels": 8,
        "model.options.pool": 2, "model.options.injection_norm": "batch", "model.options.initial_norm": 1.5,
    }  # fmt: skip
    recipe = load_recipe("digits", [f"{key}={value}" for key, value in options.items()])
    train(recipe, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["converged"] > 0.98 for row in rows)
    assert rows[-1]["test_accuracy"] > 0.9
    with pytest.raises(ValueError, match="exclude each other"):
        TrainSection(epochs=1, batch_size=1, radius=0.9, jacobian=1.0)


def test_a_limit_needs_a_w() -> None:
    with pytest.raises(UserError, match=r"should lie between 0 and 1; got 1\.5"):
        RadiusLimit(models.create("opteq-digits"), 1.5)
    with pytest.raises(UserError, match=r"train\.radius scales W down"):
        RadiusLimit(models.create("mdeq-2.5m"), 0.9)
    with pytest.raises(UserError, match=r"train\.radius needs a model with an equilibrium"):
        RadiusLimit(models.create("resnet18-cifar", width=4), 0.9)


def scaled_to(size: float, bound: float | None = None) -> op.Dense:
    W = op.Dense(4, 6, bound=bound)
    return scaled(size / float(W.norm()), W)


def test_weights_that_are_shared_are_scaled_once() -> None:
    """By two W's with the same parameter, and by two layers with the same W."""
    torch.manual_seed(0)
    first, second = scaled_to(0.9), op.Dense(4, 6)
    second.weight = first.weight
    ring = opteq.MOptEq([opteq.Branch(W, nn.Linear(4, 6)) for W in (first, second)], activation="tanh")
    pair = [opteq.OptEq(scaled_to(0.9), nn.Linear(4, 6), "tanh")]
    pair.append(opteq.OptEq(pair[0].W, nn.Linear(4, 6), "tanh"))
    for problems in ([ring], pair):
        layers = nn.ModuleList(opteq.Equilibrium(p, opteq.Anderson(tol=1e-6, max_steps=200)) for p in problems).double()
        x = 0.1 * torch.randn(3, 4, dtype=torch.float64)
        weight = (first if problems == [ring] else pair[0].W).weight
        before = weight.detach().norm()
        limit = RadiusLimit(layers, 0.5)
        for layer in layers:
            layer(x)
        largest = max(float(found[0][0]) for found in limit.found)
        limit.apply()
        expected = max(0.5, 0.5 / largest**0.5) ** 0.5
        assert expected < 0.95
        assert float(weight.detach().norm() / before) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["dense", "separable"])
def test_weights_beyond_their_bound_are_scaled_from_the_bound(kind: str) -> None:
    torch.manual_seed(0)
    W = op.Dense(4, 6, bound=0.95) if kind == "dense" else op.SeparableConv2d(4, 6, 3, bound=0.95)
    list(W.parameters())[-1].data.mul_(30)
    U = nn.Linear(3, 6) if kind == "dense" else nn.Conv2d(3, 6, 1)
    layer = opteq.Equilibrium(opteq.OptEq(W, U, "leaky_relu"))
    x = torch.randn(4, 3, *([] if kind == "dense" else [4, 4]))
    limit = RadiusLimit(layer, 0.15)
    layer(x)
    assert float(limit.found[0][0][0]) ** 0.5 > 0.2
    before = float(W.norm())
    limit.apply()
    assert float(W.norm()) < 0.95 * before
    kept = [weight.detach().clone() for weight in W.parameters()]
    limit.limit = 0.99  # within the limit nothing changes
    list(W.parameters())[-1].data.mul_(30)
    layer(x)
    limit.apply()
    torch.testing.assert_close(list(W.parameters())[-1].detach(), 30 * kept[-1])


def test_weights_that_were_replaced_are_scaled() -> None:
    torch.manual_seed(0)
    layer = opteq.Equilibrium(opteq.OptEq(scaled_to(1.3), nn.Linear(3, 6), "tanh"))
    limit = RadiusLimit(layer, 0.3)
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)
    before = layer.problem.W.weight.detach().clone()
    layer(0.1 * torch.randn(5, 3))
    limit.apply()
    assert float(layer.problem.W.weight.detach().norm()) < 0.95 * float(before.norm())


def test_an_empty_batch_says_nothing() -> None:
    layer = opteq.Equilibrium(opteq.OptEq(scaled_to(1.3), nn.Linear(3, 6), "tanh"))
    limit = RadiusLimit(layer, 0.3)
    layer(torch.zeros(0, 3))
    assert limit.found == [[]]
    assert not bool(limit.apply())


def test_a_w_that_scaling_does_not_weaken_is_refused() -> None:
    frozen, normed = scaled_to(1.0), nn.utils.parametrizations.spectral_norm(scaled_to(1.0))
    frozen.weight.requires_grad_(False)
    for W, message in ((frozen, "some of them are frozen"), (normed, "a parametrization of W may undo that")):
        with pytest.raises(UserError, match=message):
            RadiusLimit(opteq.Equilibrium(opteq.OptEq(W, nn.Linear(3, 6))), 0.9)
    branches = [opteq.Branch(scaled_to(2.0), nn.Linear(3, 6)) for _ in range(2)]
    mixed = opteq.Inhibited(opteq.OptEq(scaled_to(0.5), nn.Linear(3, 6)), scaled_to(2.0), m=0.5)
    for problem in (opteq.Inhibition(branches), mixed):
        with pytest.raises(UserError, match=f"no use for {type(problem).__name__}: the length of its steps"):
            RadiusLimit(opteq.Equilibrium(problem), 0.9)


def test_bounds_grow_to_the_models_own() -> None:
    model = models.create("mopteq-193k", channels=3, hidden=[4, 4], scales=[1, 2], bound=2.0)
    branches = model.equilibrium.problem.branch_list()
    bounds = GrowingBounds(model, TrainSection(epochs=9, batch_size=4, bound_start=0.8, bound_epochs=4))
    seen = []
    for epoch in (0, 1, 2, 4, 8):
        bounds.set(epoch)
        seen.append(branches[0].W.bound)
        for branch in branches:
            branch.W.weight.data.mul_(10)
            assert float(branch.W.norm()) <= seen[-1] * (1 + 1e-6)
    assert seen == pytest.approx([0.8, 1.1, 1.4, 2.0, 2.0])
    none = GrowingBounds(model, TrainSection(epochs=9, batch_size=4))
    none.set(0)
    assert branches[0].W.bound == 2.0


def test_where_a_bound_jumps_the_limit_brings_the_radius_back() -> None:
    """A weight that the bound scaled down comes to the fore with the next epoch's bound."""
    torch.manual_seed(0)
    W = op.Dense(4, 6, bound=3.0)
    solver = opteq.Anderson(tol=1e-6, max_steps=60)
    layer = opteq.Equilibrium(opteq.OptEq(W, nn.Linear(3, 6), "leaky_relu"), solver, on_failure="ignore").double()
    bounds = GrowingBounds(layer, TrainSection(epochs=3, batch_size=4, bound_start=0.5, bound_epochs=1))
    x = torch.randn(8, 3, dtype=torch.float64)
    limit, skipped = RadiusLimit(layer, 0.9), []
    before = W.weight.detach().clone()
    bounds.set(0)
    layer(x)
    assert not bool(limit.apply())
    assert torch.equal(W.weight, before)
    bounds.set(1)
    for _ in range(8):  # r grows by up to 36 times, and one step at most halves it
        layer(x)
        skipped.append(bool(limit.apply()))
    assert skipped[0]
    assert not any(skipped[-3:])
    assert max(dense_radii(layer, x)) == pytest.approx(0.9, rel=0.05)


def test_bounds_that_can_not_grow_are_refused() -> None:
    options = TrainSection(epochs=9, batch_size=4, bound_start=1.2, bound_epochs=4)
    with pytest.raises(UserError, match="should be at most the bound of the model's operators"):
        GrowingBounds(models.create("opteq-digits"), options)
    with pytest.raises(ValueError, match="go together"):
        TrainSection(epochs=9, batch_size=4, bound_start=1.2)
    with pytest.raises(ValueError, match="should be below epochs"):
        TrainSection(epochs=9, batch_size=4, bound_start=1.2, bound_epochs=9)
