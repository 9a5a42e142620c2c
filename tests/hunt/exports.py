"""Exported models that compute something else than the model does."""

from __future__ import annotations

import copy
import shutil
import warnings
from pathlib import Path

import torch
from torch import Tensor

import opteq.models
from hunt.damage import refused_in_a_line
from hunt.drawing import Draw, require
from opteq.models.classifier import Classifier
from opteq.models.prediction import Preprocessing
from opteq.states import blocks, like


def exported(draw: Draw, model: Classifier, folder: Path, format: str) -> None:
    """Written to an empty place in ``folder`` and run by another program: the steps in float64, image by image."""
    from opteq.inference.export import CLOSE, export
    from opteq.inference.formats import ENDINGS, Signature, run

    signature = Signature(("pixels",), "logits", ())

    steps = draw.whole(1, 3)
    about = f"{model.config['name']} as {format} with {steps} steps"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its exporters
        found = export(model, folder / f"file{ENDINGS[format]}", format, steps, (3, 8, 8))
        pixels = draw.power(-2, 2) * draw.normal(draw.whole(2, 5) if found.any_batch else 1, 3, 8, 8)
        expected = _in_steps(model, pixels, steps)
        close = CLOSE * max(float(expected.abs().max()), 1.0)
        logits = run(format, found.path, (pixels.float(),), signature).double()
        off = float((logits - expected).abs().max())
        require(off <= close, f"{about}: its logits are off by {off:.3g}, {close:.3g} allowed")
        pixels[0, 0, 0, 0] = torch.nan
        beside = run(format, found.path, (pixels.float(),), signature).double()
        off = float((beside - logits)[1:].abs().max()) if len(pixels) > 1 else 0.0
        require(off <= close, f"{about}: an image with NaN changes the logits of others by {off:.3g}")
        require(not bool(beside[0].isfinite().any()), f"{about}: an image with NaN has finite logits")
    model.save_pretrained(folder)
    shutil.copy(found.path, folder / "model.safetensors")
    for given in (found.path, folder):  # to those who read models
        with refused_in_a_line(f"{about}, read as a model"):
            opteq.models.from_pretrained(given)
            require(False, f"{about} was read as a model")


def _in_steps(model: Classifier, pixels: Tensor, steps: int) -> Tensor:
    """Logits of a float64 copy after plain steps of its problem, or of its own where it has no equilibrium."""
    exact = copy.deepcopy(model).double().eval()
    preprocessing = Preprocessing.of(model.config)
    mean, std = (pixels.new_tensor(values).reshape(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    x = (pixels - mean) / std
    with torch.no_grad():
        if not isinstance(getattr(exact, "equilibrium", None), opteq.Equilibrium):
            logits: Tensor = exact(x)
            return logits
        hidden = exact.equilibrium.problem(exact.stem(x))
        y = hidden.start()
        for _ in range(steps):
            parts = zip(blocks(y), blocks(hidden.step(y)), strict=True)
            y = like(y, tuple(a + _per_sample(hidden.damping, a) * (b - a) for a, b in parts))
        return torch.as_tensor(exact.head(hidden.features(y)))


def _per_sample(number: float | Tensor, like: Tensor) -> float | Tensor:
    return number.reshape(-1, *[1] * (like.ndim - 1)) if isinstance(number, Tensor) else number
