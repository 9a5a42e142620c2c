"""The report of a run: what it says against what can be computed, runs with pieces missing, and hostile text."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import opteq
from opteq import data, models
from opteq.cli import app
from opteq.common.errors import UserError
from opteq.report import compare, page, write
from opteq.report.examples import Example, ShareOfEvidence, WhatIf, choose, explain
from opteq.report.formula import formula
from opteq.report.layer_solve import LayerSolve
from opteq.report.page import Findings, render
from opteq.report.predictions import LabelledImages, Predictions, predict
from opteq.report.run import read_run

HOSTILE = "<script>alert('x')</script>&\"quoted\""
VOID = {"meta", "link", "img", "br", "hr", "input"}


def metrics(epochs: int, **changes: Any) -> str:
    lines = []
    for epoch in range(1, epochs + 1):
        line = {
            "epoch": epoch,
            "train_loss": 2 / epoch,
            "train_accuracy": 1 - 0.5 / epoch,
            "test_loss": 2.1 / epoch,
            "test_accuracy": 1 - 0.6 / epoch,
            "solver_steps": 5.5,
            "worst_residual": 3e-4,
            "lr": 0.1,
            "seconds": 2.0,
        }
        lines.append(json.dumps({**line, **changes}))
    return "\n".join(lines) + "\n"


def make_run(folder: Path, model: str = "opteq-digits", epochs: int = 4, **options: Any) -> Path:
    """A run folder as training leaves it, with weights that have learned nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    models.create(model, num_classes=10, in_channels=1, **options).save_pretrained(folder)
    recipe = f'name = "tiny"\n[model]\nname = "{model}"\n[data]\nname = "digits"\n[train]\nepochs = {epochs}\n'
    (folder / "recipe.toml").write_text(recipe)
    machine = {"command": ["opteq", "train", "a recipe"], "python": "3.11", "packages": {"torch": "2.13"}, "cuda": None}
    (folder / "environment.json").write_text(json.dumps(machine))
    (folder / "metrics.jsonl").write_text(metrics(epochs))
    return folder


class Outline(HTMLParser):
    """Checks that every element is closed where it should be, and collects what a test asks for."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: list[str] = []
        self.addresses: list[str] = []
        self.scripts = 0
        self.words: list[str] = []
        self.feed(content)
        self.close()
        assert not self.open, f"never closed: {self.open}"
        self.text = re.sub(r"\s+", " ", "".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [str(given[key]) for key in ("src", "href", "xlink:href", "action") if key in given]
        self.scripts += tag == "script"
        if tag == "section":
            self.sections.append(str(given["id"]))
        if tag == "img":
            assert "alt" in given
        if tag == "svg":
            assert given.get("aria-label")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, words: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(words)


def outline(path: Path) -> Outline:
    assert path.stat().st_size < 1_500_000
    return Outline(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("run"), channels=4)
    write(folder)
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """The same run for a test that damages it; without its page."""
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()
    return tmp_path / "run"


def test_the_page_is_whole_and_needs_nothing_else(run: Path) -> None:
    found = outline(run / "report.html")
    assert found.sections == ["objective", "learning", "solving", "guarantees", "mistakes", "images", "details"]
    assert all(address.startswith("data:") for address in found.addresses)
    content = (run / "report.html").read_text(encoding="utf-8")
    assert "@import" not in content
    assert "url(" not in content
    assert not re.search(r"https?://", content)
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_the_numbers_are_those_of_the_model(run: Path) -> None:
    model = models.from_pretrained(run).eval()
    digits = data.load("digits")
    x, labels = next(data.Batches(digits.test, digits.mean, digits.std, len(digits.test)).epoch(0))
    with torch.no_grad():
        right = model(x).argmax(1) == labels
    text = outline(run / "report.html").text
    share = round(100 * float(right.float().mean()), 1)
    assert f"accuracy{share:.1f} %of {len(labels)} test images" in text
    assert f"exactly {sum(p.numel() for p in model.parameters()):,}" in text
    assert f"Of {len(labels)} test images, {int((~right).sum())} were misclassified" in text
    certificate = dict(models.equilibria(model))["equilibrium"].problem.certificate()
    assert f"a contraction with factor at most {certificate.contraction:.3f}" in text
    assert "A contraction of a complete space has exactly one fixed point (Banach)." in text
    assert "opteq train 'a recipe'" in text


def test_the_cards_split_the_difference_of_logits(run: Path) -> None:
    model, digits = models.from_pretrained(run), data.load("digits")
    images = LabelledImages(digits.test.images, digits.test.labels, digits.classes, digits.mean, digits.std)
    found = predict(model, images, 60.0)
    for example in explain(model, images, found, 60.0):
        x = images.batch(torch.tensor([images_index(images, example)]), torch.device("cpu"))
        with torch.no_grad():
            logits = model(x)[0]
        difference = float(logits[example.predicted] - logits[example.evidence.rival])
        assert sum(example.evidence.shares.values()) == pytest.approx(difference, abs=1e-4)
        assert float(example.evidence.pixels.sum()) + example.evidence.offset == pytest.approx(difference, abs=1e-4)
        (solve,) = example.solves
        assert solve.objective[-1] <= solve.objective[0]
        assert solve.objective[-1] == pytest.approx(sum(solve.end.values()), rel=1e-3)
        assert solve.residuals[-1] <= solve.tol < solve.residuals[0]
        halved = {one.term: one for one in example.what_if if one.factor == 0.5}
        assert set(halved) == {"quadratic", "coupling", "input"}


def images_index(images: LabelledImages, example: Example) -> int:
    same = (images.images == example.pixels).flatten(1).all(dim=1)
    return int(same.nonzero()[0])


def test_a_baseline_has_no_objective(tmp_path: Path) -> None:
    found = outline(write(make_run(tmp_path, "resnet18-cifar", blocks=[1, 1, 1, 1], width=4)))
    assert found.sections == ["objective", "learning", "mistakes", "images", "details"]
    assert "a baseline without equilibrium layers" in found.text
    assert "solver steps per image" not in found.text
    assert "Evidence for" in found.text


@pytest.mark.parametrize("stem", [{}, {"stem": "pyramid", "stem_widths": [4, 6], "stem_depth": 1}], ids=["one", "two"])
def test_geq_shows_attention_whether_branches_see_one_image_or_their_own(tmp_path: Path, stem: dict[str, Any]) -> None:
    run = make_run(tmp_path, "geq-5m", channels=8, scales=[1, 2], hidden=[8, 16], **stem)
    found = outline(write(run, seconds=0))
    assert re.search(r"attention, 0\.\d+ to (0\.\d+|1\.0)", found.text)
    assert "The first of 2 parts:" in found.text
    assert "Every one of the 2 branches" in found.text


def test_layers_in_a_row_have_no_objective_and_the_page_says_why(tmp_path: Path) -> None:
    found = outline(write(make_run(tmp_path, "opteq-162k", channels=4), seconds=0))
    assert "together they minimise nothing in general" in found.text
    assert "There is no objective for equilibrium" in found.text


def test_time_is_limited_and_the_page_says_how_far_it_came(copy: Path) -> None:
    text = outline(write(copy, seconds=0)).text
    assert re.search(r"Of the 64 of 3\d\d evaluated test images", text)
    assert "on the test images, as recorded" in text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metrics.jsonl", None, "No epoch is finished yet"),
        ("metrics.jsonl", "", "No epoch is finished yet"),
        ("metrics.jsonl", metrics(1), "after 1 of 4 epochs"),
        ("metrics.jsonl", metrics(4, train_loss=float("nan"), test_loss=float("inf")), "Some losses are not finite"),
        ("metrics.jsonl", metrics(4, test_accuracy=None), "4 epochs of training."),
        ("metrics.jsonl", metrics(4) + '{"epoch": 5, "tra', "metrics.jsonl: 1 line can't be read and is left out."),
        ("metrics.jsonl", "[1]\nnull\n", "metrics.jsonl: 2 lines can't be read and are left out."),
        ("metrics.jsonl", '{"train_loss": 1.0}\n{"train_loss": 0.5}\n', "after 2 of 4 epochs"),
        ("recipe.toml", None, "The recipe names no data"),
        ("recipe.toml", "name = [", "recipe.toml can't be read"),
        ("recipe.toml", '[data]\nname = "folder"\nroot = "/nowhere"\n', "The test images can't be loaded"),
        ("environment.json", "{", "environment.json can't be read"),
        ("model.safetensors", None, "No weights are saved yet"),
        ("model.safetensors", "not weights", "The weights can't be loaded"),
    ],
)
def test_missing_and_damaged_pieces_give_a_page_that_says_so(
    copy: Path, name: str, content: str | None, words: str
) -> None:
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_text(content)
    found = outline(write(copy, seconds=0))
    assert words in found.text
    assert "learning" in found.sections


def test_weights_that_are_not_finite_give_a_page_that_says_so(copy: Path) -> None:
    model = models.from_pretrained(copy)
    for weight in model.parameters():
        weight.data.fill_(float("nan"))
    model.save_pretrained(copy)
    found = outline(write(copy, seconds=0))
    assert "The model can't be run on the test images" in found.text
    assert {"objective", "learning", "guarantees"} <= set(found.sections)


def test_images_are_seen_as_in_training(run: Path, copy: Path) -> None:
    """Training images may have changed since, and their colours; the network knows only those that it was given."""
    model, digits = models.from_pretrained(copy), data.load("digits")
    model.config["extra"] |= {"classes": list(digits.classes), "mean": [0.9], "std": [0.05]}
    model.save_pretrained(copy)
    x, labels = next(data.Batches(digits.test, (0.9,), (0.05,), len(digits.test)).epoch(0))
    with torch.no_grad():
        wrong = int((model(x).argmax(1) != labels).sum())
    text = outline(write(copy)).text
    assert f"Of {len(labels)} test images, {wrong} were misclassified" in text
    assert f"{wrong} were taken" not in outline(run / "report.html").text


def test_images_of_other_classes_are_not_shown(copy: Path) -> None:
    model = models.from_pretrained(copy)
    model.config["extra"]["classes"] = [*"123456789", "ten"]
    model.save_pretrained(copy)
    found = outline(write(copy))
    assert "The classes are not those that the model was trained on" in found.text
    assert not {"mistakes", "images"} & set(found.sections)


def test_a_command_that_is_no_text_is_shown_as_far_as_it_is(copy: Path) -> None:
    (copy / "environment.json").write_text(json.dumps({"command": ["opteq", "--out", "runs/\udcff"]}))
    assert "opteq --out 'runs/?'" in outline(write(copy, seconds=0)).text


def test_a_resumed_run_counts_every_epoch_once(copy: Path) -> None:
    (copy / "metrics.jsonl").write_text(metrics(3) + metrics(4, train_loss=7.5))
    epochs = read_run(copy).epochs
    assert [(one["epoch"], one["train_loss"]) for one in epochs] == [(1, 7.5), (2, 7.5), (3, 7.5), (4, 7.5)]


@pytest.mark.parametrize(
    ("make", "message"), [(False, "is not a folder; give the run folder"), (True, "is not a run folder")]
)
def test_what_is_no_run_is_refused(tmp_path: Path, make: bool, message: str) -> None:
    folder = tmp_path / "other"
    if make:
        folder.mkdir()
        (folder / "holiday.txt").write_text("no run")
    with pytest.raises(UserError, match=message):
        write(folder)
    assert not (folder / "report.html").exists()


def test_a_full_disk_leaves_the_old_page(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / "report.html").write_text("the old page")

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(page, "write_atomically", full)
    with pytest.raises(UserError, match="writing the report failed: No space left on device"):
        write(copy, seconds=0)
    assert (copy / "report.html").read_text() == "the old page"


def test_text_from_outside_is_only_text(copy: Path) -> None:
    recipe = (
        f"name = {json.dumps(HOSTILE)}\nreproduces = {json.dumps(HOSTILE)}\n[model]\nname = {json.dumps(HOSTILE)}\n"
    )
    (copy / "recipe.toml").write_text(recipe)
    (copy / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE, "command": [HOSTILE]}))
    found = outline(write(copy, seconds=0))
    assert found.scripts == 1
    assert found.text.count(HOSTILE) >= 6


@pytest.mark.parametrize("classes", [3, 20])
def test_names_of_classes_are_only_text(copy: Path, classes: int) -> None:
    (copy / "model.safetensors").unlink()
    html = render(read_run(copy), invented(classes))
    found = Outline(html)
    assert found.scripts == 1
    assert HOSTILE in found.text
    assert "<script>alert" not in html.split("</script>", 1)[1]


def invented(classes: int, count: int = 200) -> Findings:
    """What a model might have shown, without a model; class 0 has a hostile name."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (count,), generator=generator)
    images = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    names = (HOSTILE, *(f"kind {index}" for index in range(1, classes)))
    scores = torch.randn(count, classes, generator=generator)
    scores[torch.arange(count), labels] += 1.5
    probabilities = scores.softmax(1)
    predictions = probabilities.argmax(1)
    confusion = torch.zeros(classes, classes, dtype=torch.int64)
    confusion.index_put_((labels, predictions), torch.tensor(1), accumulate=True)
    looked = Predictions(torch.arange(count), predictions, probabilities, confusion, [], count)
    top = probabilities.topk(3, dim=1)
    examples = [
        Example(
            pixels=images[row],
            label=int(labels[row]),
            predicted=int(predictions[row]),
            likely=list(zip(top.indices[row].tolist(), top.values[row].tolist(), strict=True)),
            evidence=ShareOfEvidence(0, {HOSTILE: 1.5, "bias": -0.5}, {}, torch.randn(32, 32), 0.0, True),
            solves=[LayerSolve(HOSTILE, 1e-3, [1.0, 0.0], [0.0, -1.0], {HOSTILE: 0.0}, {HOSTILE: -1.0}, None, [])],
            what_if=[WhatIf(HOSTILE, HOSTILE, 0.0, 0, 1.0, True)],
        )
        for row in choose(looked, labels)
    ]
    mean = (0.5, 0.5, 0.5)
    return Findings(None, LabelledImages(images, labels, names, mean, mean), looked, examples)


def test_chosen_images_are_wrong_and_right_and_of_different_classes() -> None:
    found = invented(10)
    assert found.predictions is not None
    assert found.images is not None
    labels = found.images.labels
    rows = choose(found.predictions, labels)
    right = [bool(found.predictions.predicted[row] == labels[row]) for row in rows]
    assert right == [False] * 3 + [True] * 3
    assert len({int(labels[row]) for row in rows[:3]}) == 3
    sure = found.predictions.probabilities.amax(1)
    wrong = found.predictions.predicted != labels
    assert float(sure[rows[0]]) == float(sure[wrong].max())
    assert float(sure[rows[3]]) == float(sure[~wrong].min())
    perfect = invented(10).predictions
    assert perfect is not None
    assert len(choose(perfect, perfect.predicted)) == 6


def test_solves_are_recorded_over_all_batches() -> None:
    torch.manual_seed(0)
    model = models.create("opteq-digits", in_channels=1, channels=4)
    digits = data.load("digits")
    images = LabelledImages(digits.test.images[:100], digits.test.labels[:100], digits.classes, digits.mean, digits.std)
    found = predict(model, images, seconds=100)
    (record,) = found.solves
    with torch.no_grad():
        model.eval()(images.batch(torch.arange(100), torch.device("cpu")))
    last = dict(models.equilibria(model))["equilibrium"].last
    assert last is not None
    report = last[0]
    assert found.complete
    assert record.converged == float(report.converged.float().mean())
    assert record.mean_steps == pytest.approx(float(report.steps.float().mean()))
    assert record.worst_residual == pytest.approx(float(report.residual.max()), rel=1e-3)
    assert len(record.worst) == len(record.median) == int(report.steps.max()) + 1
    assert all(high >= middle for high, middle in zip(record.worst, record.median, strict=True))


def test_a_prior_before_deep_layers_is_part_of_the_step_and_leaves_no_objective() -> None:
    layers = [(opteq.operators.Dense(3, 4, bound=0.9), torch.nn.Linear(4, 4)) for _ in range(2)]
    plain = formula(opteq.DeepOptEq(layers))
    assert len(plain.terms) == 1
    found = formula(opteq.DeepOptEq(layers, regularizer=opteq.regularizers.Ridge(), gamma=0.2))
    assert found.terms == ()
    assert "0.2 ∇" in found.step
    assert "Ridge" in found.remark


def test_runs_are_compared(run: Path, copy: Path, tmp_path: Path) -> None:
    (copy / "recipe.toml").write_text((copy / "recipe.toml").read_text().replace("epochs = 4", "epochs = 9"))
    (copy / "metrics.jsonl").write_text(metrics(2, test_accuracy=0.25))
    (copy / "model.safetensors").unlink()  # still running
    moved = copy.rename(tmp_path / "other")
    found = outline(compare([run, moved], tmp_path / "both.html"))
    assert found.sections == ["results", "learning", "recipes"]
    assert "epochs4 of 42 of 9" in found.text
    assert "finishedyesno" in found.text
    assert "test accuracy, last85.0 %25.0 %" in found.text
    assert "The recipes differ in 1 key. " in re.sub(r"(?<=key\.)", " ", found.text)
    assert "train.epochs49" in found.text


def test_wrong_comparisons_are_refused(run: Path, tmp_path: Path) -> None:
    for folders, words in (([run], "2 to 8 runs; got 1"), ([run, run], "twice"), ([run, tmp_path], "not a run folder")):
        with pytest.raises(UserError, match=words):
            compare(folders, tmp_path / "both.html")
    assert not (tmp_path / "both.html").exists()


def test_the_command_writes_both_pages(run: Path, copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").unlink()
    alone = CliRunner().invoke(app, ["report", str(copy)])
    assert alone.exit_code == 0, alone.output
    assert "No weights are saved yet" in outline(copy / "report.html").text
    both = CliRunner().invoke(app, ["report", str(run), str(copy), "--out", str(tmp_path / "both.html")])
    assert both.exit_code == 0, both.output
    assert "both.html" in both.stdout
    wrong = CliRunner().invoke(app, ["report", str(run), "--out", "x.html"])
    assert wrong.exit_code == 2
    assert "--out belongs to a comparison" in wrong.stderr
