"""``load``: every data set by its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from opteq.common.errors import UserError, unknown_name
from opteq.data.cache import load_cached
from opteq.data.dataset import Dataset, Pixels, Split, channel_statistics
from opteq.data.paths import cache_folder
from opteq.data.readers.cifar import find_cifar
from opteq.data.readers.cityscapes import find_cityscapes
from opteq.data.readers.digits import load_digits
from opteq.data.readers.folder import find_folder, find_superclasses, list_splits
from opteq.data.readers.idx import find_fashion_mnist
from opteq.data.readers.source import FoundDataset, Source, Stream
from opteq.data.streaming import stream_dataset

_ARRAYS: dict[str, Callable[[Path | None], FoundDataset]] = {
    "fashion-mnist": find_fashion_mnist,
    "cifar10": partial(find_cifar, "cifar10"),
    "cifar100": partial(find_cifar, "cifar100"),
    "cifar100-superclasses": partial(find_cifar, "cifar100-superclasses"),
}


def names() -> list[str]:
    """The names that :func:`load` takes."""
    return ["digits", *_ARRAYS, "folder", "folder-superclasses", "cityscapes"]


def load(
    name: str,
    root: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    image_size: int | None = None,
    test_only: bool = False,
    stream: bool = False,
    workers: int | None = None,
) -> Dataset:
    """Load a data set by name. Images are decoded once into a cache, which is then memory-mapped, or streamed.

    - ``digits``: 1797 grey 8x8 images inside this package; a fixed, stratified fifth is the test split. No file is
      needed.
    - ``fashion-mnist``: the four idx files (``.gz`` or not), in ``root`` or where Debian's package puts them.
    - ``cifar10``, ``cifar100``: ``root`` is the official archive, its unpacked folder, or the folder that contains
      either. The pickles of the python version are read without executing anything in them.
    - ``cifar100-superclasses``: the same archive with its 20 super-classes as labels. The last of the five classes of
      each is left out of training and test; its test images are ``unseen``.
    - ``folder``: ``root`` has ``train/<class>/*`` and ``test/<class>/*`` (or ``val``). All images become RGB. In place
      of class folders there may be uncompressed tar archives, with a class as a folder in them, as ``<key>.cls`` beside
      ``<key>.jpg``, or as the archive's name.
    - ``folder-superclasses``: the same with a table ``superclasses.csv`` in ``root`` (columns ``class`` and
      ``superclass``), whose super-classes are the labels. The last class of each, by the alphabet, is left out of
      training and test; its test images are ``unseen``.
    - ``cityscapes``: ``root`` has ``leftImg8bit`` and ``gtFine``, of which ``train`` and ``val`` are used. Labels are
      label maps with 19 classes, and 255 for pixels without one.

    With ``stream`` the images of a folder or of archives are decoded when they are needed, by ``workers`` processes (by
    default the number of cores, at most 8), and there is no cache: for data sets that are too large to be decoded at
    once. Mean and std are then those of 1024 images.

    With ``test_only`` a ``folder`` may lack ``train``: its training split then holds one test image per class.
    ``image_size`` resizes the shorter side to that size and crops the centre square (Cityscapes is not cropped). A
    folder with images of several sizes needs it. ``cache`` is the folder of decoded images: by default ``OPTEQ_CACHE``,
    or ``opteq`` in the platform's folder for caches. It can be deleted at any time. A missing, damaged or unexpected
    file raises :class:`~opteq.common.errors.UserError` with its path and what to do.

    >>> digits = load("digits")
    >>> len(digits.train), len(digits.test), tuple(digits.train.images.shape[1:])
    (1442, 355, (1, 8, 8))
    """
    if name not in names():
        raise unknown_name("data set", name, names())
    if image_size is not None and (isinstance(image_size, bool) or not isinstance(image_size, int) or image_size < 1):
        raise UserError(f"image_size should be a positive integer; got {image_size!r}")
    place = None if root is None else Path(root).expanduser()
    _check_streaming(name, stream, workers, cache)
    if name == "digits":
        if place is not None:
            raise UserError(f"data set 'digits' is inside this package and takes no root; got {str(root)!r}")
        return _resized_digits(image_size)
    folder = (cache_folder() if cache is None else Path(cache).expanduser()) / "data"
    try:
        if stream:
            return stream_dataset(name, list_splits(name, place, test_only), image_size, workers)
        return load_cached(name, _find(name, place, image_size, test_only), folder, image_size)
    except OSError as error:  # a folder without read permission, a file that was removed meanwhile
        raise UserError(
            f"{error.filename or place}: cannot be read ({error.strerror or error}); check its permissions"
        ) from error


def _check_streaming(name: str, stream: bool, workers: int | None, cache: object) -> None:
    if not stream:
        if workers is not None:
            raise UserError(f"workers = {workers} has no effect without stream = true: the cache is filled by threads")
        return
    if not name.startswith("folder"):
        raise UserError(f"stream = true is for folders of images; {name!r} is small: leave it out")
    if cache is not None:
        raise UserError(f"cache = {str(cache)!r} has no effect with stream = true; leave one of them out")
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 0):
        raise UserError(f"workers should be a number of processes, 0 for none; got {workers!r}")


def _find(name: str, root: Path | None, image_size: int | None, test_only: bool) -> FoundDataset:
    if name == "folder":
        return find_folder(root, image_size, test_only)
    if name == "folder-superclasses":
        return find_superclasses(root, image_size, test_only)
    if name == "cityscapes":
        return find_cityscapes(root, image_size)
    dataset = _ARRAYS[name](root)
    if image_size is None:
        return dataset
    return replace(dataset, read=partial(_resized_source, dataset.read, image_size))


def _resized_digits(size: int | None) -> Dataset:
    dataset = load_digits()
    if size is None:
        return dataset
    splits = dataset.train, dataset.test
    larger = [resize(split.images[torch.arange(len(split))].numpy(), size) for split in splits]
    train, test = (Split(torch.from_numpy(one), split.labels) for one, split in zip(larger, splits, strict=True))
    mean, std = channel_statistics(larger[:1], channels=1)
    return replace(dataset, train=train, test=test, mean=mean, std=std)


def _resized_source(read: Callable[[], Source], size: int) -> Source:
    source = read()

    def resized_stream(stream: Stream) -> Stream:
        return Stream(stream.labels, (stream.shape[0], size, size), lambda: (resize(p, size) for p in stream.pieces()))

    return Source(source.classes, **{split: resized_stream(stream) for split, stream in source.splits().items()})


def resize(images: Pixels, size: int, chunk: int = 4096) -> Pixels:
    """Square images ``(N, C, H, H)`` resized to ``size`` (bilinear, antialiased), rounded to uint8."""
    result = np.empty((*images.shape[:2], size, size), dtype=np.uint8)
    for start in range(0, len(images), chunk):  # float32, one chunk at a time
        piece = torch.tensor(images[start : start + chunk]).float()
        larger = F.interpolate(piece, size=(size, size), mode="bilinear", antialias=True)
        result[start : start + chunk] = larger.round_().clamp_(0, 255).to(torch.uint8).numpy()
    return result
