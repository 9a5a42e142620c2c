"""``opteq export``: inference with a fixed number of steps, as ONNX, TorchScript or an exported program."""

from __future__ import annotations

import json
import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from opteq.common.errors import MissingExtraError, UserError, unknown_name
from opteq.common.files import naming, plain_errors
from opteq.inference import formats
from opteq.inference.fixed_steps import Exportable, ExportableDenoiser, enough_steps, enough_steps_to_denoise
from opteq.inference.formats import ENDINGS, Inputs, Signature
from opteq.inference.predict import load
from opteq.models.classifier import Classifier, equilibria
from opteq.models.denoiser import Denoiser, holds_denoiser
from opteq.models.prediction import check_shape
from opteq.models.pretrained import released_folder
from opteq.problems import HiddenProblem, Objective, Problem

if TYPE_CHECKING:
    from rich.console import Console

SAMPLES = 8
"""Random images that the file is checked on."""

CLOSE = 1e-3
"""Largest difference between the file's output and that of the same steps in PyTorch, relative to the largest entry."""

_BATCH = torch.export.Dim("batch", min=1)
_SIDES = {2: torch.export.Dim("height", min=16, max=2**14), 3: torch.export.Dim("width", min=16, max=2**14)}


@dataclass(frozen=True)
class Exported:
    """A written file, and what its fixed number of steps costs on random images.

    Attributes:
        path: the file.
        steps: steps of every equilibrium layer.
        residual: the largest relative residual after them.
        tol: the largest tolerance of the model's own solvers.
        difference: the largest difference of logits, or of a denoiser's pixels, to the model with its own solver.
        agreement: share of images with the same predicted class; None for a denoiser.
        any_batch: whether the file takes batches of any size; else one image at a time, where torch's exporter can't
            trace the model otherwise.
    """

    path: Path
    steps: int
    residual: float
    tol: float
    difference: float
    agreement: float | None
    any_batch: bool


@dataclass(frozen=True)
class _Subject:
    """A module to write, with random inputs, what it gives for them, and what the model itself does."""

    name: str
    module: nn.Module
    signature: Signature
    inputs: Inputs
    output: Tensor
    own: Tensor
    residual: float
    others: tuple[Inputs, ...]
    """Inputs of other shapes that the file has to take, too."""


def export(
    model: Classifier | Denoiser,
    path: str | Path,
    format: str,
    steps: int | None = None,
    image_shape: tuple[int, int, int] | None = None,
    seed: int = 0,
) -> Exported:
    """Write a classifier or a denoiser with a fixed number of steps to ``path``.

    A classifier's file takes images ``(B, channels, h, w)`` with pixels in 0..1 and gives logits. A denoiser's takes
    grey images ``(B, 1, h, w)`` of any size and noise levels ``(B,)`` in the same scale, and gives images.

    The file is loaded again and compared with the same steps in PyTorch before it takes its place; nothing is written
    where they differ.

    Args:
        model: on the CPU.
        path: the file.
        format: ``onnx``, ``torchscript`` or ``exported`` (:func:`torch.export.load`).
        steps: plain steps, for a denoiser steps with momentum; by default as many as bring random images within the
            model's tolerance, for a denoiser within 1e-4.
        image_shape: channels, height and width of a classifier's images; by default those of training.
        seed: of the random images.
    """
    if format not in ENDINGS:
        raise unknown_name("format", format, ENDINGS)
    path = Path(path)
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}")
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, Denoiser):
        if image_shape is not None:
            raise UserError("image_shape has no effect: an exported denoiser takes images of any size")
        subject, steps = _denoiser(model, steps, generator)
        tol = model.layer.solver.tol
    else:
        subject, steps = _classifier(model, steps, image_shape, generator)
        tol = max((layer.solver.tol for _, layer in equilibria(model)), default=0.0)
    with (
        plain_errors(f"writing {path}", "or choose another place with --out"),
        naming(path, hidden=path.with_name(f".{path.name}.")),
        TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder,
    ):
        draft = Path(folder) / f"model{ENDINGS[format]}"  # torch.export looks at the ending
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporters' own notes to developers
            for name in ("torch.onnx", "onnx_ir"):  # that torchvision is not installed, that an attribute is empty
                logging.getLogger(name).setLevel(logging.ERROR)
            any_batch = _write(format, subject, draft)
            size = SAMPLES if any_batch else 1
            for first in range(0, SAMPLES, size):
                part = slice(first, first + size)
                output = formats.run(format, draft, tuple(one[part] for one in subject.inputs), subject.signature)
                _compare(output, subject.output[part], format, subject)
        os.replace(draft, path)
    difference = float((subject.output - subject.own).abs().max())
    agreement = None
    if isinstance(model, Classifier):
        agreement = float((subject.output.argmax(1) == subject.own.argmax(1)).float().mean())
    return Exported(path, steps, subject.residual, tol, difference, agreement, any_batch)


@torch.no_grad()
def _classifier(
    model: Classifier, steps: int | None, image_shape: tuple[int, int, int] | None, generator: torch.Generator
) -> tuple[_Subject, int]:
    for part in model.modules():
        if isinstance(part, Problem) and type(part).bind in (Objective.bind, HiddenProblem.bind):
            raise UserError(
                f"{model.config['name']} can't be exported: a step of {type(part).__name__} is a derivative of its "
                "terms, which no format of files has; write the step itself, as a FixedPoint"
            )
    shape = image_shape or model.config["extra"].get("image_shape")
    if shape is None:
        raise UserError(
            "the model was saved without the size of its images: give image_shape=(channels, height, width)"
        )
    shape = check_shape(shape, model.config["in_channels"])
    pixels = torch.rand(SAMPLES, *shape, generator=generator).to(next(model.parameters()).dtype)
    steps = enough_steps(model, pixels) if steps is None else steps
    exportable = Exportable(model, steps)
    mode = model.training
    own = model.eval()((pixels - exportable.mean) / exportable.std)
    model.train(mode)
    classes = model.config["extra"].get("classes")
    known = {"classes": json.dumps(classes)} if classes else {}
    signature = Signature(("pixels",), "logits", ({0: _BATCH},), known)
    others = ((pixels[:1],), (pixels[:3],))
    residual = float(exportable.residual(pixels).max())
    return _Subject(
        model.config["name"], exportable, signature, (pixels,), exportable(pixels), own, residual, others
    ), steps


@torch.no_grad()
def _denoiser(model: Denoiser, steps: int | None, generator: torch.Generator) -> tuple[_Subject, int]:
    low, high = model.config.least, model.config.most
    like = next(model.prior.parameters())
    sigma = (low + (high - low) * torch.rand(SAMPLES, generator=generator)).to(like)
    coarse = torch.rand(SAMPLES, 1, 6, 6, generator=generator)
    clean = nn.functional.interpolate(coarse, (40, 48), mode="bicubic").to(like)
    noisy = clean + sigma[:, None, None, None] * torch.randn(clean.shape, generator=generator).to(like)
    steps = enough_steps_to_denoise(model, noisy, sigma) if steps is None else steps
    exportable = ExportableDenoiser(model, steps)
    signature = Signature(("pixels", "sigma"), "denoised", ({0: _BATCH, **_SIDES}, {0: _BATCH}))
    others = ((noisy[:1], sigma[:1]), (noisy[:3, :, :36, :33], sigma[:3]))
    residual = float(exportable.residual(noisy, sigma).max())
    output, own = exportable(noisy, sigma), model(noisy, sigma)
    return _Subject("the denoiser", exportable, signature, (noisy, sigma), output, own, residual, others), steps


def _write(format: str, subject: _Subject, path: Path) -> bool:
    """Write the file; False where it takes one image at a time."""
    try:
        formats.write(format, subject.module, tuple(one[:2] for one in subject.inputs), path, subject.signature)
        for other in subject.others:
            formats.run(format, path, other, subject.signature)
        return True
    except (MissingExtraError, OSError):
        raise
    except Exception as error:  # every exporter has classes of its own
        if isinstance(subject.module, ExportableDenoiser):  # a file for one size of images would be of no use
            raise _export_error(subject, format, error) from error
    try:
        formats.write(format, subject.module, tuple(one[:1] for one in subject.inputs), path, subject.signature, False)
    except OSError:
        raise
    except Exception as error:
        raise _export_error(subject, format, error) from error
    return False


def _export_error(subject: _Subject, format: str, error: BaseException) -> UserError:
    while error.__cause__ is not None:  # exporters wrap the error that began it in advice to their developers
        error = error.__cause__
    reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
    return UserError(f"{subject.name} can't be written as {format}: {reason}")


def _compare(output: Tensor, expected: Tensor, format: str, subject: _Subject) -> None:
    scale = float(expected.abs().max().clamp_min(1.0))
    difference = float((output - expected).abs().max()) if output.shape == expected.shape else torch.inf
    if not difference <= CLOSE * scale:
        what = "logits" if subject.signature.output == "logits" else "images"
        raise UserError(
            f"the {format} file gives other {what} than the model does with the same steps (they differ by "
            f"{difference:.1e}), so it was not written"
        )


def command(run: Path, format: str, steps: int | None, out: Path | None, console: Console) -> None:
    """Run ``opteq export``."""
    if format not in ENDINGS:
        raise unknown_name("format", format, ENDINGS)
    default = run / f"model{ENDINGS[format]}" if run.is_dir() else Path(f"{run.name}{ENDINGS[format]}")
    path = out or default  # weights of the package are exported into this folder
    if holds_denoiser(released_folder(run)):
        exported = export(Denoiser.load(run, on_failure="ignore"), path, format, steps)
        message = f"its pixels differ from the model's by at most {exported.difference:.1e}. "
        message += "It takes noisy pixels in 0..1 of grey images of any size, and their noise levels in the same scale"
        kind, solves = "step", True
    else:
        model = load(run, "cpu")
        if steps is not None and not equilibria(model):
            raise UserError(f"--steps has no effect: {model.config['name']} has no equilibria")
        exported = export(model, path, format, steps)
        message = f"its logits differ from the model's by at most {exported.difference:.1e} and "
        message += f"{exported.agreement:.0%} of the predictions agree. "
        message += f"It takes pixels in 0..1{'' if exported.any_batch else ', one image at a time'}"
        kind, solves = "plain step", bool(equilibria(model))
    solved = "no equilibria"
    if solves:
        solved = (
            f"after {exported.steps} {kind}{'s' * (exported.steps > 1)} the relative residual is "
            f"{exported.residual:.1e} (the model's own solver stops at {exported.tol:.0e})"
        )
    console.print(
        f"{exported.path}: {solved}; on {SAMPLES} random images {message}.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
