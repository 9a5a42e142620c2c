"""Cityscapes: semantic segmentation of street scenes, from the folders of the official archives."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from opteq.common.errors import UserError
from opteq.data.dataset import IGNORE_INDEX, Pixels
from opteq.data.paths import data_folders
from opteq.data.readers.decode import decode_one, in_pieces
from opteq.data.readers.folder import visible
from opteq.data.readers.source import FoundDataset, Source, Stream, reason

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE, LABELS = "_leftImg8bit.png", "_gtFine_labelIds.png"
LAYOUT = (
    f"expected leftImg8bit/train/<city>/*{IMAGE} with gtFine/train/<city>/*{LABELS}, and the same in val; "
    "unpack leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip there"
)
CLASSES: dict[int, str] = {  # official ids of the 19 evaluated classes, in the official order
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole", 19: "traffic light",
    20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky", 24: "person", 25: "rider", 26: "car", 27: "truck",
    28: "bus", 31: "train", 32: "motorcycle", 33: "bicycle",
}  # fmt: skip
LARGEST_ID = 33

_TO_CLASS = np.full(256, IGNORE_INDEX, dtype=np.uint8)
_TO_CLASS[list(CLASSES)] = np.arange(len(CLASSES))


@dataclass(frozen=True)
class _Pair:
    image: str  # relative to the root
    labels: str


def find_cityscapes(root: Path | None, image_size: int | None) -> FoundDataset:
    """List the images of ``train`` and ``val`` and their label maps, without opening them."""
    places = data_folders("cityscapes") if root is None else [root]
    place = next((place for place in places if (place / "leftImg8bit").is_dir()), None)
    if place is None:
        searched = ", ".join(str(place) for place in places)
        raise UserError(f"{searched}: no folder leftImg8bit there (give another root by data.root); {LAYOUT}")
    train, val = (_list(place, split) for split in ("train", "val"))
    files = tuple(name for pair in (*train, *val) for name in (pair.image, pair.labels))
    return FoundDataset(place, files, partial(_read, place, train, val, image_size))


def _list(root: Path, split: str) -> list[_Pair]:
    folder = root / "leftImg8bit" / split
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; {LAYOUT}")
    pairs = []
    for city in sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and visible(entry.name)):
        for name in sorted(entry.name for entry in os.scandir(folder / city) if entry.name.endswith(IMAGE)):
            if not visible(name):
                continue
            labels = f"gtFine/{split}/{city}/{name.removesuffix(IMAGE)}{LABELS}"
            if not (root / labels).is_file():
                raise UserError(
                    f"{root / labels}: missing, the labels of {folder / city / name}; "
                    "unpack gtFine_trainvaltest.zip there again, or delete the image"
                )
            pairs.append(_Pair(f"leftImg8bit/{split}/{city}/{name}", labels))
    if not pairs:
        raise UserError(f"{folder}: has no images <city>/*{IMAGE}; {LAYOUT}")
    return pairs


def _read(root: Path, train: list[_Pair], val: list[_Pair], image_size: int | None) -> Source:
    first = root / train[0].image
    _, height, width = _image(first, image_size).shape
    workers = os.cpu_count() or 1

    def checked(pixels: Pixels, path: Path) -> Pixels:
        if pixels.shape[-2:] != (height, width):
            size = f"{pixels.shape[-1]}x{pixels.shape[-2]}"
            raise UserError(f"{path} is {size} pixels but {first} is {width}x{height}; fetch the archives again")
        return pixels

    def stream(pairs: list[_Pair]) -> Stream:
        images = [root / pair.image for pair in pairs]
        labels = [root / pair.labels for pair in pairs]
        shape = (3, height, width)
        return Stream(
            np.arange(len(pairs)),
            shape,
            lambda: in_pieces(images, shape, lambda path: checked(_image(path, image_size), path), workers),
            lambda: in_pieces(labels, shape[1:], lambda path: checked(_labels(path, image_size), path), workers),
        )

    return Source(tuple(CLASSES.values()), stream(train), stream(val))


def _image(path: Path, image_size: int | None) -> Pixels:
    pixels = decode_one(path, None)
    if image_size is None:
        return pixels
    from PIL import Image

    whole = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    smaller: Pixels = np.asarray(_scaled(whole, image_size, Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    return smaller


def _labels(path: Path, image_size: int | None) -> Pixels:
    """The label map ``(h, w)``, with 255 for pixels that the official evaluation ignores."""
    from PIL import Image

    try:
        with Image.open(path) as file:
            if file.mode != "L":
                raise ValueError(f"its mode is {file.mode}, not 8-bit grey")
            # Ids cannot be interpolated: the nearest one is taken.
            grey = file if image_size is None else _scaled(file, image_size, Image.Resampling.NEAREST)
            identifiers: Pixels = np.asarray(grey, dtype=np.uint8)
            largest = int(identifiers.max())
            if largest > LARGEST_ID:
                raise ValueError(f"it has the identifier {largest}, and there are 0 to {LARGEST_ID}")
    except Exception as error:  # decoders raise many kinds of errors
        raise UserError(
            f"{path}: not a label map ({reason(error)}); take *{LABELS} of gtFine_trainvaltest.zip"
        ) from error
    classes: Pixels = _TO_CLASS[identifiers]
    return classes


def _scaled(image: Image, size: int, how: int) -> Image:
    """Resize the shorter side to ``size``, without a crop."""
    width, height = image.size
    shorter = min(width, height)
    return image.resize((round(width * size / shorter), round(height * size / shorter)), how)
