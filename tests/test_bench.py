"""The benchmark: its figures have the right form, its checks can fail, and what it counts is right. No timing here."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import opteq
from opteq.common.errors import UserError
from opteq.gradients.base import find_no_grad
from opteq.states import blocks, single
from opteq_bench import command, contenders, epoch, floor, record, rivals, stepping, timing
from opteq_bench import run as bench
from opteq_bench.cases import (
    Case,
    Precision,
    Shape,
    bounded_weight,
    layer_case,
    layer_problem,
    model_case,
    random_images,
)
from opteq_bench.exact import ExactAnderson, ExactCG, ExactPicard

CPU = torch.device("cpu")
SHAPE = Shape(3, 5, 6)
needs_torchdeq = pytest.mark.skipif(rivals.version() is None, reason="torchdeq is not installed")


def quietly(**options: Any) -> tuple[bool, str]:
    stream = io.StringIO()
    passed = bench(device="cpu", console=Console(file=stream, width=160), **{"batch": 2, "repeats": 2} | options)
    return passed, stream.getvalue()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    options: dict[str, Any] = {"shapes": ["3,5,6"], "precisions": ["float32", "bf16"]}
    passed, text = quietly(**options, models=False, json=path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "a draft was left behind"
    return passed, text, json.loads(path.read_text())


def test_run_passes_and_says_where_its_figures_come_from(small: tuple[bool, str, dict[str, Any]]) -> None:
    passed, text, found = small
    assert passed
    assert found["agree"]
    assert found["errors"] == []
    assert found["machine"]["torch"] == torch.__version__
    assert found["machine"]["device"] == "CPU"
    assert found["machine"]["threads"] >= 1
    assert found["date"].startswith("20")
    assert found["command"]
    assert found["options"]["shapes"] == ["3,5,6"]
    assert found["models"] == []
    for word in ("map", "anderson", "picard", "3,5,6 float32", "3,5,6 bf16", "pass every check"):
        assert word in text


def test_steps_have_every_figure(small: tuple[bool, str, dict[str, Any]]) -> None:
    entries = small[2]["steps"]
    assert [(entry["case"], entry["precision"]) for entry in entries] == [("3,5,6", "float32"), ("3,5,6", "bf16")]
    for entry in entries:
        figures = entry["figures"]
        for name in ("map", "anderson", "picard"):
            assert 0 < figures[name]["low"] <= figures[name]["ms"] <= figures[name]["high"]
            assert figures[name]["ratio"] == pytest.approx(figures[name]["ms"] / figures["map"]["ms"])
            assert figures[name]["floor"]["bytes"] > 0
            assert figures[name]["floor_ms"] is None  # nobody knows the peak of this CPU
        assert figures["anderson"]["floor"]["bytes"] > figures["picard"]["floor"]["bytes"]
        found = entry["answers"]["found"]
        assert {"anderson", "anderson, plain path", "picard"} <= set(found)
        assert all(answer["within"] for answer in found.values())


@needs_torchdeq
def test_torchdeq_is_beside_us_and_may_fail(small: tuple[bool, str, dict[str, Any]]) -> None:
    for entry in small[2]["steps"]:
        figures = entry["figures"]
        assert figures["torchdeq fixed_point_iter"]["ms"] > 0
        if entry["precision"] == "bf16":
            assert figures["torchdeq anderson"]["fails"].startswith("fails: ")
            assert figures["torchdeq anderson, float32 state"]["ms"] > 0
        else:
            assert figures["torchdeq anderson"]["ms"] > 0


def test_training_reports_residuals_and_gradients(small: tuple[bool, str, dict[str, Any]]) -> None:
    for entry in small[2]["training"]:
        own = entry["figures"]["opteq"]
        limit = 0.1 if entry["precision"] == "bf16" else 1e-3
        assert set(own["gradient_error"]) == {"x", "W.weight", "U.weight", "U.bias"}
        assert max(own["gradient_error"].values()) < limit
        assert own["residual"] <= stepping.SLACK * entry["tol"]
        assert own["forward_steps"] >= 1
        assert own["backward_steps"] >= 1
        assert own["memory"] is None
        assert entry["shared_ms"] > 0
        assert entry["memory_by_steps"] is None
        if rivals.version() is not None:
            assert max(entry["figures"]["torchdeq"]["gradient_error"].values()) < limit
            assert entry["torchdeq_backward"] in rivals.SOLVERS
            assert set(entry["tried"]) == set(rivals.SOLVERS)


def test_without_torchdeq_ours_is_still_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "version", lambda: None)
    passed, text = quietly(shapes=["3,5,6"], models=False, repeats=1)
    assert passed
    assert "torchdeq is not installed" in text
    assert "torchdeq anderson" not in text


@pytest.mark.slow
def test_models_are_trained_beside_the_baseline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (command, epoch):
        monkeypatch.setattr(module, "MODELS", ("opteq-162k",))
    monkeypatch.setattr(stepping, "STEPS", 2)
    passed, text = quietly(shapes=["3,5,6"], batch=1, repeats=1, json=tmp_path / "models.json")
    assert passed, text
    found = json.loads((tmp_path / "models.json").read_text())
    assert [entry["case"] for entry in found["steps"]] == ["3,5,6", "opteq-162k"]
    figures = found["models"][0]["figures"]
    assert set(figures) == {"opteq-162k", "resnet18-cifar"}
    assert figures["resnet18-cifar"]["ratio"] == 1
    assert figures["resnet18-cifar"]["solves"] == {}
    assert figures["opteq-162k"]["solves"]["equilibrium.forward"]["steps"] >= 1


def test_an_answer_outside_the_tolerance_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "version", lambda: None)  # ours fails already
    monkeypatch.setattr(stepping, "SLACK", 1e-9)
    passed, text = quietly(shapes=["3,5,6"], models=False, repeats=1)
    assert not passed
    assert "FAIL" in text


def test_a_measurement_that_breaks_loses_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of [luck]")

    monkeypatch.setattr(rivals, "version", lambda: None)
    monkeypatch.setattr(command.training, "measure", broken)
    passed, text = quietly(shapes=["3,5,6"], models=False, repeats=1)
    assert not passed
    assert "3,5,6 in float32: training: RuntimeError: out of [luck]" in text
    assert "picard" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"batch": 0}, "--batch should be at least 1; got 0"),
        ({"repeats": 0}, "--repeats should be at least 1; got 0"),
        ({"shapes": ["32,64"]}, "channels,hidden,side such as 32,64,32; got '32,64'"),
        ({"shapes": ["32,0,8"]}, "at least 1; got '32,0,8'"),
        ({"precisions": ["fp8"]}, "unknown precision 'fp8'"),
        ({"precisions": ["tf32"]}, "tf32 needs a GPU"),
        ({"json": Path("/nowhere/at/all.json")}, "--json should be a file in a folder that can be written to"),
    ],
)
def test_errors_come_before_the_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        bench(**{"device": "cpu", "shapes": ["3,5,6"], "models": False} | options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_one_clear_line() -> None:
    with pytest.raises(UserError, match="torch finds none; use --device cpu"):
        bench(device="cuda")


# ---- what is measured ----


def test_the_plain_map_is_the_layers_own() -> None:
    case = layer_case(SHAPE, 2, Precision("float32", CPU))
    z = torch.randn(2, 3, 6, 6)
    hidden: Any = case.hidden
    torch.testing.assert_close(single(case.step(z)), hidden.feature_form().task.step(z))
    torch.testing.assert_close(single(case.state(z)), hidden.block.activation(z))


def test_the_residual_is_that_of_the_problem() -> None:
    case = layer_case(SHAPE, 2, Precision("float32", CPU))
    y = torch.rand(2, 5, 6, 6)
    image = single(case.hidden.step(y))
    expected = ((image - y).flatten(1).norm(dim=1) / image.flatten(1).norm(dim=1)).max()
    assert case.residual(y) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("name", ["mopteq-193k", "opteq-162k"])
def test_model_cases_are_of_one_size_and_counted(name: str) -> None:
    case = model_case(name, 1, Precision("float32", CPU))
    assert case.entries == sum(part.numel() for part in blocks(case.start))
    assert case.floor.operations > 0
    assert case.floor.bytes > 8 * case.entries
    assert case.residual(case.step(case.start)) > 0


@pytest.mark.parametrize("solver", [ExactAnderson(max_steps=9), ExactPicard(max_steps=9)])
def test_exact_solvers_take_all_their_steps(solver: opteq.Anderson | opteq.Picard) -> None:
    hidden = layer_case(SHAPE, 2, Precision("float32", CPU)).hidden
    _, outcome = find_no_grad(hidden, solver, torch.zeros_like(single(hidden.start())))
    assert outcome.steps.tolist() == [9, 9]
    assert outcome.trace.shape == (10, 2)


def test_exact_conjugate_gradients_take_all_their_steps() -> None:
    spectrum = torch.linspace(1, 2, 8)
    for kind, steps in ((opteq.CG, 1), (ExactCG, 5)):
        finish = kind(tol=0.5, max_steps=5).solve(lambda rows: spectrum * rows, torch.ones(2, 8))
        assert finish.steps.tolist() == [steps, steps]


@needs_torchdeq
def test_rows_keep_memory_order_and_values() -> None:
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    rows = rivals.RowLayout(image)
    flat = rows.flat(image)
    assert flat.data_ptr() == image.data_ptr()
    assert torch.equal(single(rows.state(flat)), image)
    pair = (image, torch.randn(2, 2, 2, 2))
    several = rivals.RowLayout(pair)
    back = several.state(several.flat(pair))
    assert isinstance(back, tuple)
    assert all(torch.equal(a, b) for a, b in zip(back, pair, strict=True))


@needs_torchdeq
@pytest.mark.parametrize("backward", rivals.SOLVERS)
def test_torchdeqs_layer_is_the_same_layer(backward: str) -> None:
    problem = layer_problem(SHAPE, CPU)
    x = random_images(2, (3, 6, 6), CPU).requires_grad_()
    precision = Precision("float32", CPU)
    other = contenders.torchdeq(problem, precision, backward)
    torch.testing.assert_close(other.step(x), contenders.ours(problem, precision).step(x), rtol=1e-2, atol=1e-4)
    true = contenders.reference(problem, precision, x)
    for name, gradient in other.gradients(x, steps=1).items():
        assert float((gradient - true[name]).norm() / true[name].norm()) < 1e-2, name


def test_the_reference_is_the_derivative() -> None:
    problem = layer_problem(Shape(2, 3, 4), CPU).double()
    x = random_images(2, (2, 4, 4), CPU).double()
    precision = Precision("float32", CPU)
    gradient = contenders.reference(problem, precision, x)["x"]
    direction = torch.randn_like(x)
    tight = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-13, max_steps=500))

    def loss(at: Tensor) -> float:
        return float(single(tight(at)).square().mean())

    with torch.no_grad():
        slope = (loss(x + 1e-5 * direction) - loss(x - 1e-5 * direction)) / 2e-5
    assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-4)


def test_the_weight_is_the_bounded_one() -> None:
    problem = layer_problem(SHAPE, CPU)
    with torch.no_grad():
        problem.W.weight.mul_(10)
    assert bounded_weight(problem).norm().item() < problem.W.weight.norm().item() / 5


# ---- floors ----


def test_floors_by_hand() -> None:
    # 2 channels, 3 hidden, images of 4x4, batch 5, float32: z has 160 entries, y 240, W 54.
    step = floor.layer_map(2, 3, 4, 5, 4)
    assert step.bytes == 4 * (160 + 54 + 240 + 2 * 240 + 160)
    assert step.operations == 2 * 2 * 9 * 2 * 3 * 16 * 5
    assert floor.picard(step, 160, 4).bytes - step.bytes == 2 * 160 * 4
    assert floor.anderson(step, 160, 4, memory=5, column=2).bytes - step.bytes == 160 * (6 * 4 + 12 * 2)
    assert floor.conjugate_gradients(step, 160).bytes - step.bytes == 11 * 160 * 4
    one = floor.convolution(2, 3, 4, 5, 4)
    assert one.bytes == 4 * (160 + 240 + 54)
    assert one.operations == step.operations / 2
    bare = floor.training(2, 3, 4, 5, 4, forward=0, backward=0)
    assert bare == one * 11


def test_floors_in_time() -> None:
    h200 = floor.peak_of("NVIDIA H200")
    assert h200 is not None
    assert floor.Floor(0, 495e9).milliseconds(h200, "tf32") == pytest.approx(1)
    assert floor.Floor(0, 989e9).milliseconds(h200, "bf16") == pytest.approx(1)
    assert floor.Floor(9.6e9, 1).milliseconds(h200, "bf16") == pytest.approx(2)
    assert floor.Floor(1, 1).milliseconds(h200, "float32") is None
    assert floor.peak_of("NVIDIA GeForce GTX 970") is None
    assert floor.Floor(1, 1).milliseconds(None, "tf32") is None


# ---- times and files ----


def test_repetitions_are_interleaved_and_failures_are_left_out() -> None:
    calls: list[str] = []

    def fail() -> None:
        raise ValueError("no\nway")

    def long(name: str) -> None:
        calls.append(name)
        time.sleep(0.006)  # a turn is then one call

    clock = timing.Clock(CPU, repeats=3, warm_up=1)
    found = clock.interleaved({"a": lambda: long("a"), "broken": fail, "b": lambda: long("b")})
    assert calls == ["a", "a", "b", "b"] + ["a", "b"] * 3
    assert found["broken"] == "fails: no way"
    assert isinstance(found["a"], timing.Timing)
    assert list(found) == ["a", "broken", "b"]


def test_short_work_is_called_often() -> None:
    found = timing.Clock(CPU, repeats=1, warm_up=1).interleaved({"nothing": lambda: None})["nothing"]
    assert isinstance(found, timing.Timing)
    assert found.calls > 1


def test_work_is_put_together_once() -> None:
    built: list[int] = []

    def build() -> timing.Work:
        built.append(1)
        return lambda: len(built)

    work = timing.built_at_first_call(build)
    assert built == []
    assert [work(), work()] == [1, 1]


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "figures.json"
    record.write(path, {"old": 1})

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record.os, "replace", refuse)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        record.write(path, {"new": 1})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["figures.json"]


def test_bf16_settles_for_its_rounding() -> None:
    assert Precision("bf16", CPU).tol == torch.finfo(torch.bfloat16).eps
    assert Precision("float32", CPU).tol == 1e-4
    assert isinstance(layer_case(SHAPE, 1, Precision("bf16", CPU)), Case)
