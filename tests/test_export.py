"""Exported models: the same as the plain steps, loaded by others, refused where they would be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opteq
from cli_cases import call, refused
from opteq import models
from opteq.common.errors import UserError
from opteq.inference import export as exporting
from opteq.inference.export import export
from opteq.inference.fixed_steps import Exportable, enough_steps

BRANCHES: dict[str, Any] = {"channels": 4, "hidden": [4, 6], "scales": [1, 2], "bound": 0.9}
MODELS: dict[str, dict[str, Any]] = {
    "opteq-digits": {"channels": 4, "hidden": [6], "injection_norm": "group"},
    "opteq-162k": {"channels": 4, "hidden": [5, 6], "injected": [1]},
    "mopteq-193k": {**BRANCHES, "diversity": 0.01},
    "geq-5m": {**BRANCHES, "patch": 2, "split": 2, "projection": 3, "stem_depth": 0},
}


def make(name: str = "opteq-digits") -> models.Classifier:
    torch.manual_seed(0)
    model = models.create(name, num_classes=4, in_channels=2, **MODELS[name])
    model.config["extra"] = {
        "mean": [0.3, 0.5],
        "std": [0.2, 0.4],
        "image_shape": [2, 8, 8],
        "classes": ["a", "b", "c", "d"],
    }
    return model.eval()


def pixels(count: int = 3) -> Tensor:
    return torch.rand(count, 2, 8, 8, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", MODELS)
def test_fixed_steps_are_plain_steps(name: str) -> None:
    model, x = make(name), pixels()
    fixed = Exportable(model, 30)
    found = fixed(x)
    model.equilibrium.solver = opteq.Picard(tol=0, max_steps=30)
    with torch.no_grad():
        expected = model((x - fixed.mean) / fixed.std)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_every_step_is_one_of_the_problem() -> None:
    model, x = make("opteq-162k"), pixels()
    fixed = Exportable(model, 3)
    with torch.no_grad():
        hidden = model.equilibrium.problem(model.stem((x - fixed.mean) / fixed.std))
        states = [hidden.start()]
        for _ in range(4):
            states.append(hidden.step(states[-1]))
        torch.testing.assert_close(fixed(x), model.head(hidden.features(states[3])))
        change = (states[4] - states[3]).flatten(1).norm(dim=1) / states[4].flatten(1).norm(dim=1)
    torch.testing.assert_close(fixed.residual(x), change)


def test_more_steps_leave_a_smaller_residual() -> None:
    model, x = make(), pixels()
    residuals = [float(Exportable(model, steps).residual(x).max()) for steps in (1, 4, 12)]
    assert residuals[0] > residuals[1] > residuals[2]
    steps = enough_steps(model, x)
    assert float(Exportable(model, steps).residual(x).max()) <= 2 * model.equilibrium.solver.tol


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("format", "name"),
    [
        ("torchscript", "opteq-digits"),
        ("exported", "opteq-digits"),
        ("onnx", "opteq-digits"),
        # A family's operations are in its graph, which is run below, and those of the format in the smaller file.
        pytest.param("onnx", "mopteq-193k", marks=pytest.mark.slow),
    ],
)
def test_files_give_the_same_logits(format: str, name: str, tmp_path: Path) -> None:
    if format == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    model = make(name)
    found = export(model, tmp_path / f"m{exporting.ENDINGS[format]}", format, steps=3)
    assert [path.name for path in tmp_path.iterdir()] == [found.path.name]  # no draft is left
    assert found.any_batch
    assert found.agreement == 1
    assert 0 < found.residual < 0.5
    expected = Exportable(model, 3)(pixels(5))
    torch.testing.assert_close(exporting._run(format, found.path, pixels(5)), expected, rtol=1e-4, atol=1e-4)
    if format == "onnx":
        import onnx

        stored = onnx.load(str(found.path))
        assert json.loads(stored.metadata_props[0].value) == ["a", "b", "c", "d"]


class Lacking(nn.Module):
    """Operations that ONNX does not have."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        kept = x.median(dim=2, keepdim=True)
        return torch.hypot(x, x + 1), x.median(dim=1).values, kept.values, kept.indices


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # the exporter's own
def test_operations_that_onnx_lacks(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    x, batch = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)), torch.export.Dim("batch")
    program = torch.onnx.export(
        Lacking().eval(), (x,), dynamo=True, verbose=False, custom_translation_table=exporting._translations(),
        dynamic_shapes=({0: batch},),
    )  # fmt: skip
    program.save(str(tmp_path / "m.onnx"), external_data=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: x[:2].numpy()})
    for got, expected in zip(found, Lacking()(x[:2]), strict=True):
        torch.testing.assert_close(torch.from_numpy(got), expected)


def test_a_model_that_no_exporter_knows_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        try:
            raise ValueError("No ONNX function found for aten.median\nmore")
        except ValueError as error:
            raise RuntimeError("\x1b[96mThis is step 3/3\x1b[0m. Next steps:\n- debug") from error

    monkeypatch.setitem(exporting._WRITERS, "onnx", refuse)
    with pytest.raises(UserError, match=r"can't be written as onnx: No ONNX function found for aten.median$"):
        export(make(), tmp_path / "m.onnx", "onnx", steps=2)


@pytest.mark.parametrize("name", ["opteq-162k", "mopteq-193k", "geq-5m"])
def test_every_family_is_exported_for_any_batch_and_compiles_as_one_graph(name: str) -> None:
    fixed = Exportable(make(name), 2)
    batch = exporting._shapes(any_batch=True)
    with torch.no_grad():
        program = torch.export.export(fixed, (pixels(2),), dynamic_shapes=batch, strict=False).module()
        expected = fixed(pixels(5))
        torch.testing.assert_close(program(pixels(5)), expected)
        torch.testing.assert_close(program(pixels(1)), expected[:1])
        torch.testing.assert_close(torch.compile(program, fullgraph=True, backend="eager")(pixels(5)), expected)


def test_what_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    monkeypatch.setattr(exporting, "_run", lambda format, path, x: Exportable(model, 6)(x) + 1)
    with pytest.raises(UserError, match="gives other logits"):
        export(model, tmp_path / "m.ts", "torchscript", steps=6)
    assert list(tmp_path.iterdir()) == []


def test_plain_steps_that_do_not_converge_need_a_number() -> None:
    model = make()
    with torch.no_grad():
        model.equilibrium.problem.W.bound = None
        model.equilibrium.problem.W.weight.mul_(3)
    with pytest.raises(UserError, match="plain steps do not reach the tolerance"):
        enough_steps(model, pixels(), most=30)


def test_a_model_of_fixed_steps_compiles_as_one_graph() -> None:
    fixed = Exportable(make(), 3)
    compiled = torch.compile(fixed, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(pixels()), fixed(pixels()))


def test_a_model_that_solves_says_why_it_is_not_one_graph() -> None:
    model = make()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for name in ("_solve", "_traced"):  # as in a process that has not called a layer yet
        vars(vars(opteq.Equilibrium)[name].__wrapped__).pop("_opteq_disabled", None)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"number of solver steps depends on the data.*opteq export"
    ):
        compiled(pixels())


def test_the_command_says_what_the_steps_cost(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    result = call("export", tmp_path, "--format", "torchscript", "--steps", "5")
    assert result.exit_code == 0, result.output
    assert "5 plain steps leave a relative residual of" in result.stdout
    assert (tmp_path / "model.ts").exists()
    refused(call("export", tmp_path, "--format", "onnyx"), "did you mean 'onnx'")
    refused(call("export", tmp_path, "--format", "exported", "--out", tmp_path / "no" / "m.pt2"), "there is no folder")


def test_wrong_options_are_refused() -> None:
    model = make()
    with pytest.raises(UserError, match="at least 1; got 0"):
        Exportable(model, 0)
    model.config["extra"].pop("image_shape")
    with pytest.raises(UserError, match="image_shape"):
        export(model, "m.ts", "torchscript")
    assert isinstance(model.equilibrium, nn.Module)


def test_steps_of_a_model_without_equilibria_are_refused(tmp_path: Path) -> None:
    models.create("resnet18-cifar", num_classes=2).save_pretrained(tmp_path)
    result = call("export", tmp_path, "--format", "torchscript", "--steps", "5")
    assert result.exit_code == 2
    assert "--steps has no effect: resnet18-cifar has no equilibria" in result.output
