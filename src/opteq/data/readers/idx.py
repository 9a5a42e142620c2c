"""Fashion-MNIST, in the idx files of its authors, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np

from opteq.common.errors import UserError
from opteq.data.dataset import Pixels
from opteq.data.paths import data_folders
from opteq.data.readers.archive import LARGEST
from opteq.data.readers.source import FoundDataset, Source, reason, whole

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
STEMS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
REMEDY = (
    "install Debian's package dataset-fashion-mnist, or fetch the four idx files and give their folder as root "
    "(--set data.root=PATH)"
)


def find_fashion_mnist(root: Path | None) -> FoundDataset:
    """The four files, in ``root`` or in one of the usual folders."""
    folders = data_folders("fashion-mnist") if root is None else [root]
    for folder in folders:
        files = [_present(folder, stem) for stem in STEMS]
        names = tuple(name for name in files if name is not None)
        if len(names) == len(STEMS):
            return FoundDataset(folder, names, partial(_read, folder, names))
        if names:  # some of the four: a download that was not finished
            missing = STEMS[files.index(None)]
            raise UserError(f"{folder / missing}: missing (plain or .gz), although others are there; {REMEDY}")
    if root is not None:
        raise UserError(f"{root / STEMS[0]}: missing (plain or .gz); {REMEDY}")
    raise UserError(f"Fashion-MNIST is in none of {', '.join(map(str, folders))}; {REMEDY}")


def _present(folder: Path, stem: str) -> str | None:
    return next((name for name in (stem, f"{stem}.gz") if (folder / name).is_file()), None)


def _read(folder: Path, names: tuple[str, ...]) -> Source:
    train_images, train_labels, test_images, test_labels = (
        read_idx(folder / name, dimensions) for name, dimensions in zip(names, (3, 1, 3, 1), strict=True)
    )
    return Source(
        CLASSES,
        whole(train_images[:, None], train_labels.astype(np.int64), folder / names[0], len(CLASSES)),
        whole(test_images[:, None], test_labels.astype(np.int64), folder / names[2], len(CLASSES)),
    )


def read_idx(path: Path, dimensions: int) -> Pixels:
    """The array in an idx file of bytes.

    The format: two zeros, the type (8 for uint8), the number of dimensions; each dimension as a big-endian 32-bit
    integer; the data.
    """
    try:
        if path.suffix != ".gz":
            content = path.read_bytes()
        else:
            with gzip.open(path) as file:
                content = file.read(LARGEST + 1)
            if len(content) > LARGEST:
                raise UserError(f"{path}: refused, it unpacks to more than {LARGEST} bytes; {REMEDY}")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({reason(error)}); {REMEDY}") from error
    start = 4 + 4 * dimensions
    if len(content) < start or content[:4] != bytes((0, 0, 8, dimensions)):
        raise UserError(f"{path}: not an idx file of bytes with {dimensions} dimensions; {REMEDY}")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    if len(content) - start != math.prod(shape):
        raise UserError(
            f"{path}: truncated or wrong, {len(content) - start} bytes of data where its head says {math.prod(shape)}; "
            f"{REMEDY}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
