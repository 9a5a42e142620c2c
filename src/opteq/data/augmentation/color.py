"""RandAugment and color jitter: kornia's operations with random numbers per image."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import torch
from kornia import enhance
from torch import Tensor
from torch.nn import functional as F

from opteq.data.augmentation.options import OPERATIONS, Augmentation
from opteq.data.augmentation.shard import Shard
from opteq.data.prefetch import to_device

GEOMETRIC = OPERATIONS.index("shear_x"), OPERATIONS.index("rotate")  # first and last


def jitter_and_randaugment(images: Tensor, options: Augmentation, shard: Shard) -> Tensor:
    """RandAugment, then color jitter, on images in 0..1."""
    if options.randaugment:
        images = randaugment(images, shard.part("operation"), shard.part("sign"), options.randaugment_magnitude / 30)
    if options.color_jitter:
        factors = to_device(torch.from_numpy(shard.part("jitter")), images.device)
        images = enhance.adjust_brightness_accumulative(images, factors[:, 0])
        images = enhance.adjust_contrast_with_mean_subtraction(images, factors[:, 1])
        images = enhance.adjust_saturation_with_gray_subtraction(images, factors[:, 2])
    return images


def randaugment(
    images: Tensor, operations: npt.NDArray[np.generic], signs: npt.NDArray[np.generic], strength: float
) -> Tensor:
    """Apply ``operations`` (B, rounds), indices into OPERATIONS, one round after the other, at ``strength`` in (0, 1].

    The operations are known on the host, so each is called once per round, on its images. The five geometric ones are
    one affine resampling.
    """
    height, width = images.shape[2:]
    first, last = GEOMETRIC
    for chosen, sign in zip(operations.T.astype(np.int64), signs.T.astype(np.float32), strict=True):
        kinds = np.where((chosen >= first) & (chosen <= last), first, chosen)
        by_kind = np.argsort(kinds, kind="stable")
        rows = to_device(torch.from_numpy(by_kind), images.device)
        towards = to_device(torch.from_numpy(sign[by_kind] * np.float32(strength)), images.device)
        result = images.clone()
        starts = np.searchsorted(kinds[by_kind], np.arange(len(OPERATIONS) + 1))
        for kind, (start, stop) in enumerate(itertools.pairwise(starts.tolist())):
            if kind == OPERATIONS.index("identity") or start == stop:
                continue
            part = images[rows[start:stop]]
            if kind == first:
                places = by_kind[start:stop]
                maps = affine_maps(chosen[places], sign[places] * strength, height, width)
                changed = _resample(part, to_device(torch.from_numpy(maps), images.device))
            else:
                changed = _photometric(OPERATIONS[kind], part, towards[start:stop], strength)
            result[rows[start:stop]] = changed
        images = result
    return images


def affine_maps(
    chosen: npt.NDArray[np.int64], amount: npt.NDArray[np.float32], height: int, width: int
) -> npt.NDArray[np.float32]:
    """Affine maps ``(B, 2, 3)`` from output to input coordinates, which go from -1 to 1 on both axes."""
    maps = np.zeros((len(chosen), 2, 3))
    maps[:, 0, 0] = maps[:, 1, 1] = 1
    is_ = {name: chosen == OPERATIONS.index(name) for name in OPERATIONS}
    # In pixels: on an image that is not square the normalised axes have different units.
    maps[:, 0, 1] = np.where(is_["shear_x"], 0.3 * amount * height / width, 0)
    maps[:, 1, 0] = np.where(is_["shear_y"], 0.3 * amount * width / height, 0)
    reach = 2 * 150 / 331  # the paper translates images of 331 pixels by up to 150; the axes here have length 2
    maps[:, 0, 2] = np.where(is_["translate_x"], reach * amount, 0)
    maps[:, 1, 2] = np.where(is_["translate_y"], reach * amount, 0)
    angle = np.where(is_["rotate"], np.deg2rad(30) * amount, 0)
    turned = is_["rotate"]
    maps[turned, 0, 0] = maps[turned, 1, 1] = np.cos(angle)[turned]
    maps[turned, 0, 1] = (-np.sin(angle) * height / width)[turned]
    maps[turned, 1, 0] = (np.sin(angle) * width / height)[turned]
    return maps.astype(np.float32)


def _resample(images: Tensor, maps: Tensor) -> Tensor:
    # Not kornia's warp, which inverts the maps on the device and makes the host wait for a check of the result.
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _photometric(name: str, images: Tensor, towards: Tensor, strength: float) -> Tensor:
    """One of the color operations; ``towards`` is the signed strength per image."""
    if name == "brightness":
        return enhance.adjust_brightness_accumulative(images, 1 + 0.9 * towards)
    if name == "color":
        return enhance.adjust_saturation_with_gray_subtraction(images, 1 + 0.9 * towards)
    if name == "contrast":
        return enhance.adjust_contrast_with_mean_subtraction(images, 1 + 0.9 * towards)
    if name == "sharpness":
        return enhance.sharpness(images, 1 + 0.9 * towards)
    if name == "posterize":
        return enhance.posterize(images, torch.full_like(towards, round(8 - 4 * strength), dtype=torch.int64))
    if name == "solarize":
        return enhance.solarize(images, torch.full_like(towards, (1 - strength) * 256 / 255))
    if name == "autocontrast":
        low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
        return torch.where(high > low, (images - low) / (high - low), images)
    return enhance.equalize(images)
