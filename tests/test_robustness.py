"""Accuracy under corruptions and attacks: against one image at a time, against the formulas, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cli_cases import call, finished, no_page, refused, root
from opteq.analysis import APGD, PGD
from opteq.common.errors import UserError
from opteq.data.corruptions import corrupt
from opteq.models import Classifier
from opteq.report.charts.robustness import robustness
from opteq.report.run import read_run
from opteq.training import evaluate, evaluate_robustness, load_any_recipe
from opteq.training.open_run import open_run
from opteq.training.recipe.files import to_toml
from opteq.training.robustness import curves, markdown, read_record
from opteq.training.robustness.corrupted import relative_errors

__all__ = ["finished", "no_page", "root"]  # fixtures


@pytest.fixture(autouse=True)
def short_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "SHARES", (1.0,))
    monkeypatch.setattr(curves, "STEPS", (1,))
    monkeypatch.setattr(curves, "RADII", (0.0, 1e-3, 0.01, 1.0))
    monkeypatch.setattr("matplotlib.layout_engine.ConstrainedLayoutEngine.execute", lambda *_: None)  # half of drawing


def accuracy(model: Classifier, pixels: torch.Tensor, labels: torch.Tensor, extra: dict[str, Any]) -> float:
    mean, std = (torch.tensor(extra[name]).view(1, -1, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        return float((model((pixels.float() / 255 - mean) / std).argmax(dim=1) == labels).float().mean())


def test_accuracies_are_those_of_images_that_were_corrupted_by_hand(finished: Path, tmp_path: Path) -> None:
    finished = shutil.copytree(finished, tmp_path / "run")
    found = evaluate_robustness(finished, only=["contrast", "gaussian_noise"], seed=3)["corruptions"]
    opened = open_run(finished)
    split, model = opened.dataset.test, opened.model.eval()
    assert found["clean"] == pytest.approx(evaluate(finished)["test_accuracy"])
    assert list(found["accuracy"]) == ["gaussian_noise", "contrast"]
    for name, row in found["accuracy"].items():
        wanted = [
            accuracy(model, corrupt(split.images, name, severity, seed=3), split.labels, opened.extra)
            for severity in range(1, 6)
        ]
        assert row == pytest.approx(wanted)
    assert found["mean"] == pytest.approx(sum(map(sum, found["accuracy"].values())) / 10)
    assert read_record(finished)["corruptions"] == found


def publish(run: Path, folder: Path, *names: str) -> Path:
    """Files in the layout of CIFAR-10-C, with the corruptions that would be generated."""
    folder.mkdir()
    test = open_run(run).dataset.test
    np.save(folder / "labels.npy", test.labels.repeat(5).numpy())
    for name in names:
        made = torch.cat([corrupt(test.images, name, severity) for severity in range(1, 6)])
        np.save(folder / f"{name}.npy", made.permute(0, 2, 3, 1).numpy())
    return folder


def test_published_files_give_what_their_images_give(finished: Path, tmp_path: Path) -> None:
    run, reference = (shutil.copytree(finished, tmp_path / name) for name in ("run", "resnet"))
    files = publish(finished, tmp_path / "files", "gaussian_noise", "contrast")
    generated = evaluate_robustness(reference, only=["gaussian_noise", "contrast"], images=7)["corruptions"]
    options = ("--corruptions", "--images", "7", "--corruption-files", files)
    refused(call("evaluate", run, *options, "--reference", reference), "with source generated, this run with published")
    assert call("evaluate", run, *options).exit_code == 0
    record = read_record(run)["corruptions"]
    assert record["accuracy"] == generated["accuracy"]
    assert record["source"] == "published files"
    assert "severities (published files)" in (run / "robustness.md").read_text()
    assert evaluate_robustness(reference, corruption_files=files, images=7, reference=run)["corruptions"]["relative"]
    refused(call("evaluate", run, *options, "--only", "fog"), "has no file fog.npy; it has gaussian_noise, contrast")
    refused(call("evaluate", run, "--curves", *options[1:]), "--corruption-files belongs to --corruptions")


def test_files_of_another_data_set_are_named_in_a_line(finished: Path, tmp_path: Path) -> None:
    def refuse(folder: Path, *words: str) -> None:
        refused(call("evaluate", finished, "--corruptions", "--corruption-files", folder), *words)

    refuse(tmp_path / "none", "is no folder with the files of CIFAR-10-C")
    refuse(finished, "holds no corrupted images")
    files = publish(finished, tmp_path / "files", "fog")
    labels = np.load(files / "labels.npy")
    np.save(files / "labels.npy", labels + 1)
    refuse(files, "labels up to 2, and this run has 2 classes")
    np.save(files / "labels.npy", labels[:-5])
    refuse(files, "has images (9, 3, 8, 8)", "test images (10, 3, 8, 8)")
    np.save(files / "labels.npy", labels[:-1])
    refuse(files, "labels.npy should have a whole number for each image of 5 severities")
    np.save(files / "labels.npy", labels)
    np.save(files / "fog.npy", np.load(files / "fog.npy").astype(float))
    refuse(files, "fog.npy should have 50 images (height, width, 3) of uint8", "got float64")
    (files / "fog.npy").write_text("fog")
    refuse(files, "fog.npy can't be read as an array of NumPy")
    with (files / "labels.npy").open("wb") as file:
        np.savez(file, labels=labels)
    refuse(files, "labels.npy should be one array of NumPy")


def test_curves_are_those_of_single_attacks(finished: Path, tmp_path: Path) -> None:
    finished = shutil.copytree(finished, tmp_path / "run")
    found = evaluate_robustness(finished, False, True, attack="64/255", attack_steps=2)["curves"]
    opened = open_run(finished)
    split = opened.dataset.test
    epsilon = 64 / 255
    assert found["radius"]["radii"] == pytest.approx([0, epsilon])
    assert found["steps"]["steps"] == [1, 2]
    assert found["radius"]["pgd"][0] == found["clean"]
    assert found["radius"]["pgd"][-1] == found["steps"]["pgd"][-1]  # the same attack
    assert found["steps"]["pgd"][1] == opened.counts(split, PGD(epsilon, 2)).accuracy
    assert found["steps"]["apgd"][1] == opened.counts(split, APGD(epsilon, 2)).accuracy
    certified = found["certified"]
    if "accuracy" in certified:  # proofs hold: a ball of radius r in this norm lies in one of r sqrt(n)
        size = split.images[0].numel() ** 0.5
        for radius, share in zip(certified["radii"], certified["accuracy"], strict=True):
            attacked = opened.counts(split, PGD(radius / size, 2)).accuracy if 0 < radius / size <= 1 else 1.0
            assert share <= attacked
        assert certified["accuracy"][0] == found["clean"]
        assert certified["accuracy"] == sorted(certified["accuracy"], reverse=True)
    else:
        assert certified["reason"]


def test_a_few_corruptions_are_added_to_those_measured_alike(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    both = evaluate_robustness(run, only=["fog", "contrast"])["corruptions"]
    other = shutil.copytree(run, tmp_path / "other")
    evaluate_robustness(run, only=["snow"])
    again = evaluate_robustness(run, only=["fog"], reference=other)["corruptions"]
    assert list(again["accuracy"]) == ["snow", "fog", "contrast"]
    assert {name: again["accuracy"][name] for name in both["accuracy"]} == both["accuracy"]
    assert again["mean"] == pytest.approx(sum(map(sum, again["accuracy"].values())) / 15)
    assert set(again["relative"]["corruption_errors"]) == {"fog", "contrast"}  # those that the reference has
    fewer = evaluate_robustness(run, only=["fog"], images=5)["corruptions"]
    assert list(fewer["accuracy"]) == ["fog"]  # of other images


def test_a_reference_on_other_images_is_refused(finished: Path, tmp_path: Path) -> None:
    run, other = (shutil.copytree(finished, tmp_path / name) for name in ("run", "other"))
    record = evaluate_robustness(other, only=["fog"])
    record["corruptions"]["labels"] = "0" * 16
    (other / "robustness.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="other was measured on images of other classes"):
        evaluate_robustness(run, only=["fog"], reference=other)
    del record["corruptions"]["labels"]  # as records were before
    (other / "robustness.json").write_text(json.dumps(record))
    evaluate_robustness(run, only=["fog"], reference=other)


def test_errors_relative_to_a_reference() -> None:
    own = {"clean": 0.9, "accuracy": {"fog": [0.8, 0.7], "snow": [0.5, 0.5], "frost": [0.9, 0.9]}}
    other = {"clean": 0.8, "accuracy": {"fog": [0.5, 0.5], "snow": [0.6, 0.4], "frost": [1.0, 1.0]}}
    found = relative_errors(own, other)
    assert found["corruption_errors"] == {"fog": pytest.approx(0.5), "snow": pytest.approx(1.0), "frost": None}
    assert found["mean"] == pytest.approx(0.75)
    assert found["mean_15"] is None
    # fog: (0.5 - 0.2) / (1.0 - 0.4); snow: (1.0 - 0.2) / (1.0 - 0.4); the reference does not lose to frost.
    assert found["relative_mean"] == pytest.approx((0.5 + 0.8 / 0.6) / 2)


def test_one_command(finished: Path, tmp_path: Path) -> None:
    run, reference = (shutil.copytree(finished, tmp_path / name) for name in ("run", "resnet"))
    options = ("--corruptions", "--only", "fog", "--images", "6")
    refused(call("evaluate", run, *options, "--reference", reference), "has no corruptions to compare with")
    refused(call("evaluate", run, *options, "--reference", tmp_path / "nowhere"), "no such folder")
    assert call("evaluate", reference, *options).exit_code == 0
    result = call("evaluate", run, *options, "--reference", reference, "--curves", "--attack-steps", "1")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "1/1 fog" in result.stdout
    assert "mean corruption error relative to resnet: " in result.stdout
    record = json.loads((run / "robustness.json").read_text())
    assert record["corruptions"]["images"] == 6
    assert record["corruptions"]["relative"]["mean"] in (1.0, None)  # the same weights
    text = (run / "robustness.md").read_text()
    assert text == markdown(record, "run")
    row = record["corruptions"]["accuracy"]["fog"]
    assert f"| fog | {100 * row[0]:.1f} |" in text
    assert (run / "robustness.png").stat().st_size > 5000
    assert (run / "robustness.svg").read_text().startswith("<?xml")
    section = robustness(record, run)
    assert "data:image/png;base64," in section
    assert "fog" in section
    refused(
        call("evaluate", run, "--corruptions", "--reference", reference), "measured with images 6, this run with 10"
    )
    refused(
        call("evaluate", run, "--corruptions", "--only", "snow", "--images", "6", "--reference", reference),
        "was not measured under snow",
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--corruptions", "--only", "fogg"), "unknown corruption 'fogg'; did you mean 'fog'?"),
        (("--only", "fog"), "need --corruptions or --curves"),
        (("--curves", "--only", "fog"), "--only belongs to --corruptions"),
        (("--corruptions", "--images", "0"), "--images should be at least 1; got 0"),
        (("--curves", "--attack", "nine"), "--attack nine is not right: a radius is a number in (0, 1] such as 8/255"),
        (("--curves", "--attack-steps", "0"), "--attack-steps should be at least 1; got 0"),
        (("--curves", "--attack-step-size", "0.1"), "--attack-step-size has no effect on curves"),
        (("--corruptions", "--attack", "8/255"), "--attack beside --corruptions needs --curves"),
    ],
)
def test_what_is_refused(finished: Path, options: tuple[str, ...], words: str) -> None:
    refused(call("evaluate", finished, *options), words)


def test_denoisers_and_folders_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(to_toml(load_any_recipe("denoiser-convex")))
    refused(call("evaluate", tmp_path, "--corruptions"), "are for classifiers, and this run trained a denoiser")
    refused(call("figures", tmp_path), "figures are for classifiers, and", "holds a denoiser")
    refused(call("evaluate", tmp_path / "none", "--curves"), "no such folder")


def test_a_damaged_record_counts_as_none(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    evaluate_robustness(run, only=["fog"], images=2)
    whole = read_record(run)
    assert read_run(run).robustness == whole
    (run / "robustness.json").write_text(json.dumps({**whole, "curves": {"radius": {}}}))
    assert read_record(run) == whole
    for damaged in ("5", '{"corruptions": 5}', '{"corruptions": {"accuracy": 3}}'):
        (run / "robustness.json").write_text(damaged)
        assert read_run(run).robustness == {}
        refused(call("figures", run, "--only", "corruptions"), "it was not measured yet: run `opteq evaluate")
    assert call("evaluate", run, "--corruptions", "--only", "fog", "--images", "2").exit_code == 0
    assert read_record(run) == whole
