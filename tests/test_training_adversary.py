"""Training on attacked images: the attacks are those of the recipe, whoever makes them and how often they start."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cli_cases import call, finished, no_page, refused, root, train
from opteq import data, models
from opteq.analysis import PGD
from opteq.common.errors import UserError
from opteq.data import Batches
from opteq.report.run import Run
from opteq.report.sections import learning
from opteq.training import devices, evaluate, load_recipe
from opteq.training.adversary import Adversary
from opteq.training.metrics import RunningMetrics
from opteq.training.optim.losses import Loss
from opteq.training.recipe.sections import AdversarySection, LossSection, TrainSection
from opteq.training.step import StepRunner
from opteq.training.validation import validate, without_warnings
from test_training_parallel import free_port
from training_cases import in_process, lines, start, train_and_die, train_as_rank, train_here

__all__ = ["finished", "no_page", "root"]  # fixtures

ATTACKED = ["adversary.epsilon=8/255", "adversary.steps=2", "adversary.test_steps=3", "adversary.test_every=2"]


@pytest.fixture(scope="module")
def attacked(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "attacked"
    assert in_process(train_here, str(root), str(out), [*ATTACKED, "train.checkpoint_steps=2"]) == 0
    return out


# ---- starts


def starts(batches: Batches) -> list[Tensor]:
    return [batches.noise(2, index) for index in range(len(batches))]


def test_starts_depend_on_seed_epoch_and_batch_alone() -> None:
    digits = data.load("digits")
    made: dict[str, Any] = {"shuffle": True, "seed": 3}
    one = Batches(digits.train, digits.mean, digits.std, 100, **made)
    parts = [Batches(digits.train, digits.mean, digits.std, 100, **made, rank=rank, world=3) for rank in range(3)]
    for whole, *shares in zip(starts(one), *map(starts, parts), strict=True):
        assert torch.equal(whole, torch.cat(shares))
    next(one.epoch(0))
    noise = one.noise(2, 5)
    assert torch.equal(noise, starts(one)[5])
    assert (noise.dtype, noise.shape) == (torch.float32, (100, 1, 8, 8))
    assert -1 <= float(noise.min()) < -0.99
    assert 0.99 < float(noise.max()) <= 1
    assert abs(float(noise.mean())) < 0.05
    other = Batches(digits.train, digits.mean, digits.std, 100, shuffle=True, seed=4)
    for different in (one.noise(2, 6), one.noise(3, 5), other.noise(2, 5)):
        assert not torch.equal(noise, different)


# ---- a step


def stepped(accumulate: int, adversary: Adversary | None, images: Tensor, begin: Tensor | None) -> dict[str, Tensor]:
    """The weights of a network without batch normalisation after one step."""
    torch.manual_seed(0)
    model = models.create("opteq-digits", in_channels=1, channels=4, hidden=[6], tol=1e-6, gradient_tol=1e-6)
    model.stem[0].norm = nn.Identity()
    model.head.norms[0] = nn.Identity()
    engine = devices.make_accelerator("cpu", "no")
    labels = torch.arange(len(images)) % 10
    if adversary is not None and accumulate == 0:  # attacked beforehand, by hand
        images = adversary(model, images, labels, begin)
        adversary = None
    options = TrainSection(epochs=1, batch_size=13, accumulate=max(accumulate, 1))
    with without_warnings(model) as layers, Loss(LossSection(), 0.0, model) as loss:
        wrapped, sgd = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        metrics = RunningMetrics(engine.device)
        step_runner = StepRunner(wrapped, sgd, loss, engine, options, adversary)
        step_runner.step(images, labels, len(images), 0.5, metrics, layers, begin)
    assert metrics.compute().samples == len(images)
    assert metrics.compute().solves == len(images)  # those of the attack are not counted
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_learns_from_the_attacked_images(accumulate: int) -> None:
    digits = data.load("digits")
    batches = Batches(digits.train, digits.mean, digits.std, 13)
    images, _ = next(batches.epoch(0))
    adversary = Adversary(PGD(0.2, 2), batches)
    begin = adversary.start(0, 0)
    assert begin is not None
    by_hand, plain = stepped(0, adversary, images, begin), stepped(1, None, images, None)
    for name, weight in stepped(accumulate, adversary, images, begin).items():
        torch.testing.assert_close(weight, by_hand[name], atol=1e-5, rtol=1e-4)
    assert any(float((by_hand[name] - plain[name]).abs().max()) > 1e-3 for name in plain)
    assert Adversary(PGD(0.2, 2, random_start=False), batches).start(0, 0) is None


# ---- a run


def test_what_a_run_says(root: Path, attacked: Path) -> None:
    history = lines(attacked)
    assert ["test_robust_accuracy" in line for line in history] == [False, True, True]  # every second, and the last
    last = history[-1]
    assert 0 <= last["test_robust_accuracy"] <= last["test_accuracy"]
    assert last["test_robust_loss"] > last["test_loss"]
    plain = train(root, attacked.parent / "plain")
    assert plain.exit_code == 0
    assert "attacked" not in plain.stdout
    shown = train(root, attacked.parent / "shown", *ATTACKED, "train.epochs=2")
    assert shown.stdout.count("attacked") == 1
    weights = [load_file(run / "model.safetensors") for run in (attacked, attacked.parent / "plain")]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_killed_and_resumed_it_ends_as_if_never_killed(root: Path, attacked: Path, tmp_path: Path) -> None:
    more = [*ATTACKED, "train.checkpoint_steps=2"]
    for event in (25, 37):
        assert in_process(train_and_die, str(root), str(tmp_path / "run"), more, event) == -signal.SIGKILL
    assert in_process(train_here, str(root), str(tmp_path / "run"), more) == 0
    assert (tmp_path / "run/model.safetensors").read_bytes() == (attacked / "model.safetensors").read_bytes()
    assert lines(tmp_path / "run") == lines(attacked)


def test_two_processes_meet_the_attacks_of_one(root: Path, tmp_path: Path) -> None:
    exact = ["model.options.dropout=0.0", "model.options.tol=1e-6", "model.options.gradient_tol=1e-6", "train.epochs=2"]
    more, port = [*ATTACKED, *exact], free_port()
    ranks = [start(train_as_rank, rank, 2, port, str(root), str(tmp_path / "two"), more) for rank in range(2)]
    assert in_process(train_here, str(root), str(tmp_path / "one"), more) == 0
    for process in ranks:
        process.join(50)
    assert [process.exitcode for process in ranks] == [0, 0]
    for ours, theirs in zip(lines(tmp_path / "two"), lines(tmp_path / "one"), strict=True):
        assert ours.keys() == theirs.keys()
        for key in ("train_loss", "test_loss", "train_accuracy", "test_accuracy", "test_robust_accuracy"):
            assert ours.get(key) == pytest.approx(theirs.get(key), abs=1e-5), key


def test_evaluation_under_attack(attacked: Path, finished: Path) -> None:
    result = call("evaluate", attacked)
    assert result.exit_code == 0, result.output
    assert "accuracy under PGD-3, 8/255" in result.stdout
    found, last = json.loads((attacked / "evaluation.json").read_text()), lines(attacked)[-1]
    assert found["test_robust_accuracy"] == last["test_robust_accuracy"]
    assert found["test_robust_loss"] == pytest.approx(last["test_robust_loss"], abs=1e-5)
    assert found["attack"] == {
        "epsilon": 8 / 255,
        "steps": 3,
        "step_size": pytest.approx(2.5 * 8 / 255 / 3),
        "random_start": True,
        "norm": "linf",
    }
    assert "attack" not in evaluate(attacked, attack=0)
    assert "attack" not in evaluate(finished)
    strong = evaluate(finished, attack="1/2", attack_steps=5)
    assert (strong["attack"]["steps"], strong["attack"]["step_size"]) == (5, 0.25)
    assert strong["test_robust_accuracy"] < strong["test_accuracy"]
    assert evaluate(finished, attack=0.5, attack_steps=5, attack_step_size="1/8")["attack"]["step_size"] == 0.125


def test_wrong_attacks(finished: Path) -> None:
    refused(call("evaluate", finished, "--attack", "8"), "--attack 8 is not right: it should be less than or equal")
    refused(
        call("evaluate", finished, "--attack", "much"),
        "--attack much is not right: it should be a number such as 8/255",
    )
    refused(call("evaluate", finished, "--attack", "-1/255"), "--attack -1/255 is not right: it should be greater")
    refused(call("evaluate", finished, "--attack", "0.1", "--attack-steps", "0"), "--attack-steps 0 is not right")
    refused(call("evaluate", finished, "--attack", "0.1", "--attack-step-size", "0"), "--attack-step-size 0 is not")
    refused(call("evaluate", finished, "--attack-steps", "5"), "not trained with an adversary", "--attack 8/255")
    refused(call("evaluate", finished, "--attack", "0", "--attack-steps", "3"), "no effect with --attack 0")


def test_measuring_under_attack_leaves_chance_alone() -> None:
    digits = data.load("digits")
    batches = Batches(digits.test, digits.mean, digits.std, 200)
    torch.manual_seed(0)
    model = models.create("opteq-digits", in_channels=1, channels=4, hidden=[6], pool=1).train()
    before = torch.get_rng_state()
    counts = []
    for attack in (None, PGD(0.1, 2), PGD(0.1, 2)):
        metrics = RunningMetrics(torch.device("cpu"))
        assert validate(model, batches, metrics, attack=attack)
        counts.append(metrics.compute())
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    plain, once, again = counts
    assert (once.samples, once.solves) == (355, 355)
    assert once == again
    assert once.loss > plain.loss


def test_the_report_shows_attacks_and_unseen_sub_classes() -> None:
    epochs = [{"epoch": 1.0, "train_loss": 1.0, "test_loss": 1.0, "train_accuracy": 0.5, "test_accuracy": 0.5}]
    assert "attack" not in learning(Run(Path("run"), epochs=epochs))
    later = {**epochs[0], "epoch": 2.0, "test_robust_accuracy": 0.25, "unseen_accuracy": 0.375}
    page = learning(Run(Path("run"), epochs=[*epochs, later]))
    assert "under attack it was 25" in page
    assert "on unseen sub-classes it was 37.5" in page
    assert "test accuracy under attack" in page


# ---- recipes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["adversary.steps=3"], "[adversary] steps has no effect with epsilon = 0; give epsilon, such as 8/255"),
        (["adversary.epsilon=8"], "adversary.epsilon = 8 is not right: it should be less than or equal to 1"),
        (["adversary.epsilon=8/0"], 'adversary.epsilon = "8/0" is not right: it should be a valid number'),
        (["adversary.epsilon=0.1", "adversary.steps=0"], "adversary.steps = 0 is not right"),
        (["adversary.epsilon=0.1", "adversary.step_size=0"], "adversary.step_size = 0 is not right: it should be gr"),
        (["adversary.epsilon=0.1", "adversary.norm=l2"], "adversary.norm = \"l2\" is not right: it should be 'linf'"),
        (["adversary.epsilom=0.1"], "unknown key 'adversary.epsilom'; did you mean 'adversary.epsilon'?"),
    ],
)
def test_a_wrong_adversary_is_named_in_a_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe("digits", overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_recipe_makes_of_it() -> None:
    assert AdversarySection().training() is None
    assert AdversarySection().testing() is None
    section = load_recipe("digits", ["adversary.epsilon=8/255", "adversary.test_step_size=1/255"]).adversary
    assert section.training() == PGD(8 / 255, steps=7)
    assert section.testing() == PGD(8 / 255, steps=20, step_size=1 / 255)


# ---- unseen sub-classes


def test_unseen_kinds_are_tested_too(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a data set has a third split it is measured like the second: here it is the second."""
    load = data.load

    def with_unseen(*arguments: Any, **options: Any) -> data.Dataset:
        found = load(*arguments, **options)
        return dataclasses.replace(found, unseen=found.test)

    monkeypatch.setattr(data, "load", with_unseen)
    result = train(root, tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("  unseen ") == 3
    for line in lines(tmp_path / "run"):
        assert (line["unseen_accuracy"], line["unseen_loss"]) == (line["test_accuracy"], line["test_loss"])
    found = evaluate(tmp_path / "run")
    assert (found["unseen_accuracy"], found["unseen_loss"]) == (found["test_accuracy"], found["test_loss"])
    assert "accuracy on unseen sub-classes" in call("evaluate", tmp_path / "run").stdout
