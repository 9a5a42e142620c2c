"""Tests of a denoiser on folders of images: PSNR, SSIM, and the share of images whose energy was minimised."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opteq.common.errors import UserError
from opteq.common.files import draft, write_atomically
from opteq.data.grey import read_grey
from opteq.models.denoiser import Denoiser
from opteq.solvers import FISTA
from opteq.training.denoising.quality import psnr, ssim
from opteq.training.devices import make_accelerator
from opteq.training.recipe.denoising import DenoisingRecipe
from opteq.training.run.folder import RunFolder, writing_evaluation

BATCH = 17
"""Images of one shape that are denoised at once."""

_WINDOW = 11  # pixels, of SSIM


@dataclass(frozen=True)
class Denoised:
    """Some images of one shape, and what became of them; ``numbers`` are their places in the set."""

    numbers: Sequence[int]
    clean: Tensor
    noisy: Tensor
    restored: Tensor
    steps: Tensor
    converged: Tensor


@torch.no_grad()
def denoise_images(model: Denoiser, images: Sequence[Tensor], sigma: float, device: torch.device) -> Iterator[Denoised]:
    """Noise added to uint8 images ``(1, h, w)`` and taken off again, for a standard deviation in [0, 1].

    The noise depends on an image's place in the set alone, and is neither clipped nor rounded.
    """
    around = 2 * max(model.prior.filters.prepare().padding)
    by_shape: dict[torch.Size, list[int]] = {}
    for number, image in enumerate(images):
        if min(image.shape[1:]) < max(around + 1, _WINDOW):
            size = f"{image.shape[2]}x{image.shape[1]}"
            raise UserError(
                f"image {number + 1} of a test set is {size}; each side needs {max(around + 1, _WINDOW)} pixels"
            )
        by_shape.setdefault(image.shape, []).append(number)
    for numbers in by_shape.values():
        for group in (numbers[i : i + BATCH] for i in range(0, len(numbers), BATCH)):
            clean = torch.stack([images[number] for number in group]).float() / 255
            noise = [torch.randn(clean[0].shape, generator=torch.Generator().manual_seed(n)) for n in group]
            noisy = (clean + sigma * torch.stack(noise)).to(device)
            wide = F.pad(noisy, [around] * 4, mode="reflect")
            solution = model.layer.solve((wide, torch.full((len(group),), sigma, device=device)))
            assert isinstance(solution.features, Tensor)
            restored = solution.features[..., around:-around, around:-around]
            yield Denoised(group, clean.to(device), noisy, restored, solution.steps, solution.converged)


def measure_quality(model: Denoiser, images: Sequence[Tensor], sigma: float, device: torch.device) -> dict[str, Any]:
    """Means over a set: ``psnr``, ``ssim``, ``noisy_psnr``; ``converged`` (share), ``most_steps``, ``images``."""
    sums = dict.fromkeys(("psnr", "ssim", "noisy_psnr", "converged"), 0.0)
    most = 0
    for part in denoise_images(model, images, sigma, device):
        sums["psnr"] += float(psnr(part.restored, part.clean).sum())
        sums["ssim"] += float(ssim(part.restored, part.clean).sum())
        sums["noisy_psnr"] += float(psnr(part.noisy, part.clean).sum())
        sums["converged"] += float(part.converged.sum())
        most = max(most, int(part.steps.max()))
    means = {name: round(value / len(images), 4) for name, value in sums.items()}
    return {**means, "most_steps": most, "images": len(images)}


def evaluate(
    run: str | Path,
    tol: float | None = None,
    max_steps: int | None = None,
    device: str = "auto",
    root: str | None = None,
) -> dict[str, Any]:
    """Test the denoiser of a finished run on its test sets, and write ``evaluation.json`` beside it.

    Args:
        run: the run's folder.
        tol: of the solve; the recipe's by default.
        max_steps: likewise.
        device: ``auto``, ``cpu`` or ``cuda``.
        root: folder of the images, if it differs from the recipe's.

    Returns:
        ``sets``: the numbers of :func:`measure_quality` per test set and noise level; ``certificate``; the settings.
    """
    folder = RunFolder(Path(run))
    recipe = folder.recipe()
    if not isinstance(recipe, DenoisingRecipe):
        raise UserError(f"{folder.path} holds no denoiser, but a run of {recipe.model.name}")
    folder.check_evaluation(tol)
    place = make_accelerator(device, "no", recipe.train.tf32, recipe.train.threads).device
    model = load_denoiser(folder.path, recipe, tol, max_steps).to(place).eval()
    target = folder.path / "evaluation.json"
    with writing_evaluation(folder.path):
        with draft(target, b"can this be written?"):  # before minutes are spent
            pass
        result: dict[str, Any] = {"sets": {}, "tol": tol or recipe.test.tol, "device": str(place)}
        result |= {"parameters": model.size, "certificate": str(model.layer.problem.certificate()).splitlines()}
        for name in recipe.test.sets:
            images = read_grey(image_folder(recipe, root) / name)
            result["sets"][name] = {
                f"{sigma:g}": measure_quality(model, images, sigma / 255, place) for sigma in recipe.test.sigmas
            }
        write_atomically(target, (json.dumps(result, indent=2) + "\n").encode())
    return result


def is_denoiser(run: str | Path) -> bool:
    """Whether a run folder holds the run of a denoiser."""
    return isinstance(RunFolder(Path(run)).recipe(), DenoisingRecipe)


def load_denoiser(
    folder: Path, recipe: DenoisingRecipe, tol: float | None = None, max_steps: int | None = None
) -> Denoiser:
    """The denoiser of a finished run, with the solver of its tests."""
    solver = FISTA(tol=tol or recipe.test.tol, max_steps=max_steps or recipe.test.max_steps)
    return Denoiser.load(folder, solver, on_failure="ignore")


def image_folder(recipe: DenoisingRecipe, root: str | None = None) -> Path:
    """Where the images are."""
    chosen = root or recipe.data.root
    if chosen is None:
        holds = ", ".join(("train", *recipe.test.sets))
        raise UserError(f"data.root is missing: the folder that holds {holds} (--set data.root=DIR; evaluate: --root)")
    return Path(chosen)
