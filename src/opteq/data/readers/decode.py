"""Decode image files into uint8 arrays ``(n, 3, h, w)`` with several threads."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

import numpy as np

from opteq.common.errors import UserError, needs_extra
from opteq.data.dataset import Pixels
from opteq.data.readers.files import Files
from opteq.data.readers.source import reason

if TYPE_CHECKING:
    from PIL.Image import Image

Given = TypeVar("Given")

PIECE = 4 << 20  # bytes per chunk: enough to hide the overhead of a thread, few enough to keep memory small
SMALL = 96 * 96  # pixels; below, opening an image costs more than decoding it, and only decoding runs in parallel


@dataclass(frozen=True)
class Decoder:
    """Makes pixels of image files: uint8 ``shape``, which is that of the image called ``first``."""

    shape: tuple[int, int, int]
    first: str
    image_size: int | None

    @classmethod
    def like(cls, files: Files, row: int, image_size: int | None) -> Decoder:
        """A decoder for images of the shape of image ``row``."""
        channels, height, width = decode_one(files.open(row), image_size, files.name(row)).shape
        return cls((channels, height, width), files.name(row), image_size)

    def __call__(self, files: Files, row: int) -> Pixels:
        """The pixels of image ``row``."""
        image = decode_one(files.open(row), self.image_size, files.name(row))
        if image.shape != self.shape:
            _, height, width = image.shape
            raise UserError(
                f"{files.name(row)} is {width}x{height} pixels but {self.first} is {self.shape[2]}x{self.shape[1]}; "
                "give image_size to bring all images to one size"
            )
        return image

    def all(self, files: Files) -> Iterator[Pixels]:
        """The images in order, in chunks.

        Threads and not processes: Pillow releases the GIL while it decodes and resizes, threads do not import the
        caller's main module, and they do not disturb a CUDA context. Small images use one thread, since opening them
        holds the GIL (20,000 JPEGs of 32x32 on 2 cores: 3.5 s with one thread, 4.4 s with two).
        """
        small = self.shape[1] * self.shape[2] <= SMALL and self.image_size is None
        return in_pieces(
            range(len(files)), self.shape, lambda row: self(files, row), 1 if small else os.cpu_count() or 1
        )


def in_pieces(
    paths: Sequence[Given], shape: tuple[int, ...], decode: Callable[[Given], Pixels], workers: int
) -> Iterator[Pixels]:
    """``decode`` of every path (or row), in order, stacked to chunks, with ``workers`` threads."""
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


def decode_one(source: Path | IO[bytes], image_size: int | None, name: str | None = None) -> Pixels:
    """One image as uint8 ``(3, h, w)``: EXIF orientation applied, RGB, resized to ``image_size`` if given."""
    image = open_image(source, name)
    if image_size is not None:
        image = resize_and_crop(image, image_size, image_size)
    pixels: Pixels = np.asarray(image, dtype=np.uint8).transpose(2, 0, 1)
    return pixels


def open_image(source: Path | IO[bytes], name: str | None = None) -> Image:
    """An image file as RGB, upright. ``name`` is what errors call it; the path by default."""
    with needs_extra("train"):  # imported here: a process that reads the cache never decodes
        from PIL import Image, ImageOps

    try:
        with Image.open(source) as file:
            # exif_transpose copies the image, so it is called only where an orientation may be stored.
            tells = "exif" in file.info or file.format == "TIFF"
            image = to_rgb(ImageOps.exif_transpose(file) if tells else file)
            image.load()
            return image
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error and others
        raise UserError(f"{name or source}: cannot read this image ({reason(error)}); replace or delete it") from error


def to_rgb(image: Image) -> Image:
    """Convert to RGB: grey is repeated, transparent pixels show white below them, 16 bits are reduced to 8."""
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion would clip it to white
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        image = image.convert("RGBA")
        # The colors of transparent pixels are arbitrary: without this they would appear in the image.
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def resize_and_crop(image: Image, height: int, width: int) -> Image:
    """Resize to cover ``height`` x ``width`` (bilinear, antialiased), then crop the centre of that size."""
    from PIL import Image

    scale = max(height / image.height, width / image.width)
    if scale != 1:
        size = max(width, round(image.width * scale)), max(height, round(image.height * scale))
        image = image.resize(size, Image.Resampling.BILINEAR)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
