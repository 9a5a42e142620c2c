"""A run that is killed at any moment and resumed ends as one that never was."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from opteq.common.errors import UserError
from opteq.training import TrainingStopped, train, trainer
from opteq.training.devices import make_accelerator
from opteq.training.run import state
from opteq.training.run.checkpoints import Checkpoints
from opteq.training.run.folder import RunFolder
from training_cases import in_process, lines, make_images, start, tiny, train_and_die, train_here

MORE = ["train.checkpoint_steps=2"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def undisturbed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    assert in_process(train_here, str(root), str(out), MORE) == 0
    return out


def same(run: Path, other: Path) -> None:
    assert (run / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert (run / "config.json").read_bytes() == (other / "config.json").read_bytes()
    assert lines(run) == lines(other)


def test_the_same_recipe_gives_the_same_bytes(root: Path, undisturbed: Path, tmp_path: Path) -> None:
    assert in_process(train_here, str(root), str(tmp_path / "again"), ["train.checkpoint_steps=0"]) == 0
    same(tmp_path / "again", undisturbed)


def test_another_seed_gives_others(root: Path, undisturbed: Path, tmp_path: Path) -> None:
    assert in_process(train_here, str(root), str(tmp_path / "other"), [*MORE, "train.seed=1"]) == 0
    assert (tmp_path / "other/model.safetensors").read_bytes() != (undisturbed / "model.safetensors").read_bytes()


# Many more random kills are the hunt's: `python -m hunt --kills K`.
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_killed_again_and_again(root: Path, undisturbed: Path, tmp_path: Path, seed: int) -> None:
    """Each process dies at a random moment, while saving among others, until one comes to the end."""
    chance, out, deaths = random.Random(seed), tmp_path / "run", 0
    while deaths < 4:
        code = in_process(train_and_die, str(root), str(out), MORE, chance.randrange(8, 105))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        deaths += 1
    assert deaths
    assert in_process(train_here, str(root), str(out), MORE) == 0
    same(out, undisturbed)
    assert not list(out.rglob(".*"))


def test_killed_from_outside(root: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(train_here, str(root), str(out), MORE)
    while process.is_alive() and not Checkpoints(out / "checkpoints").files():
        time.sleep(0.005)
    process.kill()
    process.join()
    assert in_process(train_here, str(root), str(out), MORE) == 0
    same(out, undisturbed)


@pytest.mark.parametrize(
    ("number", "event", "batch"), [(signal.SIGTERM, 27, 2), (signal.SIGINT, 29, 3), (signal.SIGHUP, 27, 2)]
)
def test_a_polite_signal_saves_and_leaves(
    root: Path, undisturbed: Path, tmp_path: Path, number: int, event: int, batch: int
) -> None:
    """In the middle of an epoch, and after its last step but before its test."""
    out, more = tmp_path / "run", ["train.checkpoint_steps=0"]
    code = in_process(train_and_die, str(root), str(out), more, event, number)
    assert code == 128 + number
    found = Checkpoints(out / "checkpoints").latest()
    assert found is not None
    assert (found.values["epoch"], found.values["batch"]) == (0, batch)
    assert not (out / "model.safetensors").exists()
    if number != signal.SIGHUP:  # which leaves the checkpoint that SIGTERM leaves
        assert in_process(train_here, str(root), str(out), more) == 0
        same(out, undisturbed)


def test_resuming_a_finished_run_changes_nothing(root: Path, undisturbed: Path) -> None:
    before = (undisturbed / "model.safetensors").read_bytes()
    assert in_process(train_here, str(root), str(undisturbed), MORE) == 0
    assert (undisturbed / "model.safetensors").read_bytes() == before
    assert [line["epoch"] for line in lines(undisturbed)] == [1, 2, 3]


def test_two_checkpoints_are_kept(undisturbed: Path) -> None:
    assert [path.name for path in Checkpoints(undisturbed / "checkpoints").files()] == [
        "step-00000009.safetensors",
        "step-00000008.safetensors",
    ]


def content(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_run_whose_checkpoints_are_all_damaged_is_left_alone(root: Path, undisturbed: Path, tmp_path: Path) -> None:
    run = shutil.copytree(undisturbed, tmp_path / "run")
    files = Checkpoints(run / "checkpoints").files()
    for path in files:
        os.truncate(path, 1000)
    before = content(run)
    with pytest.raises(UserError, match=f"{files[0].name} is damaged .*, {files[1].name} is damaged .* restore one"):
        train(tiny(root, *MORE), run, resume=True)
    assert content(run) == before
    # The message names two ways on: one file from a copy ...
    shutil.copy(undisturbed / "checkpoints" / files[1].name, files[1])
    assert in_process(train_here, str(root), str(run), MORE) == 0
    same(run, undisturbed)
    # ... or without any. (What is finished stays so, even if somebody has made room: that would be to lose it.)
    for path in Checkpoints(run / "checkpoints").files():
        path.unlink()
    before = content(run)
    with pytest.raises(UserError, match=r"a finished run, but no checkpoint .* remove its model.safetensors"):
        train(tiny(root, *MORE), run, resume=True)
    assert content(run) == before
    (run / "model.safetensors").unlink()
    assert in_process(train_here, str(root), str(run), MORE) == 0
    same(run, undisturbed)


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_in_which_nothing_was_made_is_free(root: Path, tmp_path: Path, resume: bool) -> None:
    """A run that stops itself in its first epoch has a recipe and no more; a better recipe may take its place."""
    out, silent = tmp_path / "run", Console(quiet=True)
    lost = ["model.options.max_steps=1", "model.options.tol=1e-6", "guard.residual=1e-5", "guard.lost=0"]
    with pytest.raises(
        TrainingStopped,
        match=r"turns this check off\. No checkpoint was saved: a new run can start in the same folder$",
    ):
        train(tiny(root, *lost), out, console=silent)
    assert (out / "recipe.toml").exists()
    assert (out / "metrics.jsonl").read_bytes() == b""
    assert not RunFolder(out).holds_a_run()
    train(tiny(root, "train.epochs=1"), out, resume=resume, console=silent)
    assert RunFolder(out).recipe().train.epochs == 1
    assert len(lines(out)) == 1


def test_a_run_that_stops_itself_later_speaks_of_its_checkpoints(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(options: object, counts: object, where: str, ended: bool) -> None:
        if where == "epoch 2":
            raise TrainingStopped("the loss is nan")

    monkeypatch.setattr(trainer, "check_progress", check)
    with pytest.raises(TrainingStopped, match=r"^the loss is nan\. Checkpoints are from before this$"):
        train(tiny(root), tmp_path / "run", console=Console(quiet=True))


@pytest.mark.parametrize("name", ["metrics.jsonl", "model.safetensors", "checkpoints/step-00000001.safetensors"])
def test_whatever_could_be_lost_is_a_run(tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path)
    assert not folder.holds_a_run()
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"epoch": 1}\n')
    assert folder.holds_a_run()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_fused_update_goes_on_where_weights_are_channels_last(
    kind: type[torch.optim.Optimizer], device: str, tmp_path: Path
) -> None:
    """Files have one layout; a fused update wants that of the weights, on a GPU by an error and on a CPU in silence."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")

    def begun() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 1)).to(device, memory_format=torch.channels_last)
        more = {"momentum": 0.9, "nesterov": True} if kind is torch.optim.SGD else {}
        return model, kind(model.parameters(), lr=0.1, fused=True, **more)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 2 * 3 * 36, device=device).reshape(2, 3, 6, 6)
        model(x.contiguous(memory_format=torch.channels_last)).square().sum().backward()
        optimizer.step()

    accelerator = make_accelerator("cpu", "no")  # of which packing asks for processes alone
    model, optimizer = begun()
    step(model, optimizer)
    tensors, values = state.pack(model, optimizer, accelerator)
    tensors = load_tensors(save_tensors({name: value.cpu().contiguous() for name, value in tensors.items()}))
    again, other = begun()
    state.unpack(tensors, values, again, other, accelerator)
    for one in (model, optimizer), (again, other):
        step(*one)
        step(*one)
    for weight, expected in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(weight, expected)
    for weight, entries in other.state.items():
        assert all(value.stride() == weight.stride() for value in entries.values() if value.shape == weight.shape)
