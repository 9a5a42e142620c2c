"""The severities of Hendrycks and Dietterich (2019): what each corruption's five levels are, for two sizes of images.

The numbers define the benchmarks, so they are the published ones: those of CIFAR-10-C for small images and those of
ImageNet-C for large ones. Lengths in pixels are for sides of 32 and 224; :func:`parameters` has the factor for others.
"""

from __future__ import annotations

from collections.abc import Sequence

LARGEST_SMALL = 96
"""Images with a shorter side of at most this take the levels of CIFAR-10-C."""

Level = Sequence[float]
Levels = Sequence[Level]


def _each(*values: float) -> Levels:
    return [(value,) for value in values]


SMALL: dict[str, Levels] = {
    "gaussian_noise": _each(0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": _each(500, 250, 100, 75, 50),
    "impulse_noise": _each(0.01, 0.02, 0.03, 0.05, 0.07),
    "speckle_noise": _each(0.06, 0.1, 0.12, 0.16, 0.2),
    "gaussian_blur": _each(0.4, 0.6, 0.7, 0.8, 1),
    "glass_blur": [(0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)],
    "defocus_blur": [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)],
    "motion_blur": [(6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)],
    "zoom_blur": [(1.05, 0.01), (1.10, 0.01), (1.15, 0.01), (1.20, 0.01), (1.25, 0.01)],
    "snow": [
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95), (0.1, 0.2, 1, 0.5, 10, 4, 0.9), (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85), (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ],
    "frost": [(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)],
    "fog": [(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)],
    "brightness": _each(0.05, 0.1, 0.15, 0.2, 0.3),
    "spatter": [
        (0.62, 0.1, 0.7, 0.7, 0.5, 0), (0.65, 0.1, 0.8, 0.7, 0.5, 0), (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1), (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    ],
    "contrast": _each(0.75, 0.5, 0.4, 0.3, 0.15),
    "elastic_transform": [(0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)],
    "pixelate": _each(0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg_compression": _each(80, 65, 58, 50, 40),
    "saturate": [(0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)],
}  # fmt: skip

LARGE: dict[str, Levels] = {
    "gaussian_noise": _each(0.08, 0.12, 0.18, 0.26, 0.38),
    "shot_noise": _each(60, 25, 12, 5, 3),
    "impulse_noise": _each(0.03, 0.06, 0.09, 0.17, 0.27),
    "speckle_noise": _each(0.15, 0.2, 0.35, 0.45, 0.6),
    "gaussian_blur": _each(1, 2, 3, 4, 6),
    "glass_blur": [(0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)],
    "defocus_blur": [(3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)],
    "motion_blur": [(10, 3), (15, 5), (15, 8), (15, 12), (20, 15)],
    "zoom_blur": [(1.10, 0.01), (1.15, 0.01), (1.20, 0.02), (1.24, 0.02), (1.30, 0.03)],
    "snow": [
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8), (0.2, 0.3, 2, 0.5, 12, 4, 0.7), (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65), (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ],
    "frost": [(1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)],
    "fog": [(1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)],
    "brightness": _each(0.1, 0.2, 0.3, 0.4, 0.5),
    "spatter": [
        (0.65, 0.3, 4, 0.69, 0.6, 0), (0.65, 0.3, 3, 0.68, 0.6, 0), (0.65, 0.3, 2, 0.68, 0.5, 0),
        (0.65, 0.3, 1, 0.65, 1.5, 1), (0.67, 0.4, 1, 0.65, 1.5, 1),
    ],
    "contrast": _each(0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": [(2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)],
    "pixelate": _each(0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg_compression": _each(25, 18, 15, 10, 7),
    "saturate": [(0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)],
}  # fmt: skip

NAMES = tuple(SMALL)
"""The 19 corruptions: noise, blur, weather and digital ones."""

MAIN = tuple(name for name in NAMES if name not in ("speckle_noise", "gaussian_blur", "spatter", "saturate"))
"""The 15 over which the mean corruption error of the paper is taken; the other four were meant for validation."""


def parameters(name: str, severity: int, side: int) -> tuple[Level, float]:
    """A level's numbers, and the factor of its lengths in pixels, for images with this shorter side.

    Images below 32 pixels keep the lengths of 32: a blur of a fraction of a pixel would not be one.
    """
    small = side <= LARGEST_SMALL
    level = (SMALL if small else LARGE)[name][severity - 1]
    return level, max(1.0, side / 32) if small else side / 224
