"""A tiny Cityscapes tree: streets below, sky above, and one car."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

ROAD, SKY, CAR, EGO = 7, 23, 26, 1  # official identifiers; the last one is not judged
COLOURS = {ROAD: (120, 60, 120), SKY: (70, 130, 180), CAR: (20, 20, 200), EGO: (90, 90, 90)}


def cityscapes(root: Path, train: int = 6, val: int = 2, height: int = 32, width: int = 64) -> Path:
    """``leftImg8bit`` and ``gtFine`` with so many images, in two cities a split."""
    random = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for index in range(count):
            city = f"city{index % 2}"
            identifiers = np.full((height, width), ROAD, dtype=np.uint8)
            identifiers[: int(random.integers(height // 4, height // 2))] = SKY
            left = int(random.integers(0, width - 12))
            identifiers[height // 2 : height // 2 + 8, left : left + 12] = CAR
            identifiers[-4:] = EGO
            pixels = np.zeros((height, width, 3), dtype=np.int64)
            for identifier, colour in COLOURS.items():
                pixels[identifiers == identifier] = colour
            pixels += random.integers(-10, 11, pixels.shape)
            for folder, kind, array in (
                ("leftImg8bit", "leftImg8bit", pixels.clip(0, 255).astype(np.uint8)),
                ("gtFine", "gtFine_labelIds", identifiers),
            ):
                place = root / folder / split / city
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(place / f"{city}_{index:06d}_000019_{kind}.png")
    return root


SMALL = [
    "model.options.extractor_width=4",
    "model.options.extractor_blocks=[1, 1]",
    "model.options.channels=8",
    "model.options.hidden=[8, 8]",
    "model.options.head_width=8",
    "augment.crop_height=24",
    "augment.crop_width=32",
    "augment.scale_min=0.7",
    "augment.scale_max=1.5",
    "train.epochs=2",
    "train.batch_size=4",
    "train.test_batch_size=2",
    "train.device=cpu",
    "train.drop_last=false",
    "optimizer.lr=0.05",
]
"""Overrides that make of the recipe `opteq-cityscapes` one that trains for a moment."""


def settings(root: Path, *more: str) -> list[str]:
    """:data:`SMALL` on :func:`cityscapes`."""
    return [*SMALL, f"data.root={root}", f"data.cache={root / 'cache'}", *more]
