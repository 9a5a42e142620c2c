"""The parts of training, each against something independent of it."""

from __future__ import annotations

import importlib.util
import math
import os
import random
import re
import signal
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save as save_tensors
from torch import nn

from opteq import models, regularizers
from opteq.common.errors import UserError
from opteq.common.files import draft, plain_errors, remove_drafts, write_atomically
from opteq.couplings import diversity, heritage
from opteq.solution import Report
from opteq.training import CheckpointWarning, TrainingStopped
from opteq.training.guard import check_progress
from opteq.training.metrics import Metrics, RunningMetrics
from opteq.training.optim.losses import Loss
from opteq.training.optim.optimizers import optimizer
from opteq.training.optim.schedules import schedule
from opteq.training.recipe.sections import GuardSection, LossSection, OptimizerSection, ScheduleSection
from opteq.training.run import checkpoints, rng
from opteq.training.run.checkpoints import Checkpoint, Checkpoints
from opteq.training.run.folder import RunFolder
from opteq.training.run.records import Records
from training_cases import start


def torch_factors(make: object, steps: int) -> list[float]:
    weight = nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([weight], lr=1.0)
    scheduler = make(inner)  # type: ignore[operator]
    factors = []
    for _ in range(steps):
        factors.append(inner.param_groups[0]["lr"])
        inner.step()
        scheduler.step()
    return factors


def test_one_cycle_is_torchs() -> None:
    ours = schedule(ScheduleSection(name="one-cycle", rise=0.3, start=0.04, final=4e-6), 10, 4)
    theirs = torch_factors(
        lambda inner: torch.optim.lr_scheduler.OneCycleLR(inner, 1.0, total_steps=40, cycle_momentum=False), 40
    )
    assert [ours(step) for step in range(40)] == pytest.approx(theirs, abs=1e-9)


def test_cosine_and_steps_are_torchs() -> None:
    ours = schedule(ScheduleSection(name="cosine", final=0.1), 10, 3)
    theirs = torch_factors(lambda inner: torch.optim.lr_scheduler.CosineAnnealingLR(inner, 29, eta_min=0.1), 30)
    assert [ours(step) for step in range(30)] == pytest.approx(theirs, abs=1e-9)
    ours = schedule(ScheduleSection(name="step", milestones=[1, 2], factor=0.5), 10, 3)
    theirs = torch_factors(lambda inner: torch.optim.lr_scheduler.MultiStepLR(inner, [10, 20], 0.5), 30)
    assert [ours(step) for step in range(30)] == pytest.approx(theirs, abs=1e-12)


def test_warm_up_rises_to_where_the_schedule_begins() -> None:
    factor = schedule(ScheduleSection(name="constant", warmup=0.5), 10, 2)
    assert [factor(step) for step in range(7)] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 1])
    for name in ("constant", "cosine", "one-cycle"):
        assert 0 <= schedule(ScheduleSection(name=name), 1, 1)(0) <= 1  # a run of one step has a rate too


def test_biases_and_normalisations_can_be_spared_from_decay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    made = optimizer(OptimizerSection(name="adamw", lr=0.1, weight_decay=0.5, decay_all=False), model)
    decayed, spared = made.param_groups
    assert [tuple(weight.shape) for weight in decayed["params"]] == [(4, 3, 3, 3), (2, 4)]
    assert (decayed["weight_decay"], spared["weight_decay"], len(spared["params"])) == (0.5, 0.0, 4)
    (all_of_them,) = optimizer(OptimizerSection(lr=0.1, weight_decay=0.5), model).param_groups
    assert (len(all_of_them["params"]), all_of_them["weight_decay"]) == (6, 0.5)


@pytest.mark.parametrize("name", ["ridge", "l1", "incay", "decorrelation", "hsic"])
def test_a_regulariser_through_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model = models.create("opteq-digits", in_channels=1, channels=3, hidden=[4], pool=1)
    x, labels = torch.randn(6, 1, 8, 8), torch.arange(6)
    with Loss(LossSection(regularizer=name, weight=0.3), 0.1, model) as loss:
        total = loss(model(x), labels)
    R = regularizers.get(name)
    values = R.value(model.features(x))
    term = values.sum() if R.couples_batch else values.mean()
    expected = F.cross_entropy(model(x), labels, label_smoothing=0.1) + 0.3 * term
    assert (total / 6).item() == pytest.approx(expected.item(), rel=1e-5)
    total.backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("normalised", [True, False])
def test_the_augmented_loss_asks_for_heritage_and_diversity(normalised: bool) -> None:
    torch.manual_seed(0)
    model = models.create("popteq-193k", channels=3, hidden=[4, 4], scales=[1, 2])
    x, labels = torch.randn(4, 3, 8, 8), torch.arange(4)
    with Loss(LossSection(augmented=0.2, diversity=0.05, normalised=normalised), 0.0, model) as loss:
        total = loss(model(x), labels)
    branches = model.equilibrium(model.stem(x))
    if normalised:
        branches = tuple(z / z.flatten(1).norm(dim=1)[:, None, None, None] for z in branches)
    term = (0.05 * diversity(branches) - heritage(branches)).sum(dim=0).mean()
    expected = F.cross_entropy(model(x), labels) + 0.2 * term
    assert (total / 4).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_augmented_loss_needs_branches() -> None:
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(UserError, match="needs a model with branches"):
        Loss(LossSection(augmented=0.2), 0.0, models.create("resnet18-cifar", width=4))
    fused = models.create("popteq-193k", channels=3, hidden=[4, 4], scales=[1, 1], fusion="sum")
    with Loss(LossSection(augmented=0.2), 0.0, fused), pytest.raises(UserError, match="returns one tensor"):
        fused(x)


def test_soft_labels_are_counted_by_their_largest_share() -> None:
    metrics = RunningMetrics(torch.device("cpu"))
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0]])
    metrics.update(torch.tensor(4.0), logits, torch.tensor([[0.9, 0.1], [0.6, 0.4]]), [])
    counts = metrics.compute()
    assert (counts.accuracy, counts.mean_loss, counts.solves, counts.converged_share) == (0.5, 2.0, 0, 1.0)


def report(residual: list[float], codes: list[int]) -> Report:
    steps = torch.full((len(codes),), 3)
    return Report("test", torch.tensor(residual), steps, torch.tensor(codes), 1e-3)


def test_metrics_count_solves() -> None:
    metrics = RunningMetrics(torch.device("cpu"), lost_above=0.1, with_top5=True)
    logits, labels = torch.eye(3), torch.tensor([0, 1, 0])
    reports = [report([1e-4, 0.2, math.nan], [0, 1, 2]), report([1e-4, 1e-4, 1e-4], [0, 0, 0])]
    metrics.update(torch.tensor(3.0), logits, labels, reports)
    counts = metrics.compute()
    assert (counts.solves, counts.mean_steps, counts.converged, counts.lost) == (6, 3.0, 4, 2)
    assert counts.worst == math.inf
    assert counts.accuracy == pytest.approx(2 / 3)
    assert counts.top5 == 3
    again = RunningMetrics(torch.device("cpu"))
    again.restore(counts)
    assert again.compute() == counts


@pytest.mark.parametrize("residual", [math.inf, math.nan])
def test_a_residual_that_is_not_finite_is_told_as_such(residual: float) -> None:
    metrics = RunningMetrics(torch.device("cpu"))
    metrics.update(torch.tensor(1.0), torch.eye(2), torch.tensor([0, 1]), [report([1e-4, residual], [0, 2])])
    assert (metrics.compute().worst, metrics.compute().residual, metrics.compute().lost) == (math.inf, math.inf, 1)


def counts(**changes: float) -> Metrics:
    usual = dict.fromkeys(("correct", "label_count", "top5", "residual", "lost", "worst"), 0.0)
    return Metrics(**{**usual, "loss": 1.0, "samples": 10, "solves": 10, "steps": 50, "converged": 10, **changes})


def test_the_guard() -> None:
    check_progress(GuardSection(), counts(lost=5.0), "epoch 1")
    check_progress(GuardSection(converged=0.5), counts(converged=5.0), "epoch 1")
    check_progress(GuardSection(lost=0.0), counts(solves=0.0), "epoch 1")
    check_progress(GuardSection(skipped=3), counts(skipped=7.0, skipped_in_a_row=3.0), "epoch 1")
    with pytest.raises(TrainingStopped, match=r"epoch 1: 4 steps in a row were skipped .* Try a lower optimizer.lr"):
        check_progress(GuardSection(skipped=3), counts(skipped=7.0, skipped_in_a_row=4.0), "epoch 1")
    check_progress(GuardSection(), counts(samples=0, skipped=1.0, skipped_in_a_row=1.0), "epoch 1")
    with pytest.raises(TrainingStopped, match=r"epoch 1: 1 steps in a row were skipped"):
        check_progress(GuardSection(), counts(samples=0, skipped=1.0, skipped_in_a_row=1.0), "epoch 1", ended=True)
    with pytest.raises(TrainingStopped, match=r"60% of the equilibria have a relative residual above 0.1 \(mean 0.5"):
        check_progress(GuardSection(), counts(lost=6.0, residual=5.0), "epoch 2")
    with pytest.raises(TrainingStopped, match=r"only 40% of the equilibria reached .* requires 50%"):
        check_progress(GuardSection(converged=0.5), counts(converged=4.0), "epoch 2")


def test_chance_returns_to_where_it_was() -> None:
    def draw() -> tuple[float, float, float, float]:
        return random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(1))

    rng.seed(7)
    random.gauss(0, 1)
    np.random.randn()  # leaves a second number in store
    tensors, values = rng.capture()
    first = draw()
    draw()
    rng.restore(tensors, values)
    assert draw() == first
    before = rng.capture()[0]["torch"]
    with rng.preserve_rng():
        draw()
    assert torch.equal(rng.capture()[0]["torch"], before)


def some(step: int) -> Checkpoint:
    tensors = {
        "a": torch.arange(6).reshape(2, 3) + step,
        "b": torch.rand(4, 3, 2, 2).bfloat16(),
        "c": torch.tensor(1.5),
    }
    tensors["b"] = tensors["b"].to(memory_format=torch.channels_last)
    return Checkpoint(step, tensors, {"history": [{"loss": 0.1}], "word": "é"})


def test_a_checkpoint_is_read_back(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "checkpoints")
    assert store.latest() is None
    for step in (1, 2, 3):
        store.save(some(step))
    torch.manual_seed(0)
    saved = some(12)
    store.save(saved)
    assert [path.name for path in store.files()] == ["step-00000012.safetensors", "step-00000003.safetensors"]
    found = store.latest()
    assert found is not None
    assert (found.step, found.values) == (12, saved.values)
    assert found.tensors.keys() == saved.tensors.keys()
    for name, tensor in saved.tensors.items():
        assert torch.equal(found.tensors[name], tensor)
        assert found.tensors[name].dtype == tensor.dtype


@pytest.mark.parametrize("place", [0, 5, 40, 300, -3, -1])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, place: int) -> None:
    store = Checkpoints(tmp_path)
    store.save(some(1))
    path = store.save(some(2))
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)
    with pytest.warns(CheckpointWarning, match="step-00000002.*is damaged.*one before it is used"):
        found = store.latest()
    assert found is not None
    assert found.step == 1


@pytest.mark.parametrize("content", [b"", b"\x80\x04cos\nsystem\n(S'touch /tmp/pwned'\ntR.", b"\xff" * 100, "half"])
def test_what_is_no_checkpoint_is_passed_over(tmp_path: Path, content: bytes | str) -> None:
    store = Checkpoints(tmp_path)
    store.save(some(1))
    path = store.save(some(2))
    path.write_bytes(path.read_bytes()[:200] if isinstance(content, str) else content)
    with pytest.warns(CheckpointWarning):
        found = store.latest()
    assert found is not None
    assert found.step == 1


def of_format(path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a whole checkpoint as another version of opteq would."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_FORMAT", number)
        written = Checkpoints(path.parent / "other").save(some(int(path.stem[5:])))
    written.replace(path)
    written.parent.rmdir()


def test_where_no_checkpoint_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is named with its own reason, and stays as it is."""
    names = [f"step-{step:08d}.safetensors" for step in (4, 3, 2, 1)]
    damaged, foreign, other, closed = (tmp_path / name for name in names)
    damaged.write_bytes(b"half")
    foreign.write_bytes(save_tensors({"weight": torch.ones(2)}))
    of_format(other, 7, monkeypatch)
    closed.mkdir()  # whoever runs the tests may read every file, but nobody a folder as one
    before = [path.read_bytes() for path in (damaged, foreign, other)]
    with pytest.raises(UserError) as caught:
        Checkpoints(tmp_path).latest()
    said = str(caught.value)
    assert f"{damaged.name} is damaged (" in said
    assert f"{foreign.name} is damaged (a safetensors file, but not a checkpoint of opteq)" in said
    assert f"{other.name} was written by another version of opteq (its format is 7, and this version reads 1)" in said
    assert f"{closed.name} could not be read (Is a directory)" in said
    assert "restore one from a backup, make it readable, or use the version of opteq that wrote it" in said
    assert "to start over, give another --out, or remove them" in said
    assert [path.read_bytes() for path in (damaged, foreign, other)] == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_an_older_checkpoint_is_taken_with_a_warning_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Checkpoints(tmp_path)
    store.save(some(1))
    of_format(tmp_path / "step-00000002.safetensors", 2, monkeypatch)
    (tmp_path / "step-00000003.safetensors").mkdir()
    with pytest.warns(CheckpointWarning) as caught:
        found = store.latest()
    assert found is not None
    assert found.step == 1
    unread, another = (str(warning.message) for warning in caught)
    assert "step-00000003.safetensors could not be read (Is a directory); the one before it is used" in unread
    assert "step-00000002.safetensors was written by another version of opteq" in another
    assert "damaged" not in unread + another


def test_checkpoints_that_cannot_be_listed_are_not_taken_for_none(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "checkpoints")
    store.folder.touch()
    with pytest.raises(
        UserError,
        match=r"listing .*/checkpoints failed: Not a directory; move away what is in its place, or give another",
    ):
        store.latest()


def test_a_run_that_went_back_goes_on_from_where_it_is(tmp_path: Path) -> None:
    """Files of later steps go once the new one is written, whole or not; the one before it stays."""
    store = Checkpoints(tmp_path)
    store.save(some(3))
    for step in (7, 8):
        (tmp_path / f"step-{step:08d}.safetensors").write_bytes(b"half")
    path = store.save(some(5))
    assert path.exists()
    assert [file.name for file in store.files()] == ["step-00000005.safetensors", "step-00000003.safetensors"]
    found = store.latest()
    assert found is not None
    assert found.step == 5


def test_later_checkpoints_stay_until_the_new_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Checkpoints(tmp_path)
    store.save(some(7))

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        store.save(some(5))
    assert [file.name for file in store.files()] == ["step-00000007.safetensors"]


def test_checkpoints_are_ordered_by_number_and_other_files_left_alone(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    mine = tmp_path / "step-best.safetensors"
    mine.write_bytes(b"mine")
    for step in (99_999_998, 99_999_999, 100_000_000):
        store.save(some(step))
    assert [file.name for file in store.files()] == ["step-100000000.safetensors", "step-99999999.safetensors"]
    assert mine.read_bytes() == b"mine"


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    message = r"saving failed: No space left on device \(.*/file\); make room, or give up"
    with pytest.raises(UserError, match=message), plain_errors("saving", "or give up"):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_only_drafts_are_removed(tmp_path: Path) -> None:
    """A run's folder may be one where other programs keep hidden files of theirs."""
    others = [tmp_path / name for name in (".editor.tmp", ".file.1234.tmp", "notes.tmp", ".profile")]
    for path in others:
        path.touch()
    with draft(tmp_path / "file", b"half") as left:
        kept = left.rename(tmp_path / ".file.0123456789abcdef.tmp")
    assert kept.read_bytes() == b"half"
    remove_drafts(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_tensorboard_forgets_what_is_drawn_anew(tmp_path: Path) -> None:
    """An interrupted run drew four epochs, but its checkpoint knows of two: the last two are drawn once more."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    history = [{"epoch": epoch, "train_loss": 1 / epoch, "test_loss": 2 / epoch} for epoch in range(1, 5)]
    first = Records(tmp_path, [])
    for line in history:
        first.add(line)
    # Of files of one second TensorBoard takes the tenth before the ninth; a run is resumed later than that.
    for file in (tmp_path / "tensorboard").iterdir():
        file.rename(file.with_name(re.sub(r"\d{10}", lambda second: f"{int(second[0]) - 60:010d}", file.name, count=1)))
    again = Records(tmp_path, history[:2])
    again.add({"epoch": 3, "train_loss": 0.25})
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss/train")] == [(1, 1.0), (2, 0.5), (3, 0.25)]
    assert [event.step for event in read.Scalars("loss/test")] == [1, 2]
    for records in (first, again):
        records.close()


def hold(folder: str, sign: str) -> None:
    """Use a run folder until the process is killed; its worker lives on."""
    warnings.simplefilter("ignore", DeprecationWarning)  # Python's, about fork and threads
    with RunFolder(Path(folder)).prepared():
        worker = os.fork()
        if worker:
            write_atomically(Path(sign), str(worker).encode())
        time.sleep(60)


@pytest.mark.skipif(importlib.util.find_spec("fcntl") is None, reason="this system has no locks on folders")
def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    folder, sign = tmp_path / "run", tmp_path / "held"
    other = start(hold, str(folder), str(sign))
    while not sign.exists():
        time.sleep(0.01)
    with pytest.raises(UserError, match=r"another process is training in .*wait for it, or give another folder"):
        RunFolder(folder).prepared().__enter__()
    other.kill()
    other.join()
    try:
        with RunFolder(folder).prepared():  # a killed process releases its lock
            pass
    finally:
        os.kill(int(sign.read_text()), signal.SIGKILL)
    assert not list(folder.iterdir())
