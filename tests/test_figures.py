"""Figures of a run: which fit, files and captions, numbers that are drawn, and what is refused."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from cli_cases import call, refused
from opteq import models
from opteq.analysis.branches import measure_branches
from opteq.common.errors import UserError
from opteq.report.figures import FIGURES, branches, maps, robust, settings, solving, style, write_figures
from opteq.report.figures.subject import FigureUnavailableError, Subject, open_subject
from opteq.states import blocks
from opteq.training import load_recipe
from opteq.training.recipe.files import to_toml

SMALL: dict[str, dict[str, Any]] = {
    "opteq-digits": {"channels": 4, "hidden": [6], "pool": 1},
    "mopteq-193k": {"channels": 4, "hidden": [6, 6], "scales": [1, 1], "diversity": 0.01},
    "popteq-193k": {"channels": 4, "hidden": [6, 6], "scales": [1, 1]},
    "geq-5m": {"channels": 4, "hidden": [8, 8], "scales": [1, 2], "split": 4, "projection": 4, "stem": "plain"},
    "resnet18-cifar": {"width": 4},
}
ACCURACY = {"clean": 0.9, "images": 20, "mean": 0.6, "seed": 0, "accuracy": {"fog": [0.9, 0.8, 0.6, 0.4, 0.3]}}
CURVES = {
    "clean": 0.9,
    "images": 20,
    "radius": {"radii": [0.0, 0.1], "steps": 4, "pgd": [0.9, 0.5], "apgd": [0.9, 0.4]},
    "steps": {"steps": [1, 4], "epsilon": 0.1, "pgd": [0.7, 0.5], "apgd": [0.6, 0.4]},
    "certified": {"radii": [0.0, 0.1, 1.0], "accuracy": [0.9, 0.5, 0.0], "source": "weights", "probability": 1.0},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    for name, options in SMALL.items():
        torch.manual_seed(0)
        run = models.create(name, num_classes=10, in_channels=1, **options).save_pretrained(folder / name)
        (run / "recipe.toml").write_text(to_toml(load_recipe("digits", [f"model.name={name}"])))
    (folder / "mopteq-193k" / "robustness.json").write_text(json.dumps({"corruptions": ACCURACY, "curves": CURVES}))
    return folder


@pytest.fixture(autouse=True)
def fewer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "_ATTACKED", 16)
    monkeypatch.setattr(branches, "_SIZES", (0.0, 1.0))
    monkeypatch.setattr(branches, "_SAMPLES", 8)
    monkeypatch.setattr(solving, "_SAMPLES", 4)
    monkeypatch.setattr(style, "DPI", 50)
    if request.node.name == "test_all_that_fit_and_a_line_for_each_that_does_not":
        # A figure that can be drawn for the one file can be drawn for the other.
        savefig = Figure.savefig

        def save(figure: Figure, to: Any, format: str, **options: Any) -> None:
            if format == "svg":
                to.write(b"<svg/>")
            else:
                savefig(figure, to, format=format, **options)

        monkeypatch.setattr(Figure, "savefig", save)
    # Tests of their own have more noisy copies of an image; a layout is computed anew for every file.
    monkeypatch.setattr(maps, "saliency_map", functools.partial(maps.saliency_map, samples=2))
    if request.node.name != "test_the_command":
        monkeypatch.setattr("matplotlib.layout_engine.ConstrainedLayoutEngine.execute", lambda *_: None)


def subject(runs: Path, name: str, *beside: str) -> Subject:
    return open_subject(runs / name, tuple(runs / one for one in beside), device="cpu")


def test_all_that_fit_and_a_line_for_each_that_does_not(runs: Path, tmp_path: Path) -> None:
    said: list[str] = []
    written = write_figures(runs / "mopteq-193k", tmp_path, say=said.append, device="cpu")
    wanted = set(FIGURES) - {"attention", "accuracy-settings"}
    assert {path.stem for path in written} == wanted
    files = {f"{name}.{kind}" for name in wanted for kind in ("png", "svg")}
    assert {path.name for path in tmp_path.iterdir()} == files | {"captions.md"}
    none = [line for line in said if ": none, " in line]
    assert none[0].startswith("accuracy-settings: none, it compares runs: give several")
    assert none[1:] == ["attention: none, only GEQ with a Gaussian kernel weighs patches"]
    captions = (tmp_path / "captions.md").read_text()
    for name in wanted:
        assert f"![{name}]({name}.png)" in captions
    assert "from 90.0% to 40.0% under APGD at 25.5/255" in captions
    assert "worst fog (60.0%)" in captions
    assert "for all inputs" in captions


def test_a_figure_drawn_later_keeps_the_captions_of_the_others(runs: Path, tmp_path: Path) -> None:
    for name in ("corruptions", "certified", "corruptions"):
        write_figures(runs / "mopteq-193k", tmp_path, [name], device="cpu")
    captions = (tmp_path / "captions.md").read_text()
    places = [captions.index(f"![{name}]({name}.png)") for name in ("certified", "corruptions")]
    assert places == sorted(places)  # in the order of the figures
    assert captions.count("## ") == 2
    (tmp_path / "certified.png").unlink()
    write_figures(runs / "mopteq-193k", tmp_path, ["corruptions"], device="cpu")
    assert "certified" not in (tmp_path / "captions.md").read_text()


def test_a_run_in_bfloat16_is_drawn_in_full_precision(runs: Path, tmp_path: Path) -> None:
    run = shutil.copytree(runs / "mopteq-193k", tmp_path / "bf16")
    recipe = load_recipe("digits", ["model.name=mopteq-193k", "train.precision=bf16"])
    (run / "recipe.toml").write_text(to_toml(recipe))
    half, full = (branches.heritage_diversity(open_subject(one, device="cpu")) for one in (run, runs / "mopteq-193k"))
    points, expected = (one.figure.axes[0].collections[0].get_offsets().tolist() for one in (half, full))
    assert points == expected


def test_the_points_are_the_measures(runs: Path) -> None:
    one = subject(runs, "mopteq-193k", "popteq-193k")
    drawn = branches.heritage_diversity(one)
    (axes,) = drawn.figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) != ("", "")
    for run, points in zip((one, *one.beside), axes.collections, strict=True):
        layer, given, _ = run.equilibrium(8)
        with torch.no_grad():
            found = measure_branches(tuple(blocks(layer(given))))
        wanted = torch.stack([found.heritage, found.diversity], dim=1).double()
        torch.testing.assert_close(torch.tensor(points.get_offsets().tolist()).double(), wanted, atol=1e-4, rtol=1e-3)


def test_convergence_by_lambda_leaves_the_model_as_it_was(runs: Path) -> None:
    one = subject(runs, "mopteq-193k")
    problem = one.model.equilibrium.problem
    before, solver = problem.coupling, one.model.equilibrium.solver
    drawn = solving.convergence_lambda(one)
    assert problem.coupling == before
    assert one.model.equilibrium.solver is solver
    lines = {line.get_label(): line.get_ydata() for line in drawn.figure.axes[0].get_lines()}
    assert "0.01 (trained)" in lines
    assert {"0", "1", "0.25"} <= set(lines)  # 1/C with four channels
    assert all(values[-1] < values[0] for name, values in lines.items() if name != "1")
    layer, given, _ = one.equilibrium(4)
    own = solving.residuals(layer, given, solver).nanmedian(dim=1).values
    assert lines["0.01 (trained)"][1] == pytest.approx(float(own[1]), rel=1e-3)


def test_axes_of_steps_have_whole_numbers(runs: Path) -> None:
    drawn = solving.convergence(subject(runs, "opteq-digits"))
    ticks = drawn.figure.axes[0].get_xticks()
    assert all(float(tick).is_integer() for tick in ticks), ticks


def test_the_run_without_branches_is_named(runs: Path) -> None:
    with pytest.raises(FigureUnavailableError, match="and opteq-digits has one"):
        branches.heritage_diversity(subject(runs, "mopteq-193k", "opteq-digits"))


def test_maps(runs: Path) -> None:
    for name in ("geq-5m", "resnet18-cifar"):
        drawn = maps.saliency(subject(runs, name))
        assert len(drawn.figure.axes) == 18
        assert (f"at the equilibrium ({name})" in drawn.caption) == (name == "geq-5m")
    both = maps.saliency(subject(runs, "geq-5m", "resnet18-cifar"))
    assert [axes.get_ylabel() for axes in both.figure.axes if axes.get_ylabel()] == [
        "image", "geq-5m\nGrad-CAM", "geq-5m\nSmoothGrad", "resnet18-cifar\nGrad-CAM", "resnet18-cifar\nSmoothGrad",
    ]  # fmt: skip
    drawn = maps.attention(subject(runs, "geq-5m"))
    (low, high) = drawn.figure.axes[6].get_images()[0].get_clim()
    assert 0 <= low < high <= 1
    assert f"between {low:.2f} and {high:.2f}" in drawn.caption


@pytest.mark.parametrize(
    ("draw", "name", "words"),
    [
        (branches.heritage_diversity, "opteq-digits", "it compares branches, and opteq-digits has one"),
        (branches.perturbations, "resnet18-cifar", "resnet18-cifar has no equilibrium layer"),
        (solving.convergence_lambda, "popteq-193k", "weight of diversity in MOptEq, and this is POptEq"),
        (robust.corruptions, "geq-5m", "not measured yet: run `opteq evaluate .*geq-5m --corruptions` first"),
        (robust.certified, "geq-5m", "not measured yet: run `opteq evaluate .*geq-5m --curves` first"),
    ],
)
def test_what_a_run_cannot_have(runs: Path, draw: Any, name: str, words: str) -> None:
    with pytest.raises(FigureUnavailableError, match=words):
        draw(subject(runs, name))


def test_the_command(runs: Path, tmp_path: Path) -> None:
    result = call("figures", runs / "opteq-digits", "--only", "convergence", "--out", tmp_path, "--device", "cpu")
    assert result.exit_code == 0, (result.output, result.exception)
    assert result.stdout.strip() == f"convergence: {tmp_path / 'convergence.png'}"
    refused(call("figures", runs / "opteq-digits", "--only", "convergance"), "did you mean 'convergence'?")
    refused(
        call("figures", runs / "opteq-digits", "--only", "attention"),
        "has no figure attention: only GEQ with a Gaussian kernel weighs patches",
    )
    refused(call("figures", runs / "nothing"), "no such folder")


def test_runs_in_folders_of_one_name_are_told_apart(runs: Path, tmp_path: Path) -> None:
    folders = [shutil.copytree(runs / name, tmp_path / name / "run") for name in ("mopteq-193k", "popteq-193k")]
    write_figures(folders[0], tmp_path / "out", ["heritage-diversity"], folders[1:], device="cpu")
    caption = (tmp_path / "out/captions.md").read_text()
    assert all(f"{folder.resolve()}: mean H" in caption for folder in folders)
    with pytest.raises(UserError, match="a run is named twice"):
        write_figures(folders[0], tmp_path / "out", beside=folders[:1], device="cpu")


def test_runs_measured_in_different_ways_are_not_drawn_together(runs: Path, tmp_path: Path) -> None:
    both = [shutil.copytree(runs / "mopteq-193k", tmp_path / name) for name in "ab"]
    other = {
        "corruptions": {**ACCURACY, "seed": 1},
        "curves": {**CURVES, "steps": {**CURVES["steps"], "epsilon": 0.2}, "radius": {**CURVES["radius"], "steps": 9}},
    }
    (both[1] / "robustness.json").write_text(json.dumps(other))
    for name, setting in (
        ("corruptions", "seed 1, this run with 0"),
        ("attack-steps", "steps.epsilon 0.2, this run with 0.1"),
        ("attack-radius", "radius.steps 9, this run with 4"),
    ):
        with pytest.raises(UserError, match=f"{name}: b was measured with {setting}: measure both alike"):
            write_figures(both[0], tmp_path / "out", [name], both[1:], device="cpu")
    assert write_figures(both[0], tmp_path / "out", ["certified"], both[1:], device="cpu")


def test_more_runs_than_colors_are_all_drawn() -> None:
    figure, axes = style.panels(1, 1, (3, 3))
    robust.draw_corruptions(axes[0, 0], [(str(place), ACCURACY) for place in range(len(style.COLORS) + 2)])
    assert len(axes[0, 0].patches) == len(style.COLORS) + 2
    del figure


def test_accuracy_against_the_setting_in_which_runs_differ(runs: Path, tmp_path: Path) -> None:
    shares = {"bound=0.5": 0.6, "bound=0.9": 0.8, "tol=0.01": 0.7, "tol=0.1": 0.5}
    folders = []
    for setting, share in shares.items():
        folders.append(shutil.copytree(runs / "opteq-digits", tmp_path / setting))
        options = [f"model.options.{setting}", "model.options.hidden=[6]"]
        options += ["model.options.bound=0.5"] if setting.startswith("tol") else []
        (folders[-1] / "recipe.toml").write_text(to_toml(load_recipe("digits", options)))
        (folders[-1] / "metrics.jsonl").write_text(json.dumps({"test_accuracy": share}) + "\n")
    other = shutil.copytree(runs / "resnet18-cifar", tmp_path / "resnet")
    (other / "metrics.jsonl").write_text('{"test_accuracy": 0.9}\n')
    drawn = settings.accuracy_settings(open_subject(folders[0], (*folders[1:], other), device="cpu"))
    panels = {axes.get_xlabel(): [line.get_xydata().tolist() for line in axes.lines] for axes in drawn.figure.axes}
    assert panels["bound"][0] == [[0.5, 60.0], [0.9, 80.0]]
    assert panels["tol"][0] == [[0.001, 60.0], [0.01, 70.0], [0.1, 50.0]]
    assert [y for _, y in panels["tol"][1]] == [90.0, 90.0]
    assert "model.options.tol: best 70.0% at 0.01, of 3 runs" in drawn.caption
    result = call("figures", *folders[:2], "--only", "accuracy-settings", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert (folders[0] / "figures" / "accuracy-settings.svg").exists()
    (folders[1] / "metrics.jsonl").write_text("")
    refused(call("figures", *folders[:2], "--only", "accuracy-settings"), "metrics.jsonl records no accuracy")
    refused(
        call("figures", folders[0], other, "--only", "accuracy-settings"), "no run differs from the first one in one"
    )
