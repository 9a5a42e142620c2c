"""From picture files to bytes ``(n, 3, H, W)``, on all cores."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from opteq.common.errors import UserError, needs_extra
from opteq.data.dataset import Pixels
from opteq.data.readers.source import reason

if TYPE_CHECKING:
    from PIL.Image import Image

PIECE = 4 << 20  # bytes decoded at a time: enough to hide the hand-over, few enough to keep memory small
SMALL = 96 * 96  # pixels; below, opening a picture costs more than decoding it, and only decoding runs in parallel


def decode_all(
    paths: Sequence[Path], first: Path, shape: tuple[int, int, int], image_size: int | None
) -> Iterator[Pixels]:
    """The pictures in order, in pieces. Each has to have ``shape``, the one of the picture ``first``.

    Threads, not processes: Pillow decodes and resizes without holding Python's lock, threads need nothing of the
    caller's main module, and they cannot upset a CUDA context. Small pictures go through one thread, because opening
    them holds the lock and a second thread only makes them wait (measured on 20,000 JPEGs of 32x32, 2 cores: 3.5 s
    with one thread, 4.4 s with two).
    """
    _, height, width = shape
    workers = 1 if height * width <= SMALL and image_size is None else os.cpu_count() or 1

    def decode(path: Path) -> Pixels:
        picture = decode_one(path, image_size)
        if picture.shape != shape:
            _, other_height, other_width = picture.shape
            raise UserError(
                f"{path} is {other_width}x{other_height} pixels but {first} is {width}x{height}; "
                "give image_size to bring all pictures to one size"
            )
        return picture

    return in_pieces(paths, shape, decode, workers)


def in_pieces(
    paths: Sequence[Path], shape: tuple[int, ...], decode: Callable[[Path], Pixels], workers: int
) -> Iterator[Pixels]:
    """What ``decode`` makes of every path, each of ``shape``, in order and stacked to pieces, by so many threads."""
    count = max(1, PIECE // math.prod(shape))

    def piece_at(start: int) -> Pixels:
        piece = np.empty((min(count, len(paths) - start), *shape), dtype=np.uint8)
        for row, path in enumerate(paths[start : start + count]):
            piece[row] = decode(path)
        return piece

    pool = ThreadPoolExecutor(workers)
    ahead: deque[Future[Pixels]] = deque()
    try:
        for start in range(0, len(paths), count):
            ahead.append(pool.submit(piece_at, start))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def decode_one(path: Path, image_size: int | None) -> Pixels:
    """One picture as ``(3, H, W)`` bytes, upright, in RGB, brought to ``image_size`` if one is given."""
    with needs_extra("train"):  # imported here: a process that reads the cache never decodes
        from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            # Cameras store how they were held instead of turning the pixels. Most pictures say nothing about it, and
            # asking every one costs a copy.
            tells = "exif" in file.info or file.format == "TIFF"
            picture = _to_rgb(ImageOps.exif_transpose(file) if tells else file)
            if image_size is not None:
                picture = resize_and_crop(picture, image_size)
            pixels: Pixels = np.asarray(picture, dtype=np.uint8).transpose(2, 0, 1)
            return pixels
    except Exception as error:  # decoders raise whatever they like: OSError, SyntaxError, ValueError, struct.error
        raise UserError(f"{path}: cannot read this picture ({reason(error)}); replace or delete it") from error


def _to_rgb(picture: Image) -> Image:
    """RGB of any mode: grey is repeated, transparency is dropped, 16 bits are cut to 8."""
    from PIL import Image

    if picture.mode == "RGB":
        return picture
    if picture.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion would clip it to white
        return Image.fromarray((np.asarray(picture).astype(np.int64) >> 8).astype(np.uint8)).convert("RGB")
    if picture.mode == "F":
        raise ValueError("its pixels are floating-point numbers")
    if "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return picture.convert("RGB")


def resize_and_crop(picture: Image, size: int) -> Image:
    """The shorter side becomes ``size`` (bilinear, antialiased), then the middle ``size`` x ``size`` is kept."""
    from PIL import Image

    width, height = picture.size
    shorter = min(width, height)
    if shorter != size:
        width, height = (max(size, round(side * size / shorter)) for side in (width, height))
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return picture.crop((left, top, left + size, top + size))
