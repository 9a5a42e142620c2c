"""The formats that a model with a fixed number of steps is written in: ONNX, TorchScript, an exported program."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opteq.common.errors import needs_extra

ENDINGS = {"onnx": ".onnx", "torchscript": ".ts", "exported": ".pt2"}

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Signature:
    """The inputs and the output of an exported file.

    Attributes:
        inputs: names of the inputs.
        output: name of the output.
        free: the dimensions of every input that may have any size.
        properties: words to keep in the file, where its format can (ONNX).
    """

    inputs: tuple[str, ...]
    output: str
    free: tuple[Mapping[int, Any], ...]
    properties: Mapping[str, str] = field(default_factory=dict)


def write(format: str, module: nn.Module, example: Inputs, path: Path, signature: Signature, free: bool = True) -> None:
    """Write a module; without ``free`` for inputs of the example's shapes alone."""
    _WRITERS[format](module, example, path, signature, tuple(map(dict, signature.free)) if free else None)


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


def _write_onnx(module: nn.Module, example: Inputs, path: Path, signature: Signature, free: Any) -> None:
    with needs_extra("export"):
        import onnx

    program = torch.onnx.export(
        module,
        example,
        dynamo=True,
        dynamic_shapes=free,
        input_names=list(signature.inputs),
        output_names=[signature.output],
        verbose=False,
        custom_translation_table=_translations(),
    )
    assert program is not None
    program.save(str(path), external_data=False)
    if signature.properties:
        stored = onnx.load(str(path))
        onnx.helper.set_model_props(stored, dict(signature.properties))
        onnx.save(stored, str(path))


def _write_torchscript(module: nn.Module, example: Inputs, path: Path, _signature: Signature, _free: Any) -> None:
    with torch.no_grad():
        traced = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
    _save(torch.jit.save, traced, path)


def _write_exported(module: nn.Module, example: Inputs, path: Path, _signature: Signature, free: Any) -> None:
    with torch.no_grad():
        program = torch.export.export(module, example, dynamic_shapes=free, strict=False)
    _save(torch.export.save, program, path)


def _save(save: Callable[..., object], program: object, path: Path) -> None:
    """Save by way of memory: where the disk is full, torch's own writer ends the process."""
    content = io.BytesIO()
    save(program, content)
    path.write_bytes(content.getbuffer())


_WRITERS: dict[str, Callable[[nn.Module, Inputs, Path, Signature, Any], None]] = {
    "onnx": _write_onnx,
    "torchscript": _write_torchscript,
    "exported": _write_exported,
}


@torch.no_grad()
def run(format: str, path: Path, given: Inputs, signature: Signature) -> Tensor:
    """The output that a file gives."""
    if format == "onnx":
        with needs_extra("export"):
            import onnxruntime  # type: ignore[import-untyped,unused-ignore]

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        named = {name: tensor.numpy() for name, tensor in zip(signature.inputs, given, strict=True)}
        return torch.from_numpy(session.run(None, named)[0])
    loaded: Any = torch.jit.load(str(path)) if format == "torchscript" else torch.export.load(str(path)).module()  # type: ignore[no-untyped-call]
    output: Tensor = loaded(*given)
    return output
