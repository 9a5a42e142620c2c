"""Denoisers from recipe to page: training, resuming, tests, errors."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

from opteq import report, training
from opteq.cli import app
from opteq.common.errors import UserError
from opteq.models.denoiser import Denoiser, DenoiserConfig
from opteq.training.denoising.quality import psnr, ssim
from opteq.training.recipe.denoising import DenoisingRecipe
from opteq.training.recipe.files import to_toml
from opteq.training.run.checkpoints import Checkpoints
from training_cases import TINY_DENOISER, make_grey_images


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_grey_images(tmp_path_factory.mktemp("images"))


def recipe(images: Path, steps: int, *more: str) -> training.AnyRecipe:
    overrides = [*TINY_DENOISER, f"data.root={images}", f"train.steps={steps}", *more]
    return training.load_any_recipe("denoiser-weak", overrides)


def weights(folder: Path) -> dict[str, Tensor]:
    return Denoiser.load(folder).prior.state_dict()


def test_a_run_that_is_killed_ends_with_the_same_weights(images: Path, tmp_path: Path) -> None:
    chosen = recipe(images, 4)
    training.train_denoiser(chosen, tmp_path / "whole")
    # Killed after step 3: its files are there up to the checkpoint of step 2.
    training.train_denoiser(chosen, tmp_path / "killed")
    folder = tmp_path / "killed"
    (folder / "checkpoints" / "step-00000004.safetensors").unlink()
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
    training.train_denoiser(chosen, folder, resume=True)
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(folder)[name]), name
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert all(math.isfinite(line["train_loss"]) for line in lines)


def test_a_run_goes_on_where_a_generator_has_another_kind_of_state(images: Path, tmp_path: Path) -> None:
    training.train_denoiser(recipe(images, 4), tmp_path)
    saved = Checkpoints(tmp_path / "checkpoints")
    saved.files()[0].unlink()
    checkpoint = saved.latest()
    assert checkpoint is not None
    checkpoint.tensors["generator"] = torch.zeros(16, dtype=torch.uint8)  # as on a GPU
    saved.save(checkpoint)
    training.train_denoiser(recipe(images, 4), tmp_path, resume=True)
    assert saved.files()[0].name == "step-00000004.safetensors"


def test_the_program_trains_evaluates_and_reports(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = [
        part for override in (*TINY_DENOISER, f"data.root={images}", "train.steps=2") for part in ("--set", override)
    ]
    done = CliRunner().invoke(app, ["train", "denoiser-convex", "--out", str(out), *settings])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["evaluate", str(out), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "PSNR" in done.output
    found = json.loads((out / "evaluation.json").read_text())["sets"]["set12"]["25"]
    assert found["images"] == 3
    assert found["converged"] == 1
    assert abs(found["noisy_psnr"] - 20 * math.log10(255 / 25)) < 0.5
    page = report.write(out).read_text()
    for word in ("Before and after", "1-strongly convex", f"{found['psnr']:.2f}", "restored"):
        assert word in page, word
    refused = CliRunner().invoke(app, ["evaluate", str(out), "--attack", "8/255"])
    assert refused.exit_code == 2
    assert "this run trained a denoiser" in refused.output
    refused = CliRunner().invoke(app, ["predict", str(out), str(images / "set12" / "0.png")])
    assert refused.exit_code == 2
    assert "holds a denoiser; `opteq restore`" in refused.output


def test_an_unfinished_run_says_how_it_goes_on(images: Path, tmp_path: Path) -> None:
    class Stopped(training.denoising.trainer.StopRequest):
        def agreed_signal(self, step: int) -> int:
            return 15

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.denoising.trainer, "StopRequest", Stopped)
        with pytest.raises(training.Interrupted, match=r"signal 15 after step 1; saved .*step-00000001.* --resume"):
            training.train_denoiser(recipe(images, 4), tmp_path)
    with pytest.raises(UserError, match=f"continue with `opteq train --resume --out {tmp_path}`"):
        training.evaluate_denoiser(tmp_path)


def test_one_step_is_trained_and_kept(images: Path, tmp_path: Path) -> None:
    folder = training.train_denoiser(recipe(images, 1, "model.steps=1", "noise.least=12"), tmp_path)
    model = Denoiser.load(folder, on_failure="ignore")
    assert (model.config.least, model.config.most) == (
        12 / 255,
        55 / 255,
    )  # `opteq restore` says what it was trained for
    solution = model.layer.solve((torch.rand(1, 1, 20, 20), torch.tensor([0.1])))
    assert solution.steps.tolist() == [1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.border=10", "border = 10 leaves nothing of patch = 20"),
        ("model.kernel_size=4", "kernel_size = 4 should be odd"),
        ("model.depth=4", "model.depth is of the network that guides a prior"),
        ("train.bfloat16=true", "train.bfloat16 is for the network that guides a prior"),
        ("noise.least=60", "least = 60 should be less than most = 55"),
        ("train.epochs=3", "unknown key 'train.epochs'"),
        ("model.rho=-1", "model.rho = -1"),
    ],
)
def test_mistakes_are_named(images: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        recipe(images, 1, override)
    assert "[]" not in str(refused.value)


@pytest.mark.parametrize(
    ("noise", "sigmas"), [((10, 55), (15, 25, 50)), ((5, 20), (15,)), ((25, 50), (25, 50)), ((30, 40), (40,))]
)
def test_levels_of_tests_and_pages_are_trained_for(
    noise: tuple[int, int], sigmas: tuple[int, ...], images: Path, tmp_path: Path
) -> None:
    own = [one for one in TINY_DENOISER if not one.startswith("test.sigmas")]
    levels = [f"noise.least={noise[0]}", f"noise.most={noise[1]}", f"data.root={images}", "train.steps=1"]
    chosen = training.load_any_recipe("denoiser-weak", [*own, *levels])
    assert isinstance(chosen, DenoisingRecipe)
    assert chosen.test.sigmas == sigmas
    (tmp_path / "recipe.toml").write_text(to_toml(chosen))
    assert training.load_any_recipe(tmp_path / "recipe.toml") == chosen
    asked = training.load_any_recipe("denoiser-weak", [*own, *levels, "test.sigmas=[70]"])
    assert isinstance(asked, DenoisingRecipe)
    assert asked.test.sigmas == (70,)
    usual = DenoiserConfig(least=noise[0] / 255, most=noise[1] / 255).usual_sigma
    assert usual == pytest.approx(min(max(25, noise[0]), noise[1]))
    if noise == (5, 20):
        folder = training.train_denoiser(chosen, tmp_path / "run")
        assert "Noise of 20 of 255" in report.write(folder).read_text()
        assert list(training.evaluate_denoiser(folder)["sets"]["set12"]) == ["15"]


@pytest.mark.parametrize("key", ["test.sigmas", "test.sets"])
def test_a_test_of_nothing_is_refused(key: str, images: Path) -> None:
    with pytest.raises(UserError, match=rf"{key} = \[\] is not right: .* at least 1 "):
        recipe(images, 1, f"{key}=[]")


def test_images_that_are_of_no_use_are_named(images: Path, tmp_path: Path) -> None:
    chosen = recipe(shutil.copytree(images, tmp_path / "images"), 1)
    run = training.train_denoiser(chosen, tmp_path / "run")
    for damaged in ("5", "[]", '{"sets": 3}', '{"sets": {"set12": {"25": {}}}}'):
        (run / "evaluation.json").write_text(damaged)
        assert "Not evaluated yet" in report.write(run).read_text()
    Image.new("L", (9, 12)).save(tmp_path / "images/set12/1.png")
    with pytest.raises(UserError, match=r"image 2 of a test set is 9x12; each side needs 1[0-9] pixels"):
        training.evaluate_denoiser(run)
    Image.new("L", (30, 24)).save(tmp_path / "images/train/9.png")
    with pytest.raises(UserError, match="train holds images of 24x24 and of 30x24 pixels; all should have one size"):
        training.train_denoiser(chosen, tmp_path / "other")
    (tmp_path / "images/train/9.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"train/9.png: cannot read this image .*; replace or delete it"):
        training.train_denoiser(chosen, tmp_path / "other")
    with pytest.raises(UserError, match=r"train.patch = 40 should be at most the size of the images, 24x24"):
        training.train_denoiser(recipe(images, 1, "train.patch=40"), tmp_path / "other")


def test_missing_images_and_other_tasks_are_named(images: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.root is missing: the folder that holds train, set12"):
        training.train_denoiser(training.load_any_recipe("denoiser-weak", TINY_DENOISER), tmp_path / "a")
    with pytest.raises(UserError, match="there is no folder"):
        training.train_denoiser(recipe(tmp_path, 1), tmp_path / "b")
    with pytest.raises(UserError, match="trains a denoiser"):
        training.load_recipe("denoiser-weak")


@pytest.mark.parametrize("name", training.recipes(denoising=True))
def test_recipes_are_whole_and_survive_being_written(name: str, tmp_path: Path) -> None:
    loaded = training.load_any_recipe(name)
    assert loaded.name == name
    assert loaded.reproduces
    (tmp_path / "recipe.toml").write_text(to_toml(loaded))
    assert training.load_any_recipe(tmp_path / "recipe.toml") == loaded


def test_quality_is_what_its_formulas_say() -> None:
    torch.manual_seed(0)
    clean = torch.rand(2, 1, 13, 14, dtype=torch.float64)
    noisy = clean + 0.1 * torch.randn_like(clean)
    expected = [10 * math.log10(1 / float((a - b).square().mean())) for a, b in zip(noisy, clean, strict=True)]
    torch.testing.assert_close(psnr(noisy, clean), torch.tensor(expected, dtype=torch.float64))

    window = np.exp(-(np.arange(-5, 6)[:, None] ** 2 + np.arange(-5, 6)[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    x, y = noisy[1, 0].numpy(), clean[1, 0].numpy()
    values = []
    for row in range(3):
        for column in range(4):
            a, b = x[row : row + 11, column : column + 11], y[row : row + 11, column : column + 11]
            ma, mb = (window * a).sum(), (window * b).sum()
            va, vb, cov = (
                (window * (p - m) * (q - n)).sum() for p, m, q, n in ((a, ma, a, ma), (b, mb, b, mb), (a, ma, b, mb))
            )
            values.append((2 * ma * mb + 1e-4) * (2 * cov + 9e-4) / ((ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4)))
    assert float(ssim(noisy, clean)[1]) == pytest.approx(np.mean(values), abs=1e-10)
    assert ssim(clean, clean).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="at least 11 x 11"):
        ssim(clean[..., :9], clean[..., :9])
