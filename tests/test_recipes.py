"""Recipes: every file of the package is right, and every mistake in one is named in a line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from opteq import data, models
from opteq.common.errors import UserError
from opteq.models.registry import on_meta_device
from opteq.training import Recipe, load_recipe, recipes
from opteq.training.recipe.files import to_toml
from opteq.training.recipe.overrides import known_keys, parse


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_is_whole_and_survives_being_written(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.reproduces
    assert recipe.data.name in data.names()
    with on_meta_device():
        model = models.create(recipe.model.name, num_classes=10, **recipe.model.options)
    assert sum(weight.numel() for weight in model.parameters()) > 0
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    assert load_recipe(tmp_path / "recipe.toml") == recipe


def test_a_recipe_from_python_survives_being_written(tmp_path: Path) -> None:
    """The options as `describe` has them hold None, which TOML can't say, and a person may well write a tuple."""
    tables = load_recipe("digits").model_dump()
    tables["model"]["options"] = {**models.describe("opteq-digits").options, "bound": None, "hidden": (8,)}
    recipe = Recipe.model_validate(tables)
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    again = load_recipe(tmp_path / "recipe.toml")
    assert again == recipe
    assert (again.model.options["bound"], again.model.options["hidden"]) == ("none", [8])


def test_a_name_that_is_no_text_is_refused() -> None:
    """Names of files are bytes; Python has those that are no text as lone surrogates, which no text file can hold."""
    recipe = load_recipe("digits", [f"data.root={os.fsdecode(bytes([47, 255]))}"])
    with pytest.raises(UserError, match=r"data.root = '/.udcff' is not valid Unicode"):
        to_toml(recipe)


def test_there_is_one_for_every_model() -> None:
    assert {load_recipe(name).model.name for name in recipes()} == set(models.list())


def test_the_papers_numbers() -> None:
    """What the papers state, checked against the text rather than against the files."""
    small = load_recipe("mopteq-193k-cifar10-perturbation")
    assert (small.optimizer.lr, small.optimizer.weight_decay, small.train.batch_size) == (0.1, 1e-3, 128)
    assert (small.schedule.milestones, small.train.epochs) == ([100, 150, 175], 200)
    assert (small.model.options["diversity"], small.model.options["perturbation"]) == (0.01, 0.1)
    large = load_recipe("mopteq-10m-imagenette")
    assert (large.optimizer.weight_decay, large.train.batch_size, large.data.image_size) == (5e-5, 32, 256)
    deep = load_recipe("opteq-162k-cifar10")
    assert (deep.schedule.every, deep.schedule.factor, deep.train.batch_size) == (20, 0.7, 125)
    assert load_recipe("opteq-199k-cifar10").schedule.factor == 0.5
    for name in ("opteq-small-imagenet", "opteq-small-imagenet-learnable-alpha", "opteq-middle-imagenet"):
        wide = load_recipe(name)
        assert (wide.optimizer.name, wide.optimizer.lr, wide.optimizer.weight_decay) == ("adamw", 1e-3, 0.05)
        assert (wide.schedule.name, wide.train.batch_size, wide.train.epochs) == ("cosine", 1024, 300)
        options = wide.model.options
        assert (options["max_steps"], options["gradient_steps"], options["regularizer"]) == (5, 5, "decorrelation")
        assert options.get("learn_alpha", False) == name.endswith("learnable-alpha")


def test_the_papers_smaller_tables() -> None:
    """MOptEq's Tables 3 and 5, GEQ's Tables 3 and 5: rows differ in what the row is about, and in nothing else."""

    def rest(name: str, *tables: str) -> dict[str, Any]:
        return load_recipe(name).model_dump(exclude={"name", "reproduces", "model", *tables})

    ablation = {"": (0.02, True), "-no-diversity": (0.0, True), "-no-heritage": (0.02, False), "-no-ties": (0.0, False)}
    for suffix, (diversity, heritage) in ablation.items():
        name = f"mopteq-193k-cifar10-ablation{suffix}"
        options = load_recipe(name).model.options
        assert (options["diversity"], options.get("heritage", True)) == (diversity, heritage)
        assert "perturbation" not in options
        assert rest(name) == rest("mopteq-193k-cifar10")
    for suffix, perturbation in (("", 0), ("-perturbation", 0.1)):
        recipe = load_recipe(f"mopteq-193k-cifar10-pgd{suffix}")
        attack = recipe.adversary
        assert (attack.epsilon, attack.steps, attack.test_steps) == (8 / 255, 3, 20)
        assert recipe.model.options.get("perturbation", 0) == perturbation
        assert rest(recipe.name, "adversary") == rest("mopteq-193k-cifar10", "adversary")
    kernels = ["sigmoid", "polynomial"]
    for kernel in kernels:
        name = f"mopteq-8m-cifar100-{kernel}"
        assert load_recipe(name).model.options["kernel"] == kernel
        assert rest(name) == rest("mopteq-8m-cifar100-randaugment")
    for name in [*(f"mopteq-8m-cifar100-{kernel}" for kernel in kernels), "mopteq-8m-cifar100-randaugment"]:
        recipe = load_recipe(name)
        with on_meta_device():
            model = models.create(recipe.model.name, num_classes=100, **recipe.model.options)
        assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(8e6, rel=0.02)
    for model_name in ("geq", "mopteq"):
        assert load_recipe(f"{model_name}-8m-cifar100-superclasses").data.name == "cifar100-superclasses"


def test_side_by_side_recipes_differ_in_the_model_alone() -> None:
    """And in the optimiser of networks that SGD at this rate can't train, and in the guard and first epochs of MDEQ."""
    same = [load_recipe(name) for name in recipes() if name.startswith(("cifar10-jpeg-", "tiny100-"))]
    assert len(same) == 23 + 11
    rest = []
    for recipe in same:
        assert (recipe.data.name == "folder-superclasses") == ("superclasses" in recipe.name)
        assert (recipe.guard.lost == 1) == ("mdeq" in recipe.name)
        adaptive = any(kind in recipe.name for kind in ("mdeq", "mondeq", "neural-ode"))
        assert (recipe.optimizer.name, recipe.optimizer.lr) == (("adamw", 1e-3) if adaptive else ("sgd", 0.1))
        assert recipe.train.unrolled_epochs == (6 if "mdeq" in recipe.name else 0)
        tables = recipe.model_dump(exclude={"name", "reproduces", "model", "guard", "optimizer"})
        tables["train"].pop("unrolled_epochs")
        rest.append({**tables, "data": {**tables["data"], "name": "folder"}})
    assert all(one == rest[0] for one in rest)
    assert (rest[0]["train"]["epochs"], rest[0]["train"]["precision"]) == (30, "bf16")


def test_comparators_side_by_side_have_the_sizes_of_what_they_are_compared_with() -> None:
    sizes = {"199k": "opteq-199k", "200k": "opteq-199k", "0.48m": "mopteq-0.48m", "5m": "geq-5m"}
    for name in ("extractor-199k", "extractor-0.48m", "extractor-5m", "mdeq-200k", "mdeq-0.48m"):
        model = load_recipe(f"cifar10-jpeg-{name}").model
        with on_meta_device():
            ours = models.describe(f"{sizes[name.rpartition('-')[2]]}-pyramid").parameters
            theirs = sum(weight.numel() for weight in models.create(model.name, **model.options).parameters())
        assert theirs == pytest.approx(ours, rel=0.03)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epoch=3", "unknown key 'train.epoch'; did you mean 'train.epochs'?"),
        ("epochs=3", "unknown key 'epochs'; did you mean 'train.epochs'?"),
        ("optimiser.lr=1", "unknown key 'optimiser.lr'; did you mean 'optimizer.lr'?"),
        ("zzz.qqq=1", "unknown key 'zzz.qqq'; a recipe has: "),
        ("train=3", "'train' is a table of the recipe"),
        ("train.epochs=0", "train.epochs = 0 is not right: it should be greater than or equal to 1"),
        ("train.epochs=ten", 'train.epochs = "ten" is not right: it should be a valid integer'),
        ("train.epochs=true", "train.epochs = true is not right: it should be a valid integer"),
        ("train.precision=bf32", "it should be 'no', 'bf16' or 'fp16'"),
        ("optimizer.lr=-1", "optimizer.lr = -1 is not right"),
        ("optimizer.lr=nan", "optimizer.lr = nan is not right"),
        ("optimizer.momentum=1.0", "optimizer.momentum = 1.0 is not right: it should be less than 1"),
        ("optimizer.momentum=0", "[optimizer] nesterov = true needs a momentum above 0"),
        ("schedule.name=step", '[schedule] name = "step" needs either milestones'),
        ("loss.weight=0.1", "[loss] regularizer = None with weight = 0.1: give both or neither"),
        ("loss.diversity=0.1", "[loss] diversity has no effect with augmented = 0"),
        ("loss.smoothing=0.1", "MOptEq's own is model.options.smoothing"),
        ("optimizer.name=adamw", '[optimizer] nesterov has no effect with name = "adamw"; it belongs to "sgd"'),
        ("optimizer.eps=1e-6", '[optimizer] eps has no effect with name = "sgd"; it belongs to "adamw"'),
        ("schedule.power=2.0", "[schedule] power has no effect with name = "),
        ("train.accumulate=999", "[train] accumulate = 999 is more than batch_size"),
        ("augment.flip=3", "augment.flip = 3 is not right: it should be true or false"),
        ("augment.erase=7.0", "[augment] Augmentation.erase should be in [0, 1]; got 7.0"),
        ("augment.crop_pading=4", "unknown key 'augment.crop_pading'; did you mean 'augment.crop_padding'?"),
        ("train.epochs", "--set takes KEY=VALUE, such as train.epochs=20; got 'train.epochs'"),
        ("name=../etc", 'name = "../etc" is not right'),
    ],
)
def test_a_wrong_override_is_named_in_a_line(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe("digits", [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_file_is_named_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = to_toml(load_recipe("digits"))
    for content, message in (
        (text + "\n[train2]\n", "unknown key 'train2'"),
        (text.replace("epochs =", "epoch ="), "did you mean 'train.epochs'?"),
        (text.replace("[model]", "[model"), "is not valid TOML"),
        ('name = "x"\n', "the key 'model' is missing (and 3 more)"),
    ):
        path.write_text(content)
        with pytest.raises(UserError) as caught:
            load_recipe(path)
        assert message in str(caught.value)
        assert str(path) in str(caught.value)
    with pytest.raises(UserError, match="No such file"):
        load_recipe(tmp_path / "none.toml")


def test_an_unknown_recipe_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown recipe 'digit'; did you mean 'digits'"):
        load_recipe("digit")


def test_values_of_overrides_are_typed() -> None:
    recipe = load_recipe(
        "digits",
        [
            "train.epochs=7",
            "optimizer.name=adamw",
            "optimizer.nesterov=false",
            "optimizer.betas=[0.8, 0.9]",
            "data.root=2024",
            "train.clip=1",
            "model.options.bound=none",
            "model.options.hidden=[3, 4]",
            "model.name=opteq-162k",
            'reproduces="a b"',
            "schedule.name=step",
            "schedule.milestones=[2, 3]",
        ],
    )
    assert (recipe.train.epochs, recipe.train.clip, recipe.optimizer.betas) == (7, 1.0, (0.8, 0.9))
    assert (recipe.data.root, recipe.model.name, recipe.reproduces) == ("2024", "opteq-162k", "a b")
    assert recipe.model.options == {"bound": "none", "hidden": [3, 4]}
    assert load_recipe("digits", ["train.clip=1.0", "train.clip=none"]).train.clip is None


def test_every_key_can_be_named() -> None:
    keys = dict(known_keys())
    assert {"name", "model.options", "augment.flip", "train.epochs", "guard.lost"} <= set(keys)
    assert "train" not in keys


@pytest.mark.parametrize(
    "value", [1, -2.5, 1e-8, True, 'a "b" \\ \n é \x7f', [1, [2.0]], {"a b": 1, "c": "none"}, float("inf")]
)
def test_what_is_written_is_read_back(value: object, tmp_path: Path) -> None:
    recipe = load_recipe("digits")
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"options": {"key": value}})})
    (tmp_path / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "recipe.toml") == recipe


def test_a_written_recipe_can_be_read_by_a_person() -> None:
    recipe = load_recipe("digits", ["model.options.hidden=[3, 4]", "schedule.name=step", "schedule.milestones=[2, 3]"])
    text = to_toml(recipe)
    for part in ('name = "digits"\n', "\n[model.options]\n", "\nhidden = [3, 4]\n", "\nmilestones = [2, 3]\n"):
        assert part in text


def test_parse_falls_back_to_text() -> None:
    assert parse("2020-01-01", str) == "2020-01-01"
    assert parse('"none"', str | None) == "none"
    assert parse("a=b") == "a=b"


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "results" / "cifar10-jpeg").glob("*.toml")), ids=lambda path: path.stem
)
def test_recipes_of_recorded_runs_can_be_run_again(path: Path) -> None:
    if path.name != "notes.toml":
        recipe = load_recipe(str(path), [])
        with on_meta_device():
            model = models.create(recipe.model.name, **recipe.model.options)
        assert next(model.parameters()).is_meta


def test_long_values_are_named_in_a_line_of_moderate_length() -> None:
    for override in (f"train.epochs={'x' * 5000}", f"augment.flip={list(range(1000))}", "y" * 5000, f"{'k' * 5000}=1"):
        with pytest.raises(UserError) as refusal:
            load_recipe("digits", [override])
        assert len(str(refusal.value)) < 1000
        assert "\n" not in str(refusal.value)
