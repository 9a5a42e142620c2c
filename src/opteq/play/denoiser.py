"""A denoiser on the page: the image before and after, and how its energy was minimised."""

from __future__ import annotations

import math
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opteq.common.errors import UserError
from opteq.inference.restore import Damage, restore
from opteq.models.denoiser import Denoiser
from opteq.models.prediction import ImageLike, Preprocessing
from opteq.play.plain_values import certificate_of, replace_non_finite
from opteq.report.charts.images import image_data_url

MOST_PIXELS = 200 * 200
"""Pixels, in all channels together, of images on the page: larger ones are made smaller, for answers within seconds."""


class DenoiserSession:
    """A denoiser behind the page.

    Args:
        model: on the CPU.
        name: of its folder.
    """

    def __init__(self, model: Denoiser, name: str) -> None:
        self.model = model.eval()
        self.name = name
        self._lock = Lock()

    def describe(self) -> dict[str, Any]:
        """The data of the page before an image is given."""
        return {
            "kind": "denoiser",
            "name": self.name,
            "model": f"a denoiser with {self.model.size:,} parameters",
            "sigma": round(self.model.config.usual_sigma),
            "certificate": certificate_of(self.model.layer.problem),
        }

    def answer(
        self,
        image: ImageLike,
        sigma: float | None = None,
        strength: float = 1.0,
        tol: float = 1e-4,
        add_noise: bool = True,
    ) -> Any:
        """The denoised image with the estimated error, for JSON.

        Args:
            image: any image.
            sigma: standard deviation of the noise, of 255; one that the model was trained for by default.
            strength: factor of the prior.
            tol: estimated relative distance to the minimiser.
            add_noise: add noise of that level first, always the same.
        """
        sigma = self.model.config.usual_sigma if sigma is None else sigma
        for name, value, low, high in (
            ("sigma", sigma, 0, 100), ("strength", strength, 0.01, 100), ("tol", tol, 1e-8, 0.1),
        ):  # fmt: skip
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise UserError(f"{name} should lie in [{low:g}, {high:g}]; got {value!r}")
        if not isinstance(add_noise, bool):
            raise UserError(f"add_noise should be true or false; got {add_noise!r}")
        clean = shrink_to_limit(image)
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0)) * sigma / 255
        given = (clean + noise if add_noise else clean).clamp(0, 1)
        with self._lock:
            result = restore(given, self.model, Damage(sigma), strength, tol)
        return replace_non_finite({
            "before": image_data_url(_bytes(given), max(given.shape)),
            "after": image_data_url(_bytes(result.image), max(given.shape)),
            "error": result.error,
            "steps": result.steps,
            "minimised": result.minimised == 1,
            "tol": tol,
            "psnr": [_psnr(given, clean), _psnr(result.image, clean)] if add_noise and sigma else None,
        })  # fmt: skip


def shrink_to_limit(image: ImageLike) -> Tensor:
    """``(c, h, w)`` in [0, 1], grey where all channels agree, of at most :data:`MOST_PIXELS`."""
    pixels = Preprocessing(3, None, (0.0,) * 3, (1.0,) * 3, ()).pixels(image).float() / 255
    if bool((pixels - pixels[:1]).abs().max() == 0):
        pixels = pixels[:1]
    scale = math.sqrt(pixels.numel() / MOST_PIXELS)
    if scale > 1:
        size = tuple(max(8, round(side / scale)) for side in pixels.shape[1:])
        pixels = torch.nn.functional.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0]
    if min(pixels.shape[1:]) < 8:
        raise UserError(f"the image should have at least 8 x 8 pixels; got {tuple(pixels.shape[1:])}")
    return pixels


def _psnr(image: Tensor, clean: Tensor) -> float:
    return float(-10 * (image - clean).square().mean().clamp_min(1e-12).log10())


def _bytes(image: Tensor) -> Tensor:
    return torch.from_numpy(np.rint(255 * image.clamp(0, 1).numpy()).astype(np.uint8))
