"""Classes of pixels: Cityscapes folders, windows of images and maps alike, what is counted, and whole runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

from cityscapes_cases import CAR, EGO, ROAD, SKY, cityscapes, settings
from lazy import lazily
from opteq import data, models
from opteq.cli import app
from opteq.common.errors import UserError
from opteq.data import Augmentation, Batches, Split
from opteq.data.augmentation.windows import Windows
from opteq.data.cache import takes_long
from opteq.data.progress import progress
from opteq.data.readers.cityscapes import CLASSES
from opteq.report.charts.images import class_color
from opteq.report.predictions import LabelledImages
from opteq.report.segmentation import evaluate_segmentation, pixel_mistakes
from opteq.training import Interrupted, Recipe, evaluate, load_recipe, train
from opteq.training.metrics import RunningMetrics
from opteq.training.optim.losses import cross_entropy
from opteq.training.optim.schedules import schedule
from opteq.training.recipe.sections import ScheduleSection
from opteq.training.step import StepRunner
from training_cases import lines

sklearn_metrics = lazily("sklearn.metrics")

# ---- Cityscapes


@pytest.fixture(scope="module")
def streets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cityscapes(tmp_path_factory.mktemp("streets"))


@pytest.fixture
def copy(streets: Path, tmp_path: Path) -> Path:
    shutil.copytree(streets, tmp_path / "copy", ignore=shutil.ignore_patterns("cache"))
    return tmp_path / "copy"


def load(root: Path, **options: Any) -> data.Dataset:
    return data.load("cityscapes", root, cache=root / "cache", **options)


def files(root: Path, split: str, kind: str) -> list[Path]:
    return sorted((root / kind / split).rglob("*.png"))


def test_images_and_maps_are_read(streets: Path) -> None:
    loaded = load(streets)
    assert (len(loaded.train), len(loaded.test)) == (6, 2)
    assert loaded.train.dense
    assert loaded.train.images.shape == (6, 3, 32, 64)
    assert loaded.train.labels.shape == (6, 32, 64)
    assert loaded.classes[0] == "road"
    assert len(loaded.classes) == 19
    places = {identifier: place for place, identifier in enumerate(CLASSES)}
    for split, held in (("train", loaded.train), ("val", loaded.test)):
        for row, (image, labels) in enumerate(
            zip(files(streets, split, "leftImg8bit"), files(streets, split, "gtFine"), strict=True)
        ):
            assert np.array_equal(held.images[row].permute(1, 2, 0).numpy(), np.asarray(Image.open(image)))
            identifiers = np.asarray(Image.open(labels))
            for identifier in (ROAD, SKY, CAR, EGO):
                found = held.labels[row].numpy()[identifiers == identifier]
                assert (found == places.get(identifier, 255)).all()


def test_the_official_classes_are_those_that_are_judged() -> None:
    assert list(CLASSES) == [7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]
    assert [CLASSES[one] for one in (7, 11, 23, 24, 26, 33)] == ["road", "building", "sky", "person", "car", "bicycle"]


def test_maps_are_mapped_from_the_cache(streets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(streets)
    monkeypatch.setattr("opteq.data.readers.cityscapes._labels", None)  # a second load decodes nothing
    assert torch.equal(load(streets).train.labels, first.train.labels)


def test_a_smaller_size_keeps_the_whole_image(streets: Path) -> None:
    whole, half = load(streets), load(streets, image_size=16)
    assert half.train.images.shape == (6, 3, 16, 32)
    assert set(half.train.labels.unique().tolist()) <= set(whole.train.labels.unique().tolist())
    nearest = F.interpolate(whole.train.labels[:, None].float(), size=(16, 32), mode="nearest-exact")[:, 0]
    assert torch.equal(half.train.labels.float(), nearest)


def test_the_usual_places_are_looked_at(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTEQ_DATA", str(copy))
    assert len(data.load("cityscapes", cache=copy / "cache").train) == 6


def no_labels(root: Path) -> Path:
    path = files(root, "train", "gtFine")[1]
    path.unlink()
    return path


def another_size(root: Path) -> Path:
    path = files(root, "val", "leftImg8bit")[0]
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)
    return path


def another_size_of_labels(root: Path) -> Path:
    path = files(root, "train", "gtFine")[2]
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(path)
    return path


def coloured_labels(root: Path) -> Path:
    path = files(root, "train", "gtFine")[0]
    Image.fromarray(np.zeros((32, 64, 3), np.uint8)).save(path)
    return path


def unknown_identifier(root: Path) -> Path:
    path = files(root, "train", "gtFine")[0]
    Image.fromarray(np.full((32, 64), 77, np.uint8)).save(path)
    return path


def cut_labels(root: Path) -> Path:
    path = files(root, "train", "gtFine")[0]
    path.write_bytes(path.read_bytes()[:40])
    return path


def cut_image(root: Path) -> Path:
    path = files(root, "train", "leftImg8bit")[3]
    path.write_bytes(path.read_bytes()[:200])
    return path


def no_val(root: Path) -> Path:
    shutil.rmtree(root / "leftImg8bit" / "val")
    return root / "leftImg8bit" / "val"


def empty_train(root: Path) -> Path:
    for path in files(root, "train", "leftImg8bit"):
        path.unlink()
    return root / "leftImg8bit" / "train"


def no_images(root: Path) -> Path:
    shutil.rmtree(root / "leftImg8bit")
    return root


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (no_labels, "missing, the labels of"),
        (another_size, "is 8x8 pixels but"),
        (another_size_of_labels, "is 8x8 pixels but"),
        (coloured_labels, "its mode is RGB, not 8-bit grey); take *_gtFine_labelIds.png"),
        (unknown_identifier, "it has the identifier 77, and there are 0 to 33"),
        (cut_labels, "not a label map"),
        (cut_image, "cannot read this image"),
        (no_val, "no such folder; expected leftImg8bit/train"),
        (empty_train, "has no images <city>/*_leftImg8bit.png"),
        (no_images, "no folder leftImg8bit there"),
    ],
)
def test_what_is_wrong_is_said_with_its_path(copy: Path, spoil: Any, message: str) -> None:
    path = spoil(copy)
    with pytest.raises(UserError) as refusal:
        load(copy)
    assert message in str(refusal.value)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_large_images_have_a_bar_sooner(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for shape, drawn_at_all in (((3, 32, 32), False), ((3, 1024, 2048), True)):
        with progress("decoding streets", 100, takes_long(100, shape)) as advance:
            advance(100)
        assert bool(capfd.readouterr().err) == drawn_at_all


def test_wrong_splits_are_refused() -> None:
    images = torch.zeros(2, 3, 4, 6, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"int64 of shape \(N,\), or uint8 of shape \(N, h, w\); got torch.int64"):
        Split(images, torch.zeros(2, 4, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match="should be 4x6 as the images are"):
        Split(images, torch.zeros(2, 6, 4, dtype=torch.uint8))


# ---- windows


def drawn(top: float, left: float, tall: float = 1.0, wide: float = 1.0, mirrored: float = 0.0) -> Tensor:
    return torch.tensor([[top, left, tall, wide, mirrored]])


PICTURE = torch.randint(0, 256, (1, 3, 12, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
MAP = torch.randint(0, 19, (1, 12, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
BLACK = torch.zeros(1, 3, 1, 1)


@pytest.mark.parametrize("mirrored", [0.0, 1.0])
def test_a_window_at_scale_one_is_a_slice(mirrored: float) -> None:
    windows = Windows(drawn(3, 5, mirrored=mirrored), 6, 9, PICTURE)
    pixels, labels = PICTURE[:, :, 3:9, 5:14].float(), MAP[:, 3:9, 5:14]
    if mirrored:
        pixels, labels = pixels.flip(3), labels.flip(2)
    assert torch.equal(windows.of_images(PICTURE, None, BLACK), pixels)
    assert torch.equal(windows.of_labels(MAP, 255), labels)


@pytest.mark.parametrize("size", [(24, 40), (18, 25), (9, 13)])
def test_a_window_of_the_enlarged_image_is_interpolated(size: tuple[int, int]) -> None:
    """Against torch, which makes the enlarged image and cuts it."""
    height, width = size
    windows = Windows(drawn(2, 3, height / 12, width / 20), 5, 7, PICTURE)
    enlarged = F.interpolate(PICTURE.float(), size=size, mode="bilinear", align_corners=False)
    nearest = F.interpolate(MAP[:, None].float(), size=size, mode="nearest-exact")[:, 0]
    assert torch.allclose(windows.of_images(PICTURE, None, BLACK), enlarged[:, :, 2:7, 3:10], atol=1e-3)
    assert torch.equal(windows.of_labels(MAP, 255).float(), nearest[:, 2:7, 3:10])


def test_beside_the_image_there_is_no_label() -> None:
    windows = Windows(drawn(-2, -3, 0.5, 0.5), 10, 16, PICTURE)
    pixels, labels = windows.of_images(PICTURE, None, torch.full((1, 3, 1, 1), 7.0)), windows.of_labels(MAP, 255)
    inside = torch.zeros(10, 16, dtype=torch.bool)
    inside[2:8, 3:13] = True
    assert torch.equal(labels[0] != 255, inside)
    assert (pixels[0][:, ~inside] == 7).all()


def test_rows_are_chosen() -> None:
    many = torch.cat((PICTURE, PICTURE + 1, PICTURE + 2))
    two = drawn(0, 0).expand(2, -1)
    windows = Windows(two, 4, 4, many)
    assert torch.equal(windows.of_images(many, torch.tensor([2, 0]), BLACK), many[[2, 0], :, :4, :4].float())


# ---- batches

CHANGES = Augmentation(crop_height=16, crop_width=24, scale_min=0.4, scale_max=1.6, flip=True, color_jitter=0.2)


def batches(split: Split, **options: Any) -> Batches:
    usual: dict[str, Any] = {"augmentation": CHANGES, "shuffle": True, "num_classes": 19}
    return Batches(split, (0.4, 0.4, 0.4), (0.2, 0.2, 0.2), options.pop("batch_size", 4), **(usual | options))


def test_colours_and_labels_stay_together() -> None:
    """Images whose colour is their label, so that after any window each pixel says what its label has to be."""
    labels = torch.randint(0, 19, (6, 4, 8), generator=torch.Generator().manual_seed(0)).repeat_interleave(8, 1)
    labels = labels.repeat_interleave(8, 2).to(torch.uint8)
    split = Split((labels * 10)[:, None].expand(-1, 3, -1, -1).contiguous(), labels)
    changes = Augmentation(crop_height=24, crop_width=24, scale_min=0.5, scale_max=2.0, flip=True)
    seen = 0
    for images, maps in batches(split, augmentation=changes).epoch(0):
        colours = (images[:, 0] * 0.2 + 0.4) * 255
        assert maps.dtype == torch.int64
        judged = maps != 255
        # Away from edges between classes, where colours are mixed, the colour is exactly that of the label.
        flat = (F.max_pool2d(colours[:, None], 5, 1, 2) - -F.max_pool2d(-colours[:, None], 5, 1, 2))[:, 0] < 0.01
        assert torch.allclose(colours[judged & flat], 10.0 * maps[judged & flat], atol=0.01)
        assert torch.allclose(images[:, 0][~judged], torch.zeros(()), atol=1e-5)
        seen += int((judged & flat).sum())
    assert seen > 500


def test_batches_depend_on_seed_epoch_and_batch_alone(streets: Path) -> None:
    split = load(streets).train
    whole = list(batches(split).epoch(1))
    again = list(batches(split).epoch(1, skip=1))
    parts = [list(batches(split, rank=rank, world=2).epoch(1)) for rank in range(2)]
    assert torch.equal(whole[1][0], again[0][0])
    assert torch.equal(whole[1][1], again[0][1])
    for index, (images, labels) in enumerate(whole):
        assert images.shape[2:] == labels.shape[1:] == (16, 24)
        assert torch.allclose(torch.cat([part[index][0] for part in parts]), images, atol=1e-5)
        assert torch.equal(torch.cat([part[index][1] for part in parts]), labels)
    assert not torch.equal(next(batches(split).epoch(0))[0], whole[0][0])
    assert not torch.equal(next(batches(split, seed=1).epoch(1))[0], whole[0][0])


@pytest.mark.parametrize("changes", [CHANGES, Augmentation(flip=True), Augmentation()])
def test_the_host_gives_what_the_device_gives(streets: Path, changes: Augmentation) -> None:
    split = load(streets).train
    kept, left = (batches(split, augmentation=changes, keep=keep) for keep in ("device", "host"))
    for (images, labels), (others, their_labels) in zip(kept.epoch(0), left.epoch(0), strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, their_labels)


def test_flips_take_the_labels_along(streets: Path) -> None:
    split = load(streets).train
    plain = next(batches(split, augmentation=Augmentation(), shuffle=False).epoch(0))
    images, labels = next(batches(split, augmentation=Augmentation(flip=True), shuffle=False).epoch(0))
    mirrored = 0
    for row in range(len(images)):
        same = torch.equal(images[row], plain[0][row])
        assert torch.equal(images[row], plain[0][row] if same else plain[0][row].flip(2))
        assert torch.equal(labels[row], plain[1][row] if same else plain[1][row].flip(1))
        mirrored += not same
    assert 0 < mirrored < len(images)


def test_windows_serve_classes_of_images_too() -> None:
    digits = data.load("digits")
    changes = Augmentation(crop_height=6, crop_width=5, scale_max=1.5)
    images, labels = next(Batches(digits.train, digits.mean, digits.std, 8, augmentation=changes).epoch(0))
    assert images.shape == (8, 1, 6, 5)
    assert labels.shape == (8,)


@pytest.mark.parametrize("option", ["crop_padding", "randaugment", "mixup", "cutmix"])
def test_what_would_part_colours_and_labels_is_refused(streets: Path, option: str) -> None:
    with pytest.raises(UserError, match=f"augment.{option} would move images but not their label maps"):
        batches(load(streets).train, augmentation=Augmentation(**{option: 1}))


def test_the_number_of_classes_is_asked_for(streets: Path) -> None:
    with pytest.raises(ValueError, match="num_classes is needed"):
        batches(load(streets).train, num_classes=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop_height": 4}, "crop_height and crop_width belong together"),
        ({"crop_height": 4, "crop_width": 4, "scale_min": 2.0}, "scale_min should be at most scale_max = 1; got 2"),
        ({"scale_max": 2.0}, "need crop_height and crop_width"),
        ({"crop_height": 4, "crop_width": 4, "crop_padding": 1}, "two ways to crop"),
        ({"crop_height": 4, "crop_width": 4, "scale_min": 0.0}, "scale_min should be a positive finite number"),
        ({"crop_height": -1, "crop_width": 4}, "crop_height should be at least 0"),
    ],
)
def test_wrong_windows_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Augmentation(**options)


# ---- what is counted


def test_counts_of_pixels() -> None:
    """Against scikit-learn."""
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (5, 6, 7), generator=random)  # of five classes the last neither occurs nor is named
    labels[torch.rand(labels.shape, generator=random) < 0.2] = 255
    logits = torch.randn(5, 5, 6, 7, generator=random)
    logits[:, 4] = -9.0
    metrics = RunningMetrics(torch.device("cpu"), classes=5)
    for part in (slice(0, 2), slice(2, 5)):
        metrics.update(cross_entropy(logits[part], labels[part]), logits[part], labels[part], [])
    counts = metrics.compute()
    judged = labels != 255
    true, predicted = labels[judged].numpy(), logits.argmax(dim=1)[judged].numpy()
    assert counts.confusion is not None
    assert np.array_equal(
        np.array(counts.confusion), sklearn_metrics.confusion_matrix(true, predicted, labels=range(5))
    )
    assert counts.mean_iou == pytest.approx(sklearn_metrics.jaccard_score(true, predicted, average="macro"))
    assert counts.class_accuracy == pytest.approx(sklearn_metrics.recall_score(true, predicted, average="macro"))
    assert counts.accuracy == pytest.approx(float((true == predicted).mean()))
    assert (counts.samples, counts.label_count) == (5, int(judged.sum()))
    whole = F.cross_entropy(logits, labels, ignore_index=255, reduction="sum") / 42
    assert counts.loss == pytest.approx(float(whole), rel=1e-5)


def test_a_image_without_labels_costs_nothing() -> None:
    logits = torch.randn(1, 3, 4, 4, requires_grad=True)
    labels = torch.full((1, 4, 4), 255)
    loss = cross_entropy(logits, labels, label_smoothing=0.1)
    loss.backward()
    assert loss == 0
    assert logits.grad is not None
    assert not logits.grad.any()
    metrics = RunningMetrics(torch.device("cpu"), classes=3)
    metrics.update(loss, logits, labels, [])
    assert (metrics.compute().mean_iou, metrics.compute().accuracy) == (0.0, 0.0)


def test_a_tally_without_classes_has_no_overlap() -> None:
    with pytest.raises(ValueError, match="no confusion matrix"):
        _ = RunningMetrics(torch.device("cpu")).compute().mean_iou


def test_the_poly_schedule() -> None:
    factor = schedule(ScheduleSection(name="poly", power=0.9), steps_per_epoch=10, epochs=4)
    assert [factor(step) for step in (0, 10, 39)] == pytest.approx([1.0, 0.75**0.9, 0.025**0.9])
    warm = schedule(ScheduleSection(name="poly", warmup=1), steps_per_epoch=10, epochs=4)
    assert warm(0) < warm(9) < 1 == warm(10) > warm(39) > 0


# ---- models and runs


def small(**options: Any) -> models.Classifier:
    usual: dict[str, Any] = {
        "extractor_width": 4,
        "extractor_blocks": [1, 1],
        "channels": 8,
        "hidden": [8, 8],
        "head_width": 8,
    }
    return models.create("opteq-cityscapes", **({"num_classes": 5} | usual | options))


def test_every_pixel_has_scores() -> None:
    torch.manual_seed(0)
    model = small().eval()
    assert isinstance(model, models.Segmenter)
    x = torch.randn(2, 3, 33, 50)
    with torch.no_grad():
        scores = model(x)
        assert scores.shape == (2, 5, 33, 50)
        assert torch.equal(F.interpolate(model.head.scores(model.features(x)), size=(33, 50), mode="bilinear"), scores)
    card = models.describe("opteq-cityscapes")
    assert (card.dense, card.classes, models.describe("opteq-162k").dense) == (True, 19, False)


def test_a_segmenter_comes_back_from_its_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = small().eval()
    again = models.from_pretrained(model.save_pretrained(tmp_path))
    x = torch.randn(1, 3, 24, 24)
    assert isinstance(again, models.Segmenter)
    assert torch.equal(again(x), model(x))


def recipe(root: Path, *more: str) -> Recipe:
    return load_recipe("opteq-cityscapes", settings(root, *more))


def test_the_papers_numbers() -> None:
    stated = load_recipe("opteq-cityscapes")
    assert (stated.optimizer.lr, stated.optimizer.momentum, stated.optimizer.weight_decay) == (0.01, 0.9, 0.001)
    assert (stated.schedule.name, stated.schedule.power, stated.train.batch_size) == ("poly", 0.9, 8)
    assert stated.train.epochs * (2975 // stated.train.batch_size) == pytest.approx(40_000, rel=0.002)
    assert models.describe("opteq-cityscapes").options["hidden"] == [256, 512, 512]


def test_a_run_goes_on_where_it_was(streets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at = 3  # tests/test_training_resume.py stops at any moment
    chosen = recipe(streets, "model.options.dropout=0.2", "train.threads=1")
    straight, broken = train(chosen, tmp_path / "straight"), tmp_path / "broken"
    take, steps = StepRunner.step, 0

    def stopped(self: StepRunner, *arguments: Any) -> None:
        nonlocal steps
        steps += 1
        take(self, *arguments)
        if steps == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(StepRunner, "step", stopped)
    with pytest.raises(Interrupted, match=f"after step {stop_at}"):
        train(chosen, broken)
    monkeypatch.undo()
    train(chosen, broken, resume=True)
    assert (broken / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()
    assert lines(broken) == lines(straight)


@pytest.fixture(scope="module")
def run(streets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    changes = [part for one in settings(streets, "train.epochs=6") for part in ("--set", one)]
    result = CliRunner().invoke(app, ["train", "opteq-cityscapes", "--out", str(out), *changes])
    assert result.exit_code == 0, result.output
    assert "IoU" in result.output
    return out


def test_a_run_from_the_command_line(run: Path, streets: Path) -> None:
    last = lines(run)[-1]
    assert last["train_loss"] < 0.7 * lines(run)[0]["train_loss"]
    assert 0 < last["test_iou"] <= last["test_class_accuracy"] <= 1
    result = CliRunner().invoke(app, ["evaluate", str(run)])
    assert result.exit_code == 0, result.output
    assert "intersection over union" in result.output
    assert "top-5" not in result.output
    found = json.loads((run / "evaluation.json").read_text())
    assert found["test_iou"] == pytest.approx(last["test_iou"])
    assert "test_top5" not in found
    # By hand: the saved model on all test images, whole.
    model, test = models.from_pretrained(run), load(streets).test
    extra = model.config["extra"]
    mean, std = (torch.tensor(extra[key])[:, None, None] for key in ("mean", "std"))
    with torch.no_grad():
        predicted = model((test.images / 255 - mean) / std).argmax(dim=1)
    judged = test.labels != 255
    expected = sklearn_metrics.jaccard_score(test.labels[judged].numpy(), predicted[judged].numpy(), average="macro")
    assert found["test_iou"] == pytest.approx(expected, abs=2e-3)


def test_the_page_shows_maps_beside_images(run: Path) -> None:
    page = (run / "report.html").read_text()
    found = evaluate(run)
    shown = f"{100 * found['test_iou']:.1f}\u00a0%"
    assert shown in page
    for words in ("mean IoU", "predicted label map", "Most frequent mistakes", "of its pixels are correct"):
        assert words in page
    for words in ("Most probable classes", "can't be run", "misclassified. Rows"):
        assert words not in page
    assert page.count('alt="true label map"') == 2


def test_time_is_limited_and_the_page_says_how_far_it_came(streets: Path) -> None:
    torch.manual_seed(0)
    loaded = load(streets)
    images = LabelledImages(loaded.train.images, loaded.train.labels, loaded.classes, loaded.mean, loaded.std)
    found = evaluate_segmentation(small(num_classes=19), images, seconds=0)
    assert (found.seen, found.total, len(found.examples)) == (2, 6, 2)
    assert "in 2 of 6 images" in pixel_mistakes(found, loaded.classes)
    assert int(found.confusion.sum()) == sum(int((one.labels != 255).sum()) for one in found.examples)
    right = sum(one.accuracy for one in found.examples) / 2
    assert float(found.confusion.diagonal().sum() / found.confusion.sum()) == pytest.approx(right)


def test_colours_of_classes_can_be_told_apart() -> None:
    colours = torch.tensor([class_color(place) for place in range(19)]).float()
    gaps = torch.cdist(colours, colours) + 1e9 * torch.eye(19)
    assert float(gaps.min()) > 20


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        (
            "digits",
            ["data.name=cityscapes"],
            "is for segmentation, but the model 'opteq-digits' is for classification",
        ),
        (
            "opteq-cityscapes",
            ["data.name=digits", "data.root=none"],
            "but the model 'opteq-cityscapes' is for segmentation",
        ),
        ("opteq-cityscapes", ["adversary.epsilon=8/255"], "attacks need a classifier of images"),
        ("opteq-cityscapes", ["augment.randaugment=2"], "augment.randaugment would move images but not"),
        ("opteq-cityscapes", ["loss.regularizer=ridge", "loss.weight=0.1"], "a head with a linear layer"),
    ],
)
def test_what_does_not_fit_is_refused(streets: Path, tmp_path: Path, name: str, more: list[str], message: str) -> None:
    overrides = settings(streets) if name == "opteq-cityscapes" else [f"data.root={streets}", f"data.cache={tmp_path}"]
    with pytest.raises(UserError, match=message):
        train(load_recipe(name, [*overrides, *more]), tmp_path / "run")


def test_an_attack_on_pixels_is_refused(run: Path) -> None:
    with pytest.raises(UserError, match="--attack: attacks need a classifier of images"):
        evaluate(run, attack="8/255")
