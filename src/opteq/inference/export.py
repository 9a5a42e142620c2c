"""``opteq export``: inference with a fixed number of plain steps, as ONNX, TorchScript or an exported program."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opteq.common.errors import MissingExtraError, UserError, needs_extra, unknown_name
from opteq.common.files import plain_errors
from opteq.inference.fixed_steps import Exportable, enough_steps
from opteq.inference.predict import load
from opteq.models.classifier import Classifier, equilibria
from opteq.models.prediction import checked_shape

if TYPE_CHECKING:
    from rich.console import Console

ENDINGS = {"onnx": ".onnx", "torchscript": ".ts", "exported": ".pt2"}
SAMPLES = 8
"""Random images that the file is checked on."""

CLOSE = 1e-3
"""Largest difference of logits between the file and the same steps in PyTorch, relative to the largest logit."""


@dataclass(frozen=True)
class Exported:
    """A written file, and what its fixed number of steps costs on random images.

    Attributes:
        path: the file.
        steps: plain steps of every equilibrium layer.
        residual: the largest relative residual after them.
        tol: the largest tolerance of the model's own solvers.
        difference: the largest difference of logits to the model with its own solver.
        agreement: share of images with the same predicted class.
        any_batch: whether the file takes batches of any size; else one image at a time, where torch's exporter can't
            trace the model otherwise.
    """

    path: Path
    steps: int
    residual: float
    tol: float
    difference: float
    agreement: float
    any_batch: bool


def export(
    model: Classifier,
    path: str | Path,
    format: str,
    steps: int | None = None,
    image_shape: tuple[int, int, int] | None = None,
    seed: int = 0,
) -> Exported:
    """Write a classifier for images ``(B, channels, h, w)`` with pixels in 0..1 to ``path``.

    The file is loaded again and compared with the same steps in PyTorch before it takes its place; nothing is written
    where they differ.

    Args:
        model: on the CPU.
        path: the file.
        format: ``onnx``, ``torchscript`` or ``exported`` (:func:`torch.export.load`).
        steps: plain steps; by default as many as bring random images within the model's tolerance.
        image_shape: channels, height and width; by default those of training.
        seed: of the random images.
    """
    if format not in ENDINGS:
        raise unknown_name("format", format, ENDINGS)
    path = Path(path)
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}")
    shape = image_shape or model.config["extra"].get("image_shape")
    if shape is None:
        raise UserError(
            "the model was saved without the size of its images: give image_shape=(channels, height, width)"
        )
    shape = checked_shape(shape, model.config["in_channels"])
    pixels = torch.rand(SAMPLES, *shape, generator=torch.Generator().manual_seed(seed))
    pixels = pixels.to(next(model.parameters()).dtype)
    steps = enough_steps(model, pixels) if steps is None else steps
    made = Exportable(model, steps)
    with torch.no_grad():
        logits = made(pixels)
        residual = float(made.residual(pixels).max())
        mode = model.training
        own = model.eval()((pixels - made.mean) / made.std)
        model.train(mode)
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        draft = Path(folder) / f"model{ENDINGS[format]}"  # torch.export looks at the ending
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporters' own notes to developers
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is not installed
            any_batch = _write(format, made, pixels, draft)
            for chunk, expected in zip(*(t.split(SAMPLES if any_batch else 1) for t in (pixels, logits)), strict=True):
                _compare(_run(format, draft, chunk), expected, format)
        with plain_errors(f"writing {path}", "choose another place"):
            os.replace(draft, path)
    return Exported(
        path,
        steps,
        residual,
        max((layer.solver.tol for _, layer in equilibria(model)), default=0.0),
        float((logits - own).abs().max()),
        float((logits.argmax(1) == own.argmax(1)).float().mean()),
        any_batch,
    )


def _write(format: str, made: Exportable, pixels: Tensor, path: Path) -> bool:
    """Write the file; False where it takes one image at a time."""
    write = _WRITERS[format]
    try:
        write(made, pixels[:2], path, True)
        _run(format, path, pixels[:1])
        _run(format, path, pixels[:3])
        return True
    except MissingExtraError:
        raise
    except Exception:  # every exporter has classes of its own
        try:
            write(made, pixels[:1], path, False)
        except Exception as error:
            raise UserError(f"{made.model.config['name']} can't be written as {format}: {_reason(error)}") from error
    return False


def _reason(error: BaseException) -> str:
    """The first line of the error that began it: exporters wrap it in advice to their developers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Operations that ONNX lacks: the diversity of branches needs hypot, the Gaussian kernel's own gamma a median."""
    with needs_extra("export"):
        from onnxscript import opset18 as ops  # type: ignore[import-untyped,unused-ignore]

    def hypot(a: Any, b: Any) -> Any:
        return ops.Sqrt(ops.Add(ops.Mul(a, a), ops.Mul(b, b)))

    def median(x: Any, dim: int, keepdim: bool = False) -> Any:
        half = ops.Div(ops.Add(ops.Shape(x, start=dim, end=dim + 1), 1), 2)  # the lower one of two, as in torch
        values, indices = ops.TopK(x, half, axis=dim, largest=0)
        chosen = [ops.Gather(part, ops.Sub(half, 1), axis=dim) for part in (values, indices)]
        return tuple(chosen if keepdim else [ops.Squeeze(part, [dim]) for part in chosen])

    return {torch.ops.prims.hypot.default: hypot, torch.ops.aten.median.dim: median}


def _write_onnx(made: Exportable, example: Tensor, path: Path, any_batch: bool) -> None:
    with needs_extra("export"):
        import onnx

    program = torch.onnx.export(
        made,
        (example,),
        dynamo=True,
        dynamic_shapes=_shapes(any_batch),
        input_names=["pixels"],
        output_names=["logits"],
        verbose=False,
        custom_translation_table=_translations(),
    )
    assert program is not None
    program.save(str(path), external_data=False)
    classes = made.model.config["extra"].get("classes")
    if classes:
        stored = onnx.load(str(path))
        onnx.helper.set_model_props(stored, {"classes": json.dumps(classes)})
        onnx.save(stored, str(path))


def _write_torchscript(made: Exportable, example: Tensor, path: Path, _any_batch: bool) -> None:
    with torch.no_grad():
        traced = torch.jit.trace(made, example, check_trace=False)  # type: ignore[no-untyped-call]
    torch.jit.save(traced, str(path))


def _write_exported(made: Exportable, example: Tensor, path: Path, any_batch: bool) -> None:
    with torch.no_grad():
        program = torch.export.export(made, (example,), dynamic_shapes=_shapes(any_batch), strict=False)
    torch.export.save(program, str(path))


def _shapes(any_batch: bool) -> Any:
    return ({0: torch.export.Dim("batch", min=1)},) if any_batch else None


_WRITERS: dict[str, Callable[[Exportable, Tensor, Path, bool], None]] = {
    "onnx": _write_onnx,
    "torchscript": _write_torchscript,
    "exported": _write_exported,
}


@torch.no_grad()
def _run(format: str, path: Path, pixels: Tensor) -> Tensor:
    """The logits that the file gives."""
    if format == "onnx":
        with needs_extra("export"):
            import onnxruntime  # type: ignore[import-untyped,unused-ignore]

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return torch.from_numpy(session.run(None, {"pixels": pixels.numpy()})[0])
    loaded: Any = torch.jit.load(str(path)) if format == "torchscript" else torch.export.load(str(path)).module()  # type: ignore[no-untyped-call]
    logits: Tensor = loaded(pixels)
    return logits


def _compare(found: Tensor, expected: Tensor, format: str) -> None:
    scale = float(expected.abs().max().clamp_min(1.0))
    difference = float((found - expected).abs().max())
    if found.shape != expected.shape or not difference <= CLOSE * scale:
        raise UserError(
            f"the {format} file gives other logits than the model does with the same steps (they differ by "
            f"{difference:.1e}), so it was not written"
        )


def command(run: Path, format: str, steps: int | None, out: Path | None, console: Console) -> None:
    """What ``opteq export`` does."""
    if format not in ENDINGS:
        raise unknown_name("format", format, ENDINGS)
    model = load(run, "cpu")
    if steps is not None and not equilibria(model):
        raise UserError(f"--steps has no effect: {model.config['name']} has no equilibria")
    default = run / f"model{ENDINGS[format]}" if run.is_dir() else Path(f"{run.name}{ENDINGS[format]}")
    found = export(model, out or default, format, steps)  # weights of the package are exported into this folder
    solved = "no equilibria"
    if equilibria(model):
        solved = (
            f"{found.steps} plain steps leave a relative residual of {found.residual:.1e} (the model's own solver "
            f"stops at {found.tol:.0e})"
        )
    console.print(
        f"{found.path}: {solved}; on {SAMPLES} random images its logits differ from the model's by at most "
        f"{found.difference:.1e} and {found.agreement:.0%} of the predictions agree. It takes pixels in 0..1"
        + ("." if found.any_batch else ", one image at a time."),
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
