"""Restore an image file with a trained prior: noise, blur, missing pixels, or too few of them."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opteq import operators as op
from opteq.common.errors import UserError
from opteq.common.files import draft, plain_errors, write_atomically
from opteq.data.readers.decode import open_image
from opteq.inference.devices import resolve_device
from opteq.inference.predict import check_finished
from opteq.models.denoiser import Denoiser
from opteq.models.restoration import Restoration
from opteq.models.restoration.minimise import MAX_STEPS, minimise
from opteq.solution import Report

if TYPE_CHECKING:
    from rich.console import Console

OVERLAP = 32
"""Pixels that a tile sees of its neighbours, at least; a multiple of every factor of ``--scale``."""

_SCALES = (1, 2, 4)
_LARGEST_BLUR = 20.0


@dataclass(frozen=True)
class Damage:
    """The degradation of the image.

    Attributes:
        sigma: standard deviation of the noise, of 255.
        blur: standard deviation of a Gaussian blur in pixels; 0 for none.
        mask: where pixels are seen, ``(h, w)``; None for everywhere.
        scale: by how much the image is to be enlarged.
    """

    sigma: float
    blur: float = 0.0
    mask: Tensor | None = None
    scale: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < math.inf:
            raise UserError(f"--sigma should be at least 0 and finite; got {self.sigma:g}")
        if not 0 <= self.blur <= _LARGEST_BLUR:
            raise UserError(f"--blur should lie in [0, {_LARGEST_BLUR:g}]; got {self.blur:g}")
        if self.scale not in _SCALES:
            raise UserError(f"--scale should be one of {', '.join(map(str, _SCALES))}; got {self.scale}")
        if sum([self.blur > 0, self.mask is not None, self.scale > 1]) > 1:
            raise UserError("one of --blur, --mask and --scale can be undone at a time")

    @property
    def noise_only(self) -> bool:
        """Whether there is nothing but noise."""
        return self.blur == 0 and self.mask is None and self.scale == 1


@dataclass(frozen=True)
class Restored:
    """The image ``(c, h, w)`` in [0, 1], and how its energy was minimised.

    Attributes:
        image: the image.
        minimised: share of tiles (and channels) whose energy was minimised to the tolerance.
        error: the worst estimate of the relative distance to the minimiser.
        steps: the most steps.
    """

    image: Tensor
    minimised: float
    error: float
    steps: int


@torch.no_grad()
def restore(
    image: Tensor,
    model: Denoiser,
    damage: Damage,
    strength: float = 1.0,
    tol: float = 1e-4,
    tile: int = 512,
    progress: Callable[[int, int], None] | None = None,
) -> Restored:
    """Minimise ``1/2 |A y - x|^2 + strength R_sigma(y)`` for every channel by itself.

    Args:
        image: x, ``(c, h, w)`` in [0, 1].
        model: whose prior R is.
        damage: what A and sigma are.
        strength: factor of the prior.
        tol: estimated relative distance to the minimiser at which a solve ends.
        tile: side of the parts that are solved one after the other, in pixels of the answer; they overlap.
        progress: called with the number of tiles done, and of all.
    """
    if damage.mask is not None and damage.mask.shape != image.shape[1:]:
        raise UserError(f"the mask has {tuple(damage.mask.shape)} pixels, the image {tuple(image.shape[1:])}")
    if damage.mask is not None and not bool(damage.mask.any()):
        raise UserError("the mask is black everywhere, so nothing of the image is seen; white pixels are kept")
    guide, factor = model.prior.guide, damage.scale
    if guide is not None and not damage.noise_only:
        raise UserError(
            "the network that guides this model's prior was trained on images with noise alone; --blur, --mask and "
            "--scale need a prior that is the same everywhere, such as denoiser-convex"
        )
    overlap = OVERLAP if guide is None else max(OVERLAP, guide.reach)
    height, width = (factor * size for size in image.shape[1:])
    answer = image.new_zeros(image.shape[0], height, width)
    tiles = list(_tiles(height, width, tile, overlap))
    converged, worst, most = 0.0, 0.0, 0
    for done, (outer, inner, place) in enumerate(tiles):
        window = tuple(slice(part.start // factor, part.stop // factor) for part in outer)
        mask = None if damage.mask is None else damage.mask[outer]
        solved, report = _solve_tile(image[:, window[0], window[1]][:, None], mask, model, damage, strength, tol)
        answer[:, place[0], place[1]] = solved[:, 0, inner[0], inner[1]]
        converged += float(report.converged.float().mean())
        worst, most = max(worst, float(report.residual.max())), max(most, int(report.steps.max()))
        if progress is not None:
            progress(done + 1, len(tiles))
    if not bool(answer.isfinite().all()):
        raise UserError("the model gives pixels that are not finite, so there is no image; look at its weights")
    return Restored(answer, converged / len(tiles), worst, most)


def _solve_tile(
    x: Tensor, mask: Tensor | None, model: Denoiser, damage: Damage, strength: float, tol: float
) -> tuple[Tensor, Report]:
    """A tile, channels as the batch."""
    # Beyond its edge an image is taken to go on as its mirror image: a prior that met zeros there would darken it.
    around = math.ceil(2 * max(model.prior.filters.prepare().padding) / damage.scale)
    x = _mirrored(x, around)
    measurement: op.Operator | None = None
    crop = damage.scale * around
    if damage.blur > 0:
        kernel = op.gaussian_kernel(damage.blur)
        measurement = op.Blur(kernel, boundary="valid")
        crop += kernel.shape[0] // 2
    elif damage.scale > 1:
        measurement = op.Downsample(damage.scale)
    elif mask is not None:
        mask = _mirrored(mask, around)
        measurement = op.Mask(mask)
        x = mask * x
    problem = Restoration(model.prior, measurement, strength).to(x.device, x.dtype)
    sigma = x.new_full((x.shape[0],), max(damage.sigma / 255, model.config.least))
    state, report = minimise(problem, x, sigma, tol)
    return state[:, :, crop : state.shape[2] - crop, crop : state.shape[3] - crop], report


def _mirrored(x: Tensor, around: int) -> Tensor:
    """``(..., h, w)`` with that many pixels more on every side, mirrored as often as it takes."""
    for dim in (-2, -1):
        size = x.shape[dim]
        place = torch.arange(-around, size + around, device=x.device).abs() % max(2 * (size - 1), 1)
        x = x.index_select(dim, torch.where(place < size, place, 2 * (size - 1) - place))
    return x


Window = tuple[slice, ...]


def _tiles(height: int, width: int, tile: int, overlap: int) -> Iterator[tuple[Window, Window, Window]]:
    """The input window of a tile, the part of it that is used, and its position in the output."""
    for top in range(0, height, tile):
        for left in range(0, width, tile):
            place = (slice(top, min(top + tile, height)), slice(left, min(left + tile, width)))
            sizes = zip(place, (height, width), strict=True)
            outer = tuple(slice(max(p.start - overlap, 0), min(p.stop + overlap, size)) for p, size in sizes)
            inner = tuple(slice(p.start - o.start, p.stop - o.start) for p, o in zip(place, outer, strict=True))
            yield outer, inner, place


def read_image(file: Path) -> Tensor:
    """``(c, h, w)`` in [0, 1]: one channel for grey images, else three. Transparent pixels show white below them."""
    import numpy as np

    if not file.is_file():
        raise UserError(f"there is no image {file}")
    pixels = torch.from_numpy(np.array(open_image(file))).float() / 255
    grey = bool((pixels[..., 0] == pixels[..., 1]).all()) and bool((pixels[..., 1] == pixels[..., 2]).all())
    return pixels.movedim(-1, 0)[:1] if grey else pixels.movedim(-1, 0)


def write_image(image: Tensor, file: Path) -> None:
    """Round ``(c, h, w)`` in [0, 1] to 8 bits and write it; the ending says the format."""
    from PIL import Image

    pixels = (255 * image.clamp(0, 1)).round().to(torch.uint8).cpu()
    array = (pixels[0] if len(pixels) == 1 else pixels.movedim(0, -1)).numpy()
    written = io.BytesIO()
    try:
        Image.fromarray(array).save(written, Image.registered_extensions()[file.suffix.lower()])
    except (OSError, ValueError) as error:
        raise UserError(f"{file} can't be written: {error}; choose another format, such as .png") from error
    with _plain(file):
        write_atomically(file, written.getvalue())


def _plain(file: Path) -> AbstractContextManager[None]:
    return plain_errors(f"writing {file}", "or choose another place")


def _check_writable(file: Path) -> None:
    """Refuse, before anything is computed, a place that an image can't be written to."""
    from PIL import Image

    if not file.parent.is_dir():
        raise UserError(f"{file}: there is no folder {file.parent}")
    if file.is_dir():
        raise UserError(f"{file} is a folder; give the name of an image, such as {file / 'out.png'}")
    if Image.registered_extensions().get(file.suffix.lower()) not in Image.SAVE:
        raise UserError(f"{file}: the ending should be that of an image format, such as .png; got {file.suffix!r}")
    with _plain(file), draft(file, b"can this be written?"):
        pass


def command(
    source: Path,
    out: Path,
    model: Path,
    sigma: float | None,
    blur: float,
    mask: Path | None,
    scale: int,
    strength: float,
    tol: float,
    tile: int,
    device: str,
    console: Console,
) -> None:
    """Run ``opteq restore``."""
    from rich.progress import Progress

    device = resolve_device(device)
    _check_writable(out)
    pixels = None if mask is None else (read_image(mask).mean(dim=0) > 0.5).float().to(device)
    damage = Damage(0.0 if sigma is None else sigma, blur, pixels, scale)
    if not 0 < strength < math.inf:
        raise UserError(f"--strength should be positive and finite; got {strength:g}")
    if not 0 < tol < 1:
        raise UserError(f"--tol should lie between 0 and 1; got {tol:g}")
    x = read_image(source).to(device)
    check_finished(model)
    trained = Denoiser.load(model).to(device).eval()
    least, most = 255 * trained.config.least, 255 * trained.config.most
    if sigma is None:
        sigma = trained.config.usual_sigma
        damage = replace(damage, sigma=sigma)
    if not least <= sigma <= most:
        instead = f"; {least:.3g} is used" if sigma < least else ""
        console.print(f"{model} was trained for --sigma {least:.3g} to {most:.3g}, and {sigma:g} is outside{instead}")
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("minimising", total=None)
        result = restore(
            x, trained, damage, strength, tol, tile // 32 * 32, lambda n, all: bar.update(task, completed=n, total=all)
        )
    write_image(result.image, out)
    size = f"{result.image.shape[2]} x {result.image.shape[1]}"
    message = f"{out}: {size} pixels, {result.steps} steps at most, estimated error {result.error:.1e}"
    if result.minimised == 1:
        # What rounding allows may be more than was asked for.
        console.print(f"{message}; the energy was minimised, by this estimate to {max(tol, result.error):.0e}")
    else:
        why = (
            f"{MAX_STEPS} steps were not enough; give a larger --tol"
            if result.steps >= MAX_STEPS
            else "it curves downwards there; give a smaller --tol"
        )
        console.print(f"{message}; the energy was NOT minimised in {1 - result.minimised:.0%} of the parts: {why}")
