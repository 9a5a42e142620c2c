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
from opteq.inference import formats
from opteq.inference.export import export
from opteq.inference.fixed_steps import Exportable, ExportableDenoiser, enough_steps, enough_steps_to_denoise
from opteq.inference.formats import ENDINGS, Signature
from opteq.models.denoiser import Denoiser, DenoiserConfig

BRANCHES: dict[str, Any] = {"channels": 4, "hidden": [4, 6], "scales": [1, 2], "bound": 0.9}
MODELS: dict[str, dict[str, Any]] = {
    "opteq-digits": {"channels": 4, "hidden": [6], "injection_norm": "group"},
    "opteq-162k": {"channels": 4, "hidden": [5, 6], "injected": [1]},
    "mopteq-193k": {**BRANCHES, "diversity": 0.01},
    "geq-5m": {**BRANCHES, "patch": 2, "split": 2, "projection": 3, "stem_depth": 0},
}


SIGNATURE = Signature(("pixels",), "logits", ({0: torch.export.Dim("batch", min=1)},))


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
    found = export(model, tmp_path / f"m{ENDINGS[format]}", format, steps=2)
    assert [path.name for path in tmp_path.iterdir()] == [found.path.name]  # no draft is left
    assert found.any_batch
    assert found.agreement == 1
    assert 0 < found.residual < 0.5
    expected = Exportable(model, 2)(pixels(5))
    given = formats.run(format, found.path, (pixels(5),), SIGNATURE)
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)
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
        Lacking().eval(), (x,), dynamo=True, verbose=False, custom_translation_table=formats._translations(),
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

    monkeypatch.setitem(formats._WRITERS, "onnx", refuse)
    with pytest.raises(UserError, match=r"can't be written as onnx: No ONNX function found for aten.median$"):
        export(make(), tmp_path / "m.onnx", "onnx", steps=2)


@pytest.mark.parametrize("name", ["opteq-162k", "mopteq-193k", "geq-5m"])
def test_every_family_is_exported_for_any_batch(name: str) -> None:
    fixed = Exportable(make(name), 2)
    with torch.no_grad():
        program = torch.export.export(fixed, (pixels(2),), dynamic_shapes=SIGNATURE.free, strict=False).module()
        expected = fixed(pixels(5))
        torch.testing.assert_close(program(pixels(5)), expected)
        torch.testing.assert_close(program(pixels(1)), expected[:1])
        if name == "opteq-162k":  # a compiler sees no family in an exported program, but a list of tensor operations
            torch.testing.assert_close(torch.compile(program, fullgraph=True, backend="eager")(pixels(5)), expected)


def test_what_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    monkeypatch.setattr(formats, "run", lambda format, path, given, signature: Exportable(model, 6)(*given) + 1)
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
    assert "after 5 plain steps the relative residual is" in result.stdout
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


@pytest.mark.parametrize("format", ["onnx", "torchscript"])
def test_neural_odes_are_refused_in_one_line(format: str, tmp_path: Path) -> None:
    model = models.create("neural-ode-172k", num_classes=2, filters=2, cells=2)
    model.config["extra"] = {"mean": [0.5] * 3, "std": [0.2] * 3, "image_shape": [3, 4, 4], "classes": ["a", "b"]}
    with pytest.raises(UserError, match=r"^neural-ode-172k can't be exported: its ODE solver chooses its steps"):
        export(model, tmp_path / "m", format)


def denoiser(**options: Any) -> Denoiser:
    torch.manual_seed(0)
    return Denoiser(DenoiserConfig(channels=(1, 2, 4), kernel_size=3, **options)).eval()


def noisy(count: int = 3, height: int = 20, width: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.rand(count, 1, height, width, generator=generator), torch.linspace(0.05, 0.2, count)


def test_a_denoiser_takes_steps_with_momentum() -> None:
    model, (x, sigma) = denoiser(), noisy()
    with torch.no_grad():
        hidden = model.layer.problem(x=(x, sigma))
        before = hidden.step(hidden.start())
        state = hidden.step(before)
        state, before = hidden.step(state + (state - before) / 4), state
        state = hidden.step(state + 2 / 5 * (state - before))
        torch.testing.assert_close(ExportableDenoiser(model, 4)(x, sigma), state)
    plain = denoiser(steps=3)
    assert enough_steps_to_denoise(plain, x, sigma) == 3
    with torch.no_grad():
        torch.testing.assert_close(ExportableDenoiser(plain, 3)(x, sigma), plain(x, sigma))


def test_enough_steps_reach_the_minimiser_of_the_energy() -> None:
    model, (x, sigma) = denoiser(), noisy()
    steps = enough_steps_to_denoise(model, x, sigma, tol=1e-5)
    fixed = ExportableDenoiser(model, steps)
    assert float(fixed.residual(x, sigma).max()) <= 1.01e-5
    assert float(ExportableDenoiser(model, steps // 2).residual(x, sigma).max()) > 1e-5
    model.layer.solver = opteq.FISTA(tol=1e-6, max_steps=2000)
    with torch.no_grad():
        torch.testing.assert_close(fixed(x, sigma), model(x, sigma), rtol=0, atol=1e-3)
    with pytest.raises(UserError, match="2 steps do not reach the residual 1e-05; give a number of them with --steps"):
        enough_steps_to_denoise(model, x, sigma, tol=1e-5, most=2)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "format", ["torchscript", *(pytest.param(format, marks=pytest.mark.slow) for format in ("exported", "onnx"))]
)
def test_a_denoiser_is_exported_for_images_of_any_size(format: str, tmp_path: Path) -> None:
    if format == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    model = denoiser()
    model.save(tmp_path / "run")
    result = call("export", tmp_path / "run", "--format", format, "--steps", "3")
    assert result.exit_code == 0, result.output
    assert "after 3 steps the relative residual is" in result.stdout
    assert "grey images of any size" in result.stdout
    given = noisy(5, 31, 18)
    signature = Signature(("pixels", "sigma"), "denoised", ())
    found = formats.run(format, tmp_path / "run" / f"model{ENDINGS[format]}", given, signature)
    torch.testing.assert_close(found, ExportableDenoiser(model, 3)(*given), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="image_shape has no effect"):
        export(model, tmp_path / "m.ts", "torchscript", image_shape=(1, 8, 8))
