"""Several processes, or several accumulated parts, compute what one process computes at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from opteq import models
from opteq.training import devices
from opteq.training.metrics import RunningMetrics
from opteq.training.optim.losses import Loss
from opteq.training.recipe.sections import LossSection, TrainSection
from opteq.training.run.checkpoints import Checkpoints
from opteq.training.run.signals import AGREE_EVERY
from opteq.training.step import StepRunner
from opteq.training.validation import without_warnings
from training_cases import (
    batch_norms,
    in_process,
    lines,
    make_images,
    normalise_as_rank,
    normalised,
    settings,
    start,
    train_as_rank,
    train_here,
)

# No dropout: each process draws its own. Batch normalisation stays, since it is shared.
EXACT = ["model.options.dropout=0.0", "train.epochs=2", "model.options.tol=1e-6", "model.options.gradient_tol=1e-6"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def alone(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "alone"
    assert in_process(train_here, str(root), str(out), EXACT) == 0
    return out


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def close(run: Path, other: Path) -> None:
    for ours, theirs in zip(lines(run), lines(other), strict=True):
        for key in ("train_loss", "test_loss", "train_accuracy", "test_accuracy", "converged"):
            assert ours[key] == pytest.approx(theirs[key], abs=1e-5), key
        # A sample at the tolerance's edge may need a step more or less where sums are added in another order.
        assert ours["solver_steps"] == pytest.approx(theirs["solver_steps"], abs=0.2)
    weights, others = load_file(run / "model.safetensors"), load_file(other / "model.safetensors")
    for name, weight in weights.items():
        assert float((weight - others[name]).abs().max()) < 1e-4, name


def test_two_processes_give_the_single_process_loss(root: Path, alone: Path, tmp_path: Path) -> None:
    """40 images in batches of 16: the last batch has 8, the test's last 3, so shares are of unequal size too."""
    out, port = tmp_path / "run", free_port()
    ranks = [start(train_as_rank, rank, 2, port, str(root), str(out), EXACT) for rank in range(2)]
    for process in ranks:
        process.join(50)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert json.loads((out / "environment.json").read_text())["processes"] == 2
    close(out, alone)


def test_batch_normalisation_of_any_dimension_is_synchronised(tmp_path: Path) -> None:
    """A model of one's own may normalise features (B, C): by the samples of all processes, as one process does."""
    ranks = [start(normalise_as_rank, rank, str(tmp_path)) for rank in range(2)]
    for process in ranks:
        process.join(50)
    shares = [torch.load(tmp_path / f"rank-{rank}") for rank in range(2)]
    for expected, *found in zip(normalised(*batch_norms()), *shares, strict=True):
        for index, whole in enumerate(expected):
            first, second = (share[index] for share in found)
            for ours in [torch.cat((first, second))] if index < 2 else [first, second]:
                torch.testing.assert_close(ours, whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_accumulated_parts_give_the_same_step(count: int) -> None:
    """Parts of unequal size; batch normalisation sees parts, so the network here has none."""

    def weights(accumulate: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = models.create("opteq-digits", in_channels=1, channels=4, hidden=[6], tol=1e-6, gradient_tol=1e-6)
        model.stem[0].norm = nn.Identity()
        model.head.norms[0] = nn.Identity()
        options = TrainSection(epochs=1, batch_size=13, accumulate=accumulate, clip=0.5)
        engine = devices.make_accelerator("cpu", "no")
        with without_warnings(model) as layers, Loss(LossSection(), 0.1, model) as loss:
            wrapped, sgd = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            metrics = RunningMetrics(engine.device)
            step_runner = StepRunner(wrapped, sgd, loss, engine, options)
            step_runner.step(torch.randn(13, 1, 8, 8), torch.arange(13) % 10, 13, 0.5, metrics, layers)
        assert metrics.compute().samples == 13
        return {name: weight.detach().clone() for name, weight in model.named_parameters()}

    whole, parts = weights(1), weights(count)
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], atol=1e-5, rtol=1e-4)


def test_a_process_without_a_test_image(root: Path, tmp_path: Path) -> None:
    """10 test images in batches of 3: the last one is nobody's but the second process's."""
    more = [*EXACT, "train.epochs=1", "train.test_batch_size=3"]
    assert in_process(train_here, str(root), str(tmp_path / "alone"), more) == 0
    out, port = tmp_path / "run", free_port()
    ranks = [start(train_as_rank, rank, 2, port, str(root), str(out), more) for rank in range(2)]
    for process in ranks:
        process.join(50)
    assert [process.exitcode for process in ranks] == [0, 0]
    close(out, tmp_path / "alone")


def test_only_a_recipe_accumulates(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number that a launcher leaves in the environment accelerate would divide every gradient."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    weight = torch.ones(1, requires_grad=True)
    devices.make_accelerator("cpu", "no").backward(weight.sum())
    assert weight.grad == 1


def test_a_run_of_two_processes_is_resumed(root: Path, alone: Path, tmp_path: Path) -> None:
    """Killed in the middle, then gone on with by two, then finished by one: what was counted is counted once."""
    out, more = tmp_path / "run", [*EXACT, "train.checkpoint_steps=1"]
    for _ in range(2):
        port = free_port()
        ranks = [start(train_as_rank, rank, 2, port, str(root), str(out), more) for rank in range(2)]
        while ranks[0].is_alive() and len(list((out / "checkpoints").glob("step-*"))) < 2:
            ranks[0].join(0.005)
        for process in ranks:
            process.kill()
            process.join()
    assert in_process(train_here, str(root), str(out), more) == 0
    close(out, alone)


def test_processes_agree_to_stop(root: Path, tmp_path: Path) -> None:
    """One of two is told to stop: both save and leave at the same step."""
    out, port, more = tmp_path / "run", free_port(), [*EXACT, "train.epochs=200"]
    ranks = [start(train_as_rank, rank, 2, port, str(root), str(out), more) for rank in range(2)]
    while ranks[1].is_alive() and not Checkpoints(out / "checkpoints").files():
        ranks[1].join(0.01)
    ranks[1].terminate()
    for process in ranks:
        process.join(50)
    assert [process.exitcode for process in ranks] == [128 + signal.SIGTERM] * 2
    found = Checkpoints(out / "checkpoints").latest()
    assert found is not None
    assert found.step % AGREE_EVERY == 0
    assert len(found.values["rng"]) == 2


@pytest.mark.slow
def test_accelerate_launch(root: Path, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    sets = [part for one in settings(root, *EXACT) for part in ("--set", one)]
    launch = [
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--main_process_port",
        str(free_port()),
    ]
    command = [
        sys.executable,
        *launch,
        "--mixed_precision",
        "no",
        "--num_machines",
        "1",
        "-m",
        "opteq",
        "train",
        "digits",
    ]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(out), *sets], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    close(out, alone)
