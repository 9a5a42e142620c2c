"""Corruptions: in range, repeatable, independent of the batch, stronger with every severity, and what each one says."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from lazy import lazily
from opteq.data import corruptions
from opteq.data.corruptions import NAMES, corrupt, weather
from opteq.data.corruptions.draws import Draws, Setting, plasma
from opteq.data.corruptions.filters import blur, line_blur, zoom
from opteq.data.corruptions.severities import LARGE, SMALL, parameters

ndimage = lazily("scipy.ndimage")
CPU = torch.device("cpu")


@cache
def scenes(side: int = 32, count: int = 6, channels: int = 3) -> Tensor:
    """Images as natural ones are: smooth colors, edges and a little texture; uint8."""
    draws = Draws(0, "scene", range(count), CPU)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    x = torch.stack([plasma(draws, side, side, 2.0) for _ in range(channels)], dim=1)
    centre, radius = draws.uniform(2, low=0.3, high=0.7) * side, draws.uniform(low=0.15, high=0.3) * side
    inside = (rows - centre[:, 0, None, None]) ** 2 + (columns - centre[:, 1, None, None]) ** 2 < radius[
        :, None, None
    ] ** 2
    x = torch.where(inside[:, None], 0.6 * x.flip(1) + 0.3, 0.7 * x)
    x = x + 0.05 * ((rows + columns) % 4 < 2)
    return (255 * x.clamp(0, 1)).round().to(torch.uint8)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).square().mean().sqrt())


def decorrelation(a: Tensor, b: Tensor) -> float:
    """One minus the correlation of pixels: a loss of structure, whatever the brightness."""
    a, b = (one.float().flatten(1) - one.float().flatten(1).mean(dim=1, keepdim=True) for one in (a, b))
    return float((1 - (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))).mean())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", [8, 32, 128])
def test_shape_range_and_chance(name: str, side: int) -> None:
    clean = scenes(side, 3)
    assert torch.equal(corrupt(clean, name, 0), clean)
    made = corrupt(clean, name, 4, seed=1)
    assert made.shape == clean.shape
    assert made.dtype == torch.uint8
    assert not torch.equal(made, clean)
    assert torch.equal(made, corrupt(clean, name, 4, seed=1))
    alone = corrupt(clean[2:], name, 4, seed=1, first=2)
    assert distance(made[2:], alone) < 0.1  # rounding: sums may be added in another order
    floats = corrupt(clean.float() / 255, name, 4, seed=1)
    assert 0 <= float(floats.min()) <= float(floats.max()) <= 1
    assert distance(255 * floats, made) < 1


RANDOM = {
    "gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "glass_blur", "motion_blur", "snow", "frost",
    "fog", "spatter", "elastic_transform",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_seeds_matter_where_there_is_chance(name: str) -> None:
    first, second = (corrupt(scenes(), name, 5, seed=seed) for seed in (0, 1))
    assert torch.equal(first, second) == (name not in RANDOM)


# The published levels of these rise in groups only: saturation first falls, then rises; drops are of water, then of
# mud; glass has one round of exchanges, then two, with blurs between that hide some; elastic deformation goes from a
# tilt of the whole image to small waves.
GROUPS = {"saturate": [(1, 2), (3, 4, 5)], "spatter": [(1, 2, 3), (4, 5)], "glass_blur": [(1, 4), (3, 5)]}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "elastic_transform"])
def test_stronger_with_every_severity(name: str) -> None:
    clean = scenes()
    measure = decorrelation if name == "frost" else distance  # frost also dims, which may bring the mean closer
    found = {severity: measure(corrupt(clean, name, severity), clean) for severity in range(1, 6)}
    for group in GROUPS.get(name, [(1, 2, 3, 4, 5)]):
        values = [found[severity] for severity in group]
        assert values == sorted(values), (group, values)
        assert values[-1] > 1.02 * values[0]


def test_elastic_goes_from_tilts_to_waves() -> None:
    """Without the affine part's corners an image is left in place; the waves alone grow from level 2 on."""
    tilt, waves = zip(*((level[2], level[0]) for level in SMALL["elastic_transform"]), strict=True)
    assert sorted(tilt, reverse=True) == list(tilt)
    assert sorted(waves) == list(waves)
    # A ramp shows the displacement itself: by how much a pixel's row has changed.
    ramp = torch.linspace(0.25, 0.75, 64)[None, None, :, None].expand(1, 1, 64, 64).contiguous()
    moved = (corrupt(ramp, "elastic_transform", 1) - ramp).abs().mean() * 63 / 0.5
    assert 0.5 < float(moved) < 64 * 0.08


def test_blurs_agree_with_scipy() -> None:
    x = scenes(side=20, count=2).double() / 255
    for sigma in (0.4, 3.0, 12.0):
        wanted = ndimage.gaussian_filter(x.numpy(), sigma, axes=(2, 3), radius=max(1, math.ceil(4 * sigma)))
        torch.testing.assert_close(blur(x, sigma), torch.from_numpy(wanted), atol=1e-6, rtol=0)
    turned = torch.full((2,), 90.0, dtype=torch.float64)
    taps = np.exp(-0.5 * (np.arange(13) / 5.0) ** 2)  # a radius of 6 is a line of 13 pixels, as in ImageMagick
    wanted = ndimage.correlate1d(x.numpy(), taps / taps.sum(), axis=2, mode="nearest", origin=-6)
    torch.testing.assert_close(line_blur(x, turned, 6, 5.0), torch.from_numpy(wanted), atol=1e-5, rtol=0)
    flat = torch.full((1, 3, 9, 9), 0.3)
    torch.testing.assert_close(zoom(flat, 1.3), flat)
    torch.testing.assert_close(zoom(x, 1.0), x, atol=1e-6, rtol=0)


def test_zoom_enlarges_about_the_middle() -> None:
    rows = torch.arange(9.0)[None, None, :, None].expand(1, 1, 9, 9)
    torch.testing.assert_close(zoom(rows.contiguous(), 2.0)[0, 0, :, 4], 4 + (torch.arange(9.0) - 4) / 2)


def test_water_drops_are_as_strong_as_their_level_says() -> None:
    x = torch.full((2, 3, 32, 32), 0.2)
    weak, strong = (
        weather.spatter(x, Setting((0.65, 0.3, 1, 0.69, level, 0), Draws(0, "spatter", range(2), x.device), 1.0)) - x
        for level in (0.5, 0.6)
    )
    assert weak.max() > 0
    torch.testing.assert_close(strong, 1.2 * weak)


def test_noise_has_the_moments_that_it_should() -> None:
    grey = torch.full((4, 3, 64, 64), 0.5)
    for severity, (spread,) in enumerate(SMALL["gaussian_noise"], start=1):
        noise = corrupt(grey, "gaussian_noise", severity)[:, :, :32, :32] - 0.5
        level = parameters("gaussian_noise", severity, 64)[0][0]
        assert level == spread
        assert float(noise.std()) == pytest.approx(spread, rel=0.03)
    for severity, (count,) in enumerate(SMALL["shot_noise"], start=1):
        shot = corrupt(grey, "shot_noise", severity)
        assert float(shot.mean()) == pytest.approx(0.5, abs=0.005)
        assert float(shot.std()) == pytest.approx(math.sqrt(0.5 / count), rel=0.03)
    changed = (corrupt(grey, "impulse_noise", 5) != 0.5).float().mean()
    assert float(changed) == pytest.approx(0.07, abs=0.005)
    speckle = corrupt(grey, "speckle_noise", 5) - 0.5
    assert float(speckle.std()) == pytest.approx(0.5 * 0.2, rel=0.03)


def test_colors_agree_with_hsv() -> None:
    """Against the conversion of the standard library, pixel by pixel."""
    import colorsys

    x = scenes(8, 1).float() / 255
    x[0, :, 0, 0] = 0.4  # a grey pixel
    pixels = x[0].flatten(1).T.tolist()

    def wanted(change: object) -> Tensor:
        return torch.tensor([change(*colorsys.rgb_to_hsv(*pixel)) for pixel in pixels]).T.view_as(x[0])  # type: ignore[operator]

    def lit(h: float, s: float, v: float) -> tuple[float, ...]:
        return colorsys.hsv_to_rgb(h, s, min(1.0, v + 0.2))

    def strong(h: float, s: float, v: float) -> tuple[float, ...]:
        return colorsys.hsv_to_rgb(h, min(1.0, 2 * s + 0.1), v)

    torch.testing.assert_close(corrupt(x, "brightness", 4)[0], wanted(lit), atol=1e-5, rtol=0)
    torch.testing.assert_close(corrupt(x, "saturate", 4)[0], wanted(strong), atol=1e-5, rtol=0)


def test_contrast_pixels_and_glass() -> None:
    x = scenes().float() / 255
    low = corrupt(x, "contrast", 5)
    torch.testing.assert_close(low.mean(dim=(2, 3)), x.mean(dim=(2, 3)))
    torch.testing.assert_close(low.std(dim=(2, 3)), 0.15 * x.std(dim=(2, 3)))
    blocks = corrupt(scenes(128, 2).float() / 255, "pixelate", 2)  # half as many pixels: blocks of two by two
    means = torch.nn.functional.avg_pool2d(scenes(128, 2).float() / 255, 2).repeat_interleave(2, 2)
    torch.testing.assert_close(blocks, means.repeat_interleave(2, 3))
    glass = corrupt(x, "glass_blur", 1)  # its blur is negligible: every value comes from a neighbour
    near = torch.stack([x.roll((i, j), (2, 3)) for i in (-1, 0, 1) for j in (-1, 0, 1)])
    gap = (near - glass)[..., 1:-1, 1:-1].abs().amin(dim=0)
    assert float(gap.max()) < 1e-3


def test_both_tables_have_all_19() -> None:
    assert len(NAMES) == 19
    assert len(corruptions.MAIN) == 15
    assert set(SMALL) == set(LARGE) == set(NAMES)
    assert all(len(levels) == 5 for table in (SMALL, LARGE) for levels in table.values())


def test_grey_images() -> None:
    clean = scenes(channels=1)
    assert set(corruptions.names(1)) == set(NAMES) - {"saturate"}
    for name in corruptions.names(1):
        assert corrupt(clean, name, 3).shape == clean.shape


@pytest.mark.parametrize(
    ("shape", "name", "severity", "words"),
    [
        ((1, 3, 8, 8), "fogg", 1, "unknown corruption 'fogg'; did you mean 'fog'?"),
        ((1, 3, 8, 8), "fog", 6, "a severity should be a whole number from 0 to 5; got 6"),
        ((1, 2, 8, 8), "fog", 1, r"corruptions need images \(B, 1 or 3, height, width\); got \(1, 2, 8, 8\)"),
        ((1, 1, 8, 8), "saturate", 1, "saturate changes colors, and these images are grey: leave it out"),
    ],
)
def test_wrong_requests(shape: tuple[int, ...], name: str, severity: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        corrupt(torch.zeros(shape), name, severity)
