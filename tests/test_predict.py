"""Predictions of single images: preprocessing as in training, files, folders, and the command line."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from cli_cases import call, refused
from opteq import data, models
from opteq.common.errors import UserError
from opteq.data.readers.decode import decode_one
from opteq.inference.restore import read_image
from opteq.models.denoiser import Denoiser, DenoiserConfig
from opteq.models.prediction import Preprocessing
from opteq.report.html.numbers import decimal
from test_report import outline


@pytest.fixture(scope="module")
def model() -> models.Classifier:
    torch.manual_seed(0)
    made = models.create("opteq-digits", in_channels=1, channels=4, hidden=[6])
    digits = data.load("digits")
    made.config["extra"] = {
        "classes": list(digits.classes),
        "mean": list(digits.mean),
        "std": list(digits.std),
        "image_shape": [1, 8, 8],
    }
    return made


@pytest.fixture(scope="module")
def run(model: models.Classifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model.save_pretrained(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for index, pixels in enumerate(data.load("digits").test.images[:3]):
        Image.fromarray(pixels[0].numpy()).save(folder / f"{index}.png")
    return folder


def test_a_file_is_prepared_as_in_training(model: models.Classifier, images: Path) -> None:
    digits = data.load("digits")
    x, _ = next(data.Batches(digits.test, digits.mean, digits.std, 3).epoch(0))
    model.train()
    found = model.predict([images / f"{index}.png" for index in range(3)])
    assert model.training  # predicting leaves the mode alone
    with torch.no_grad():
        expected = model.eval()(x)
    torch.testing.assert_close(torch.stack([one.logits for one in found]), expected)
    assert all(one.converged and one.steps > 0 for one in found)
    assert found[0].label == digits.classes[int(expected[0].argmax())]
    assert sum(share for _, share in found[0].top(10)) == pytest.approx(1)
    assert len(found[0].top(99)) == 10


def test_all_kinds_of_images_agree(model: models.Classifier, images: Path) -> None:
    file = images / "0.png"
    with Image.open(file) as opened:
        pixels = np.array(opened)
        kinds = [str(file), opened, pixels, pixels[..., None], torch.from_numpy(pixels)[None]]
        colors = Image.merge("RGB", [opened] * 3)
        for kind in (*kinds, colors, np.array(colors)):
            torch.testing.assert_close(model.predict(kind).logits, model.predict(file).logits)


def test_the_size_is_the_saved_one(model: models.Classifier) -> None:
    pixels = Preprocessing.of(model.config).pixels(Image.new("L", (64, 32), 255))
    assert pixels.shape == (1, 8, 8)
    wide = Preprocessing(3, (4, 6), (0.5,) * 3, (0.5,) * 3, ("a", "b"))
    assert wide.pixels(Image.new("RGB", (31, 77))).shape == (3, 4, 6)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (np.zeros((8, 8), dtype=np.float32), "uint8"),
        (np.zeros((8, 8, 2), dtype=np.uint8), "channels"),
        (torch.zeros(8, 8, dtype=torch.uint8), r"\(channels, h, w\)"),
        ("no/such/file.png", "there is no image no/such/file.png"),
    ],
)
def test_wrong_images_are_refused(model: models.Classifier, wrong: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        model.predict(wrong)


def test_wrong_preprocessing_is_refused(model: models.Classifier) -> None:
    with pytest.raises(UserError, match="2 classes"):
        Preprocessing.of({"in_channels": 1, "num_classes": 2, "extra": {"classes": ["a"]}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            ("image_shape", shape)
            for shape in ([1, 8], [1, 0, 8], [1, -1, 8], [3, 8, 8], [1, 10**6, 8], [1, 8.5, 8], "x")
        ),
        ("std", [0.0]),
        ("std", [-1.0]),
        ("mean", [math.nan]),
        ("mean", ["x" * 5000]),
        ("mean", None),
    ],
)
def test_hostile_preprocessing_is_refused_in_a_line(key: str, value: object) -> None:
    config = {"in_channels": 1, "num_classes": 2, "extra": {key: value}}
    with pytest.raises(UserError, match=rf"^[^\n]*({key}|config\['extra'\])[^\n]*$") as error:
        Preprocessing.of(config)
    assert len(str(error.value)) < 500


def test_logits_that_are_not_finite_name_no_class(model: models.Classifier, images: Path) -> None:
    broken = copy.deepcopy(model)
    for weight in broken.head.parameters():
        weight.data.fill_(math.nan)
    with pytest.raises(UserError, match=r"0\.png: the model's logits are not finite"):
        broken.predict(images / "0.png")
    with pytest.raises(UserError, match="image 1: the model's logits are not finite"):
        broken_at(model, 1).predict([np.zeros((8, 8), np.uint8), np.full((8, 8), 255, np.uint8)])


def broken_at(model: models.Classifier, row: int) -> models.Classifier:
    """A model whose logits of one image of a batch are NaN."""
    broken = copy.deepcopy(model)

    def spoil(_module: nn.Module, _given: object, logits: Tensor) -> Tensor:
        logits = logits.clone()
        logits[row] = math.nan
        return logits

    broken.head.register_forward_hook(spoil)
    return broken


def test_transparent_pixels_show_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (4, 4), (200, 0, 0, 0))
    image.putpixel((1, 2), (10, 20, 30, 255))
    image.save(tmp_path / "a.png")
    pixels = decode_one(tmp_path / "a.png", None)
    assert pixels[:, 0, 0].tolist() == [255, 255, 255]
    assert pixels[:, 2, 1].tolist() == [10, 20, 30]
    torch.testing.assert_close(read_image(tmp_path / "a.png"), torch.from_numpy(pixels.copy()).float() / 255)
    half = Image.new("LA", (2, 2), (0, 128))
    half.save(tmp_path / "b.png")
    assert decode_one(tmp_path / "b.png", None)[:, 0, 0].tolist() == [127] * 3


def test_the_command_prints_a_table(
    run: Path, images: Path, model: models.Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # a pipe, whose lines are not wrapped
    result = call("predict", run, images / "0.png", images, "--top", "2")
    assert result.exit_code == 0, result.output
    assert result.stdout.count(".png") == 4
    assert f"{model.predict(images / '0.png').confidence:.1%}" in result.stdout


def test_the_command_prints_json(run: Path, images: Path, model: models.Classifier) -> None:
    one = json.loads(call("predict", run, images / "1.png", "--json").stdout)
    many = json.loads(call("predict", run, images, "--json", "--top", "1").stdout)
    assert one["class"] == model.predict(images / "1.png").label
    assert len(one["top"]) == 3
    assert [Path(entry["image"]).name for entry in many] == ["0.png", "1.png", "2.png"]
    assert many[1]["probability"] == pytest.approx(one["probability"])
    assert many[1]["converged"] is True
    assert len(many[1]["top"]) == 1


def test_the_command_refuses_in_one_line(run: Path, images: Path, tmp_path: Path) -> None:
    refused(call("predict", run, tmp_path / "none.png"), "there is no image or folder")
    refused(call("predict", run, tmp_path), "holds no images")
    refused(call("predict", tmp_path, images), "lacks config.json and model.safetensors")
    refused(call("predict", run, images, "--device", "tpu"), "--device should be auto, cpu or cuda")
    (tmp_path / "bad.png").write_bytes(b"no image")
    refused(call("predict", run, tmp_path / "bad.png"), "cannot read this image")
    (tmp_path / "recipe.toml").write_text("")
    refused(call("predict", tmp_path, images), "holds no finished run")


def test_the_command_explains(run: Path, images: Path, model: models.Classifier, tmp_path: Path) -> None:
    page = tmp_path / "why.html"
    result = call("predict", run, images / "0.png", "--explain", page)
    assert result.exit_code == 0, result.output
    assert f"open {page}" in result.stdout
    found = outline(page)
    assert found.sections == ["images", "objective", "guarantees"]
    assert all(address.startswith("data:") for address in found.addresses)
    logits = model.predict(images / "0.png").logits
    best, second = logits.topk(2).indices.tolist()
    assert f"Evidence for {best} against {second}" in found.text
    assert f"difference+{decimal(float(logits[best] - logits[second]))}" in found.text
    assert "Equilibrium, step by step" in found.text
    assert re.search(r"termoffhalfdouble quadratic", found.text)
    refused(call("predict", run, *[images / "0.png"] * 25, "--explain", page), "at most 24 images; got 25")
    refused(call("predict", run, images, "--explain", tmp_path / "no" / "why.html"), "there is no folder")


def test_a_denoiser_predicts_channel_by_channel() -> None:
    torch.manual_seed(0)
    denoiser = Denoiser(DenoiserConfig(channels=(1, 2, 4), kernel_size=3))
    image = torch.rand(3, 6, 5)
    made = denoiser.predict(image, 0.1)
    assert made.shape == image.shape
    torch.testing.assert_close(made[1], denoiser.predict(image[1], 0.1), rtol=0, atol=1e-4)
    with pytest.raises(UserError, match="sigma"):
        denoiser.predict(image, 0)
    with pytest.raises(UserError, match="floating point"):
        denoiser.predict(torch.zeros(4, 4, dtype=torch.uint8), 0.1)


def test_a_segmenter_predicts_every_pixel() -> None:
    small = {"extractor_width": 4, "extractor_blocks": [1, 1], "channels": 8, "hidden": [8, 8], "head_width": 8}
    segmenter = models.create("opteq-cityscapes", num_classes=5, **small)
    (labels,) = segmenter.predict([np.zeros((32, 48, 3), dtype=np.uint8)])
    assert labels.shape == (32, 48)
    assert int(labels.max()) < 5
