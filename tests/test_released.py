"""Weights in the package: they load without a network, and their cards tell the truth."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest
import torch
from PIL import Image

from cli_cases import call
from opteq import data, models
from opteq.common.errors import UserError
from opteq.models import Denoiser

MOST_BYTES = 3_000_000
RELEASED = {one.name: one for one in models.released()}


def test_together_they_are_small() -> None:
    folder = RELEASED["digits"].folder.parent
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < MOST_BYTES
    assert {path.name for path in folder.iterdir()} == set(RELEASED)


@pytest.mark.parametrize("name", RELEASED)
def test_a_card_is_whole(name: str) -> None:
    card = RELEASED[name]
    assert card.figures
    assert all(isinstance(value, int | float) for value in card.figures.values())
    assert card.command.startswith("opteq ")
    assert date.fromisoformat(card.date) <= date(2100, 1, 1)
    assert min(len(text) for text in (card.summary, card.data, card.machine)) > 10
    model = Denoiser.load(name) if card.kind == "denoiser" else models.from_pretrained(name)
    assert sum(weight.numel() for weight in model.parameters()) == card.figures["parameters"]


def test_the_digits_are_as_good_as_their_card_says() -> None:
    model, digits = models.from_pretrained("digits"), data.load("digits")
    predictions = model.predict(list(digits.test.images))
    right = sum(one.index == label for one, label in zip(predictions, digits.test.labels.tolist(), strict=True))
    card = RELEASED["digits"]
    assert len(digits.test) == card.figures["test images"]
    assert right / len(digits.test) == pytest.approx(card.figures["test accuracy"], abs=5e-5)
    assert models.describe("opteq-digits").weights == ("digits",)


@pytest.mark.parametrize("name", [name for name, card in RELEASED.items() if card.kind == "denoiser"])
def test_denoisers_remove_noise(name: str) -> None:
    torch.manual_seed(0)
    clean = torch.nn.functional.interpolate(torch.rand(1, 1, 4, 4), (48, 48), mode="bicubic")[0, 0].clamp(0, 1)
    noisy = clean + 25 / 255 * torch.randn_like(clean)
    denoised = Denoiser.load(name, on_failure="raise").predict(noisy, 25 / 255)
    assert (denoised - clean).square().mean() < 0.3 * (noisy - clean).square().mean()


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    with pytest.raises(UserError, match="digits lacks"):
        models.from_pretrained("digits")
    with pytest.raises(UserError, match=r"no weights of that name in the package \(.*digits"):
        models.from_pretrained("nothing")


def test_the_command_line_knows_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    digits = data.load("digits")
    Image.fromarray(digits.test.images[0, 0].numpy()).save("digit.png")
    found = call("predict", "digits", "digit.png", "--json")
    assert found.exit_code == 0
    answer = json.loads(found.stdout)
    assert answer["top"][0]["class"] == str(int(digits.test.labels[0]))
    assert "weights: digits" in call("models").stdout
