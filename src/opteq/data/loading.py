"""One function for every data set."""

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
from opteq.data.cache import cached
from opteq.data.dataset import Dataset, Pixels, Split, colours
from opteq.data.paths import cache_folder
from opteq.data.readers.cifar import find_cifar
from opteq.data.readers.cityscapes import find_cityscapes
from opteq.data.readers.digits import load_digits
from opteq.data.readers.folder import find_folder
from opteq.data.readers.idx import find_fashion_mnist
from opteq.data.readers.source import Found, Source, Stream

_ARRAYS: dict[str, Callable[[Path | None], Found]] = {
    "fashion-mnist": find_fashion_mnist,
    "cifar10": partial(find_cifar, "cifar10"),
    "cifar100": partial(find_cifar, "cifar100"),
    "cifar100-superclasses": partial(find_cifar, "cifar100-superclasses"),
}


def names() -> list[str]:
    """The names that :func:`load` takes."""
    return ["digits", *_ARRAYS, "folder", "cityscapes"]


def load(
    name: str,
    root: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    image_size: int | None = None,
) -> Dataset:
    """A data set by name, decoded into bytes once and from then on mapped from a cache.

    - ``digits``: 1797 grey 8x8 images inside this package; a fixed, stratified fifth is held out. No file is needed.
    - ``fashion-mnist``: the four idx files (``.gz`` or not), in ``root`` or where Debian's package puts them.
    - ``cifar10``, ``cifar100``: ``root`` is the official archive, its unpacked folder, or the folder that either is in.
      The python version's pickles are read without running anything in them.
    - ``cifar100-superclasses``: the same archive with its 20 super-classes for labels. Of the five classes of each, the
      last is left out of training and test; its test pictures are ``unseen``.
    - ``folder``: ``root`` has ``train/<class>/*`` and ``test/<class>/*`` (or ``val``). All pictures become RGB.
    - ``cityscapes``: ``root`` has ``leftImg8bit`` and ``gtFine``, of which ``train`` and ``val`` are used. Labels are
      maps: the class of every pixel among 19, or 255 for none.

    ``image_size`` brings pictures to that size: the shorter side is resized, the middle square is kept (of Cityscapes
    all is kept). A folder of pictures of several sizes needs it. ``cache`` is the folder for decoded pictures: by
    default ``OPTEQ_CACHE``, or ``opteq`` among the platform's caches. It can be deleted at any time. A file that is
    missing, damaged or something else raises :class:`~opteq.common.errors.UserError`, which says where it is and what
    to do.

    >>> digits = load("digits")
    >>> len(digits.train), len(digits.test), tuple(digits.train.images.shape[1:])
    (1442, 355, (1, 8, 8))
    """
    if name not in names():
        raise unknown_name("data set", name, names())
    if image_size is not None and (isinstance(image_size, bool) or not isinstance(image_size, int) or image_size < 1):
        raise UserError(f"image_size should be a whole number of pixels, at least 1; got {image_size!r}")
    place = None if root is None else Path(root).expanduser()
    if name == "digits":
        if place is not None:
            raise UserError(f"data set 'digits' is inside this package and takes no root; got {str(root)!r}")
        return _resized_digits(image_size)
    folder = (cache_folder() if cache is None else Path(cache).expanduser()) / "data"
    try:
        return cached(name, _find(name, place, image_size), folder, image_size)
    except OSError as error:  # a folder that may not be listed, a file that went away meanwhile
        raise UserError(f"{error.filename or place}: cannot be read ({error.strerror or error}); mend that") from error


def _find(name: str, root: Path | None, image_size: int | None) -> Found:
    if name == "folder":
        return find_folder(root, image_size)
    if name == "cityscapes":
        return find_cityscapes(root, image_size)
    found = _ARRAYS[name](root)
    if image_size is None:
        return found
    return replace(found, read=partial(_resized_source, found.read, image_size))


def _resized_digits(size: int | None) -> Dataset:
    dataset = load_digits()
    if size is None:
        return dataset
    train, test = (
        Split(torch.from_numpy(resized(split.images.numpy(), size)), split.labels)
        for split in (dataset.train, dataset.test)
    )
    mean, std = colours([train.images.numpy()], channels=1)
    return replace(dataset, train=train, test=test, mean=mean, std=std)


def _resized_source(read: Callable[[], Source], size: int) -> Source:
    source = read()

    def resized_stream(stream: Stream) -> Stream:
        return Stream(stream.labels, (stream.shape[0], size, size), lambda: (resized(p, size) for p in stream.pieces()))

    return Source(source.classes, **{split: resized_stream(stream) for split, stream in source.splits().items()})


def resized(images: Pixels, size: int, at_once: int = 4096) -> Pixels:
    """Square pictures ``(N, C, H, H)`` brought to ``size`` (bilinear, antialiased), rounded to bytes."""
    result = np.empty((*images.shape[:2], size, size), dtype=np.uint8)
    for start in range(0, len(images), at_once):  # in floats a piece at a time
        piece = torch.tensor(images[start : start + at_once]).float()
        larger = F.interpolate(piece, size=(size, size), mode="bilinear", antialias=True)
        result[start : start + at_once] = larger.round_().clamp_(0, 255).to(torch.uint8).numpy()
    return result
