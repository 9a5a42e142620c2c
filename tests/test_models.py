"""Every named model: its size, a training step, its options, and parts that can be replaced."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import opteq
import opteq.models
from opteq import operators as op
from opteq.common.errors import UserError
from opteq.models import Classifier, Segmenter
from opteq.models.blocks.parts import Head
from opteq.models.families.extracted import SeparableInjection
from opteq.models.registry import on_meta_device
from opteq.models.table import MODELS

SIZES = {  # the printed numbers that the names stand for
    "opteq-162k": 162e3,
    "opteq-199k": 199e3,
    "opteq-1.4m": 1.4e6,
    "mopteq-193k": 193e3,
    "popteq-193k": 193e3,
    "mopteq-0.48m": 0.48e6,
    "mopteq-1.9m": 1.9e6,
    "mopteq-8.1m": 8.1e6,
    "mopteq-10m-imagenette": 10e6,
    "mopteq-13m-imagenet": 13e6,
    "geq-5m": 5e6,
    "geq-8m": 8e6,
    "geq-6m-imagenet": 6e6,
    "geq-13m-imagenet": 13e6,
    "inhibition-0.48m": 0.48e6,
    "opteq-199k-pyramid": 199e3,
    "popteq-193k-pyramid": 193e3,
    "mopteq-193k-pyramid": 193e3,
    "mopteq-0.48m-pyramid": 0.48e6,
    "geq-5m-pyramid": 5e6,
    "mdeq-2.5m": 2.53e6,
    "mondeq-172k": 172e3,
    "mondeq-854k": 854e3,
    "neural-ode-172k": 172e3,
    "augmented-neural-ode-172k": 172e3,
    "resnet18-cifar": 11.17e6,
    "resnet50-cifar": 23.5e6,
    "plain-199k": 199e3,
    "extractor-199k": 199e3,
    "extractor-0.48m": 0.48e6,
    "extractor-5m": 5e6,
    "mdeq-18m-imagenet": 18e6,
    "mdeq-single-18m-imagenet": 18e6,
    "mdeq-63m-imagenet": 63e6,
    "extractor-wide-resnet50": 27e6,
    "resnet-13m": 13e6,
    "hrnet-13m": 13e6,
}
# Published networks, of which every weight is known: our convolutions before a normalisation have no biases.
PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "wide-resnet50": 68_883_240,
    "inception-v2": 11_295_240 - 10_016,
    "hrnet-w18": 21_299_004 - 3_840,
    "hrnet-13m": 13_187_464 - 3_840,
    "mondeq-1m": 1_014_546 - 46_080,  # whose last layer sees a border of zeros, 10 x 10 pixels for our 8 x 8
}
ROUNDED = {"mondeq-1m": 1, "extractor-resnet50": 11, "hrnet-w18": 21, "resnet50": 26, "wide-resnet50": 69}  # millions
# Sizes of the extractor, of OptEq and of the head where what the paper prints can't be had from the kernels it prints.
EXTRACTED = {
    "opteq-small-imagenet": (8_543_296, 4_003_840, 4_676_584),  # printed: 8M, 7M, 3M
    "opteq-middle-imagenet": (24_862_528, 2_451_456, 4_676_584),  # printed: 24M, 13M, 3M
}
# The smallest images that a model's scales, patches and stem allow.
SIDES = {"geq-5m": 16, "geq-8m": 16, "geq-6m-imagenet": 64, "geq-13m-imagenet": 64, "mopteq-10m-imagenette": 32}
SIDES |= {"mopteq-13m-imagenet": 32, "opteq-small-imagenet": 16, "opteq-middle-imagenet": 16}
SIDES |= {"opteq-cityscapes": 16, "geq-5m-pyramid": 32, "mopteq-0.48m-pyramid": 32}
SIDES |= {"extractor-5m": 32, "extractor-0.48m": 32}
# Others of their families are quick: geq-5m-pyramid, mopteq-0.48m.
SLOW = {"geq-5m", "mopteq-1.9m", "geq-8m", "geq-13m-imagenet", "mopteq-8.1m", "mopteq-10m-imagenette", "resnet50-cifar"}
SLOW |= {"mopteq-13m-imagenet", "geq-6m-imagenet", "opteq-cityscapes", *EXTRACTED}
LARGE = {"resnet18", "resnet34", "resnet50", "resnet101", "wide-resnet50", "resnet-13m", "inception-v2", "hrnet-w18"}
LARGE |= {"hrnet-13m", "extractor-resnet50", "extractor-wide-resnet50", "fcn-cityscapes"}
SLOW |= LARGE
SIDES |= dict.fromkeys(LARGE, 64)
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in opteq.models.list()]


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def make_images(name: str, channels: int = 3, batch: int = 2) -> Tensor:
    side = SIDES.get(name, 8)
    return F.avg_pool2d(torch.randn(batch, channels, side + 2, side + 2), 3, 1) * 3  # neighbours alike, as in photos


def training_step(model: Classifier, x: Tensor) -> None:
    model.train()
    scores = model(x)
    pixels = x.shape[2:] if isinstance(model, Segmenter) else ()
    assert scores.shape == (len(x), model.config["num_classes"], *pixels)
    labels = torch.arange(len(x)).reshape(-1, *(1 for _ in pixels)).expand(-1, *pixels)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(scores, labels).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} gets no gradient"
        assert torch.isfinite(parameter.grad).all(), f"{name} has a gradient that is not finite"
        assert parameter.grad.any(), f"{name} has a gradient of zero"
    optimizer.step()
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


# ---- sizes


def test_the_names_that_were_promised() -> None:
    others = {"opteq-cityscapes", "fcn-cityscapes", "opteq-digits", "mdeq-10m"}
    assert set(opteq.models.list()) == {*SIZES, *EXTRACTED, *PUBLISHED, *ROUNDED, *others}


@pytest.mark.parametrize("name", SIZES)
def test_size_is_the_printed_one(name: str) -> None:
    card = opteq.models.describe(name)
    assert abs(card.parameters / SIZES[name] - 1) <= 0.02, f"{name} has {card.parameters} parameters"


@pytest.mark.parametrize("name", PUBLISHED)
def test_size_is_that_of_the_published_network(name: str) -> None:
    assert opteq.models.describe(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_size_rounds_to_the_printed_one(name: str) -> None:
    assert round(opteq.models.describe(name).parameters / 1e6) == ROUNDED[name]


def test_fcn_and_opteq_for_cityscapes_have_one_size() -> None:
    sizes = [opteq.models.describe(f"{name}-cityscapes").parameters for name in ("fcn", "opteq")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


def test_cards_say_where_the_parameters_are() -> None:
    """In a model named after a paper's row they are in the equilibrium, in a redesigned one in the stem."""
    for name in ("opteq-199k", "mopteq-193k", "popteq-193k", "mopteq-0.48m", "geq-5m", "inhibition-0.48m"):
        shares = opteq.models.describe(name).shares
        assert sum(shares.values()) == pytest.approx(1)
        assert shares["equilibrium"] > 0.6
    for name in opteq.models.list():
        if name.endswith("-pyramid"):
            assert opteq.models.describe(name).shares["stem"] > 0.6
            assert opteq.models.describe(name).reproduces == ""
    for name in ("resnet18-cifar", "plain-199k", "neural-ode-172k"):  # no parameter of theirs is in an equilibrium
        assert list(opteq.models.describe(name).shares) == ["stem", "body", "head"]


@pytest.mark.parametrize("name", EXTRACTED)
def test_sizes_behind_an_extractor_are_those_of_its_kernels(name: str) -> None:
    with on_meta_device():
        model = opteq.models.create(name, num_classes=1000)
        parts = tuple(count(part) for part in (model.stem, model.equilibrium, model.head))
        assert model.stem(torch.empty(1, 3, 224, 224)).shape == (1, 1024, 28, 28)
    assert parts == EXTRACTED[name]
    # Table 6 of the OptEq paper, with a bias for each U; Small's U reads 1024 channels, where the table prints 512.
    layers, side = {"opteq-small-imagenet": (5, 3), "opteq-middle-imagenet": (3, 5)}[name]
    U, W = 1024 * side**2 + 1024 * 512 + 512, 512 * 3**2 + 512 * 512
    assert parts[1] == layers * (U + W)
    card = opteq.models.describe(name)
    assert (card.parameters, card.classes) == (sum(parts), 1000)
    assert f"{card.parameters / 1e6:.1f}M parameters" in card.summary


def test_conv_fusion_is_the_276k_row() -> None:
    with on_meta_device():
        assert abs(count(opteq.models.create("popteq-193k", fusion="conv")) / 276e3 - 1) <= 0.02
        assert abs(count(opteq.models.create("popteq-193k", fusion="sum")) / 193e3 - 1) <= 0.02


@pytest.mark.parametrize("name", ["geq-6m-imagenet", "geq-13m-imagenet"])
def test_size_with_the_classes_of_imagenet_100(name: str) -> None:
    with on_meta_device():
        assert abs(count(opteq.models.create(name, num_classes=100)) / SIZES[name] - 1) <= 0.02


@pytest.mark.parametrize("name", ["mopteq-0.48m", "mopteq-1.9m"])
def test_a_residual_stem_of_the_same_size(name: str) -> None:
    width = {"mopteq-0.48m": 48, "mopteq-1.9m": 96}[name]
    with on_meta_device():
        model = opteq.models.create(name, stem="residual", stem_depth=2, stem_width=width)
    assert abs(count(model) / SIZES[name] - 1) <= 0.02
    assert sum(isinstance(module, nn.Conv2d) for module in model.stem.modules()) == 6


def test_describe_counts_what_create_makes_and_draws_nothing() -> None:
    torch.manual_seed(0)
    card = opteq.models.describe("mopteq-193k")
    drawn = torch.rand(())
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(()))
    model = opteq.models.create("mopteq-193k")
    assert card.parameters == count(model)
    assert card.options == model.config["options"]
    assert set(card.explanations) == set(card.options)
    assert card.family == "mopteq"
    assert "MOptEq paper" in card.reproduces


# ---- a training step, and equilibria that converge at once


# Models of others have tests of their own; MDEQ's steps do not contract.
@pytest.mark.parametrize("name", [one for one in NAMES if MODELS[str(one.values[0])].family != "comparator"])
def test_a_training_step(name: str) -> None:
    torch.manual_seed(0)
    baseline = MODELS[name].family == "baseline"
    options = {} if baseline else {"on_failure": "raise"}
    model = opteq.models.create(name, MODELS[name].classes, **options)
    training_step(model, make_images(name))
    layers = opteq.models.equilibria(model)
    assert bool(layers) != baseline
    for _, layer in layers:
        assert layer.last is not None
        forward, backward = layer.last[0], layer.last[1].report
        assert bool(forward.converged.all())
        assert int(forward.steps.max()) <= (25 if "inhibition" in name else 12)  # m = 0.1 makes for slow steps
        assert backward is not None
        if isinstance(layer.gradient, opteq.Implicit):
            assert bool(backward.converged.all())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if entry.family == "comparator"])
def test_a_training_step_of_a_comparator_at_its_own_size(name: str) -> None:
    """Solved by a few steps: those of MDEQ do not contract, and the shapes and gradients are all that is asked."""
    torch.manual_seed(0)
    card = opteq.models.describe(name)
    few = {"max_steps": 3, "gradient_steps": 3, "on_failure": "ignore"} if "max_steps" in card.options else {}
    smallest = 16 if name == "mondeq-1m" else 8 if few else 4  # whose last tier is not smaller than its kernels
    side = smallest * 2 ** card.options.get("downsample", 0)
    training_step(opteq.models.create(name, card.classes, **few), torch.randn(2, 3, side, side))


@pytest.mark.parametrize("fusion", ["none", "sum", "conv"])
def test_popteq_fusions_train(fusion: str) -> None:
    torch.manual_seed(0)
    training_step(opteq.models.create("popteq-193k", fusion=fusion), make_images("popteq-193k"))


SMALL: dict[str, dict[str, Any]] = {
    "opteq-digits": {},
    "opteq-162k": {"channels": 8, "hidden": [6, 8], "injected": [1]},
    "mopteq-0.48m": {"channels": 8, "hidden": [6, 8, 8, 8]},
    "popteq-193k": {"channels": 8, "hidden": [6, 8, 8]},
    "inhibition-0.48m": {"channels": 8, "common": 6, "hidden": [6, 8], "scales": [1, 2]},
    "opteq-small-imagenet": {
        "extractor_width": 4, "extractor_blocks": [1, 1], "extractor_strides": [1, 2], "channels": 8, "hidden": [6, 8],
        "head_widths": [12],
    },
    "geq-5m": {"channels": 8, "hidden": [8, 8], "scales": [1, 2], "injection_norm": "none"},
}  # fmt: skip
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[("opteq-digits", {"solver": solver}) for solver in ("picard", "broyden")],
    *[("opteq-digits", {"gradient": gradient}) for gradient in ("phantom", "one-step", "unrolled", "shine")],
    *[("opteq-digits", {"regularizer": name}) for name in ("ridge", "l1", "incay", "decorrelation", "hsic")],
    ("opteq-digits", {"regularizer": "l1", "exact_prior": True, "max_steps": 200}),
    ("opteq-digits", {"activation": "tanh", "bound": None, "stem": "residual", "stem_depth": 1, "stem_width": 4}),
    ("opteq-digits", {"stem_depth": 2, "downsample": 1, "pool": 2, "dropout": 0.1, "head_width": 12, "stem_kernel": 5}),
    ("opteq-162k", {"alpha": 0.6, "learn_alpha": True}),
    ("opteq-162k", {"regularizer": "l1"}),
    ("opteq-162k", {"solver": "sam", "regularizer": "ridge", "gradient": "unrolled", "on_failure": "ignore"}),
    ("opteq-small-imagenet", {"learn_alpha": True, "weight_kernel": 5, "injection_kernel": 5, "dropout": 0.1}),
    ("opteq-small-imagenet", {"separable": False, "weight_kernel": 1, "injection_kernel": 5, "widen": 2}),
    ("opteq-small-imagenet", {"injection_norm": "group", "regularizer": "decorrelation"}),
    ("opteq-small-imagenet", {"injection_norm": "batch", "injected": [1], "head_widths": [8, 12]}),
    ("mopteq-0.48m", {"perturbation": 0.1}),
    ("mopteq-0.48m", {"heritage": False, "bound": 0.9, "injection_norm": "group", "perturbation": 0.1}),
    ("mopteq-0.48m", {"diversity": 0.0, "injection_norm": "batch", "readout": "mean"}),
    ("mopteq-0.48m", {"weight_kernel": 1, "injection_kernel": 5}),
    (
        "popteq-193k",
        {"stem": "pyramid", "stem_widths": [4, 6], "stem_depth": 2, "stem_attention": True, "scales": [1, 2, 2]},
    ),
    (
        "popteq-193k",
        {"stem": "pyramid", "stem_widths": [4, 6], "stem_depth": [1, 2], "stem_block": ["basic", "inverted"]}
        | {"scales": [1, 2, 2]},
    ),
    ("mopteq-0.48m", {"stem": "residual", "stem_depth": 1, "stem_block": "inverted", "stem_attention": True}),
    ("popteq-193k", {"solver": "sam", "regularizer": "l1", "gradient": "one-step", "on_failure": "ignore"}),
    ("inhibition-0.48m", {"solver": "fista", "m": 0.3, "scales": [1, 1]}),
    ("inhibition-0.48m", {"feedback": "explicit", "bound": 2.0}),
    ("mopteq-0.48m", {"feedback": "none", "bound": None}),
    ("mopteq-0.48m", {"inhibition": 5, "m": 0.5, "bound": 0.5, "smoothing": 1.0}),
    ("mopteq-0.48m", {"bound": 2.0, "diversity": 0.0, "stem_depth": 0, "gradient_steps": 100}),
    ("opteq-digits", {"tol": 0.0, "max_steps": 7, "solver": "picard"}),
    ("geq-5m", {"gradient": "phantom", "gradient_steps": 3, "gradient_damping": 0.5, "memory": 3, "damping": 0.5}),
    ("geq-5m", {"gamma": 0.05, "learn_gamma": True, "injection_norm": "batch"}),
    ("geq-5m", {"patch": None, "activation": "softplus"}),
    ("geq-5m", {"fusion": "average", "gamma": "median"}),
    ("opteq-162k", {"start": "input", "tol": 0.0, "solver": "picard", "gradient": "unrolled", "gradient_steps": 4}),
    (
        "opteq-162k",
        {"solver": "sam", "regularizer": "ridge", "sam_polish": 0, "sam_eta": 0.3, "sam_rho": 0.2, "sam_c": 0.3}
        | {"gradient": "unrolled", "on_failure": "ignore"},
    ),
    ("geq-5m", {"weight_kernel": 5, "injection_kernel": 1}),
    *[("geq-5m", {"kernel": kernel, "bound": 0.9, "on_failure": "ignore"}) for kernel in ("linear", "sigmoid")],
]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda value: str(value))
def test_options_train(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = opteq.models.create(name, num_classes=4, in_channels=1, **(SMALL[name] | options))
    training_step(model, make_images(name, channels=1, batch=4))
    assert json.loads(json.dumps(model.config)) == model.config
    for option, value in options.items():
        assert model.config["options"][option] == value


def test_options_reach_the_layer() -> None:
    model = opteq.models.create(
        "geq-5m", **SMALL["geq-5m"], solver="broyden", memory=7, tol=1e-2, max_steps=9, damping=0.4, gradient_tol=0.1
    )
    (_, layer), *others = opteq.models.equilibria(model)
    assert not others
    assert layer.solver == opteq.Broyden(tol=1e-2, max_steps=9, memory=7, damping=0.4)
    assert layer.gradient == opteq.Implicit(tol=0.1, max_steps=60)


def test_none_may_be_written_as_a_word() -> None:
    # TOML has no null, so a recipe says "none".
    model = opteq.models.create("opteq-digits", bound="none")
    assert model.config["options"]["bound"] is None
    assert model.equilibrium.problem.W.bound is None


def test_polynomial_kernels_are_made() -> None:
    model = opteq.models.create("geq-5m", **SMALL["geq-5m"], kernel="polynomial", degree=3)
    assert all(problem.kernel.degree == 3 for problem in model.equilibrium.problem.problems)


@pytest.mark.parametrize(
    "name", ["mopteq-0.48m", "mopteq-1.9m", "mopteq-8.1m", "mopteq-10m-imagenette", "mopteq-13m-imagenet"]
)
def test_bounds_above_one_contract_on_four_scales(name: str) -> None:
    """The step of L branches has slopes of at most ``|A| bound^2 (1 + lambda (C - 1))``, with A the ring's ties.

    Neighbours of sizes s and t are tied by ``1/2 min(s, t) / max(s, t)``, since average pooling over squares of side k
    and its adjoint have norm 1 / k. The certificate, made for all sizes, takes 1 for the norm of A.
    """
    options = opteq.models.describe(name).options
    scales = options["scales"]
    ties = torch.zeros(len(scales), len(scales))
    for index, scale in enumerate(scales):
        after = (index + 1) % len(scales)
        tie = 0.5 * min(scale, scales[after]) / max(scale, scales[after])
        ties[index, after] += tie
        ties[after, index] += tie
    slope = options["bound"] ** 2 * (1 + options["diversity"] * (options["channels"] - 1))
    assert options["bound"] > 1
    assert float(torch.linalg.matrix_norm(ties, 2)) * slope < 0.96


@torch.no_grad()
def test_the_measured_slope_on_four_scales_is_below_one() -> None:
    torch.manual_seed(0)
    model = opteq.models.create("mopteq-0.48m", channels=8, diversity=0.0)
    problem = model.equilibrium.problem
    for branch in problem.branches:
        branch.W.weight.abs_().mul_(100)  # as large as the bound allows, and every channel in one direction
    hidden = problem(torch.rand(1, 8, 32, 32))
    product, v = hidden.negative_hessian_at(hidden.start()), tuple(torch.ones_like(part) for part in hidden.start())
    length = 0.0
    for _ in range(50):
        v = product(v)
        length = float(torch.cat([part.flatten() for part in v]).norm())
        v = tuple(part / length for part in v)
    assert 0.5 < length < 0.43 * 1.35**2


# ---- what is refused


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mopteq-048m", {}, "unknown model 'mopteq-048m'; did you mean 'mopteq-0.48m'?"),
        ("geq-5m", {"gama": 1.0}, "geq-5m: unknown option 'gama'; did you mean 'gamma'?"),
        ("resnet18-cifar", {"bound": 1.0}, "resnet18-cifar: unknown option 'bound'"),
        ("geq-5m", {"solver": "andersen"}, "geq-5m: unknown solver 'andersen'; did you mean 'anderson'?"),
        ("geq-5m", {"solver": 3}, "solver should be one of anderson, picard, broyden, fista, sam; got 3"),
        ("geq-5m", {"tol": -1}, "tol should be a finite number of at least 0; got -1"),
        ("geq-5m", {"tol": "1e-3"}, "tol should be a finite number of at least 0; got '1e-3'"),
        ("geq-5m", {"damping": 1.5}, "damping should be a finite number above 0 and at most 1, or none; got 1.5"),
        ("geq-5m", {"max_steps": 2.5}, "max_steps should be a whole number of at least 1; got 2.5"),
        ("geq-5m", {"hidden": [8, 0]}, "hidden should be a list with at least one entry"),
        ("geq-5m", {"hidden": [8]}, "one value per branch; got 1 and 6"),
        (
            "geq-5m",
            {"gamma": "automatic"},
            "gamma should be 'auto' or 'median', or a finite number above 0; got 'automatic'",
        ),
        ("geq-5m", {"learn_gamma": True}, "learn_gamma needs a number to begin from"),
        ("geq-5m", {"learn_gamma": 1}, "learn_gamma should be true or false; got 1"),
        ("geq-5m", {"regularizer": "ridge"}, "has no place in this model's objective"),
        ("geq-5m", {"solver": "sam"}, "solver='sam' selects by a regularizer"),
        (
            "geq-5m",
            {"solver": "sam", "regularizer": "ridge", "damping": 0.5},
            "damping has no effect with solver='sam'",
        ),
        ("geq-5m", {"solver": "picard", "memory": 3}, "memory has no effect with solver='picard'"),
        ("geq-5m", {"gradient": "shine", "gradient_steps": 3}, "gradient_steps has no effect with gradient='shine'"),
        (
            "mopteq-0.48m",
            {"heritage": False},
            "heritage=false needs a bound below 1, such as bound=0.95; got bound=1.35",
        ),
        ("mopteq-193k", {"perturbation": 0.1, "injection_norm": "batch"}, "perturbation needs the adjoint of U"),
        ("mopteq-193k", {"stem_width": 8}, "stem_width has no effect with stem='plain'"),
        ("mopteq-193k", {"stem_kernel": 4}, "stem_kernel should be odd"),
        ("mopteq-193k", {"downsample": 2}, "downsample=2 needs as many convolutions"),
        ("opteq-digits", {"stem_attention": True}, "stem_attention has no effect with stem='plain'"),
        (
            "popteq-193k",
            {"stem": "pyramid", "stem_widths": [4, 4, 4], "scales": [1, 2, 2]},
            "the coarsest branch has scale 2, so stem_widths should have 2 numbers",
        ),
        (
            "opteq-digits",
            {"injection_kernel": 2},
            "injection_kernel should be odd, so that an image keeps its size; got 2",
        ),
        ("opteq-small-imagenet", {"weight_kernel": 4}, "weight_kernel should be odd"),
        ("opteq-small-imagenet", {"extractor_strides": [1, 2]}, "one value per stage; got 3 and 2"),
        ("opteq-small-imagenet", {"stem_depth": 2}, "unknown option 'stem_depth'"),
        ("opteq-162k", {"injected": [5]}, "injected should name layers 0 to 4; got [5]"),
        ("opteq-162k", {"exact_prior": True}, "exact_prior belongs to models with one layer"),
        ("opteq-162k", {"sam_polish": 3}, "sam_polish has no effect with solver='anderson'"),
        ("opteq-digits", {"start": "input"}, "belongs to models with several layers"),
        ("mopteq-193k", {"m": 0.5}, "m has no effect without inhibition"),
        ("mopteq-193k", {"diversity": 0.0, "smoothing": 0.5}, "smoothing has no effect with diversity=0"),
        ("mopteq-193k", {"settle": 3}, "settle has no effect with perturbation=0"),
        ("opteq-digits", {"regularizer_weight": 0.5}, "regularizer_weight has no effect without a regularizer"),
        ("opteq-digits", {"gradient_damping": 0.5}, "gradient_damping has no effect with gradient='implicit'"),
        (
            "opteq-digits",
            {"gradient": "phantom", "gradient_tol": 0.1},
            "gradient_tol has no effect with gradient='phantom'; it belongs to gradient='implicit'",
        ),
        ("mopteq-193k", {"regularizer": "l1"}, "has no place in this model's objective"),
        ("opteq-digits", {"alpha": 0.4}, "alpha has no effect on a single layer"),
        ("opteq-digits", {"learn_alpha": True}, "learn_alpha has no effect on a single layer"),
        ("opteq-digits", {"exact_prior": True}, "exact_prior has no effect without a regularizer in the objective"),
        ("opteq-199k", {"readout": "mean"}, "readout has no effect on a single branch"),
        ("plain-199k", {"readout": "mean"}, "readout has no effect on a single branch"),
        ("extractor-199k", {"readout": "mean"}, "readout has no effect on a single branch"),
        ("popteq-193k", {"fusion": "sum", "readout": "mean"}, "readout has no effect on a single branch"),
        ("geq-5m", {"readout": "mean"}, "readout has no effect on a single branch"),
        ("geq-5m", {"degree": 3}, "degree has no effect with kernel='gaussian'; it belongs to kernel='polynomial'"),
        ("geq-5m", {"kernel": "linear", "patch": 4}, "patch has no effect with kernel='linear'"),
        ("geq-5m", {"kernel": "sigmoid", "gamma": 0.1}, "gamma has no effect with kernel='sigmoid'"),
        ("geq-5m", {"patch": None, "split": 4}, "split has no effect with patch=none"),
        (
            "geq-5m",
            {"projection": None, "projection_bound": 0.5},
            "projection_bound has no effect with projection=none",
        ),
        ("mdeq-2.5m", {"activation": "tanh"}, "activation has no effect on MDEQ"),
        ("mdeq-2.5m", {"weight_kernel": 5}, "weight_kernel has no effect on MDEQ"),
        ("mdeq-2.5m", {"regularizer": "ridge"}, "has no place in this model's objective"),
        ("mondeq-172k", {"bound": 2.0}, "bound has no effect on monDEQ"),
        ("mondeq-1m", {"activation": "tanh"}, "activation has no effect on monDEQ"),
        ("mondeq-172k", {"regularizer": "ridge"}, "has no place in this model's objective"),
        ("opteq-digits", {"activation": "gelu"}, "unknown activation 'gelu'"),
        ("opteq-digits", {"num_classes": -1}, "num_classes should be a whole number of at least 0; got -1"),
        ("opteq-digits", {"in_channels": True}, "in_channels should be a whole number of at least 1; got True"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with on_meta_device(), pytest.raises(UserError) as refusal:
        opteq.models.create(name, **options)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_images_of_the_wrong_shape() -> None:
    model = opteq.models.create("opteq-digits")
    with pytest.raises(ValueError, match=r"images \(batch, channels, height, width\); got \(3, 8, 8\)"):
        model(torch.rand(3, 8, 8))


# ---- parts


def test_features_are_what_the_last_layer_sees() -> None:
    torch.manual_seed(0)
    for name in ("opteq-digits", "mopteq-193k", "resnet18-cifar"):
        model = opteq.models.create(name).eval()
        x = make_images(name)
        with torch.no_grad():
            assert torch.equal(model.head.linear(model.features(x)), model(x))


def test_every_part_can_be_replaced() -> None:
    torch.manual_seed(0)
    model = opteq.models.create("opteq-digits")
    x = make_images("opteq-digits")
    model.stem = nn.Conv2d(3, 5, 3, padding=1)
    model.equilibrium = nn.Sequential(
        nn.BatchNorm2d(5),
        opteq.Equilibrium(opteq.GEQ(op.Conv2d(6, 8, 3, bound=1.0), nn.Conv2d(5, 8, 1))),
    )
    model.head = nn.Sequential(nn.Flatten(), nn.Linear(6 * 64, 10))
    training_step(model, x)
    assert [name for name, _ in opteq.models.equilibria(model)] == ["equilibrium.1"]
    with pytest.raises(TypeError, match="a head with a method embed"):
        model.features(x)


def test_a_copy_is_a_model_of_its_own() -> None:
    torch.manual_seed(0)
    model = opteq.models.create("opteq-digits").eval()
    x = make_images("opteq-digits")
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    twin.config["extra"]["mark"] = 1
    assert model.config["extra"] == {}
    twin.head.linear.bias.data.add_(1)
    assert not torch.equal(twin(x), model(x))


def test_a_head_says_how_many_branches_it_reads() -> None:
    model = opteq.models.create("popteq-193k")
    assert isinstance(model.head, Head)
    with pytest.raises(ValueError, match="this head reads 3 branches; the equilibrium gave 2"):
        model.head((torch.rand(1, 32, 4, 4),) * 2)


def test_an_extractor_is_the_beginning_of_a_resnet() -> None:
    """Its stages have the weights of the first three of ResNet-50, whose layout the baseline's test holds."""
    with on_meta_device():
        stages = opteq.models.create("resnet50-cifar").equilibrium[:13]
        extractor = opteq.models.create("opteq-small-imagenet").stem
    assert [tuple(w.shape) for w in extractor[2:].parameters()] == [tuple(w.shape) for w in stages.parameters()]


@torch.no_grad()
def test_a_separable_injection_keeps_the_scale_and_knows_its_norm() -> None:
    torch.manual_seed(0)
    U = SeparableInjection(64, 48, 3)
    x = torch.randn(4, 64, 16, 16).relu()
    inner = U(x)[:, :, 1:-1, 1:-1]
    assert 0.5 < float(inner.square().mean()) < 2
    nn.init.constant_(U.bias, 2.0)
    assert torch.allclose(U(x)[:, :, 1:-1, 1:-1], inner + 2, atol=1e-5)
    y = torch.randn(4, 48, 16, 16)
    forth, back = ((U(x) - 2) * y).sum(), (x * U.adjoint(y)).sum()
    assert torch.allclose(forth, back, rtol=1e-3)
    assert float((U(x) - 2).norm() / x.norm()) <= float(op.module_norm(U))
    assert op.module_norm(U) == U.norm()


def test_resnets_have_the_usual_layout() -> None:
    with on_meta_device():
        assert count(opteq.models.create("resnet18-cifar")) == 11_173_962
        assert count(opteq.models.create("resnet50-cifar")) == 23_520_842
        model = opteq.models.create("resnet18-cifar", num_classes=100)
        assert model.equilibrium(model.stem(torch.empty(1, 3, 32, 32))).shape == (1, 512, 4, 4)


def test_weights_without_a_bound_can_begin_with_a_norm() -> None:
    torch.manual_seed(0)
    small = {"channels": 4, "hidden": [5, 6], "scales": [1, 2], "bound": None}
    model = opteq.models.create("mopteq-0.48m", initial_norm=2.0, **small)
    for branch in model.equilibrium.problem.branch_list():
        assert 1.8 < float(branch.W.norm()) <= 2.001
    with pytest.raises(ValueError, match=r"initial_norm should be at most bound=0.9; got 2"):
        opteq.models.create("mopteq-0.48m", initial_norm=2.0, **{**small, "bound": 0.9})
