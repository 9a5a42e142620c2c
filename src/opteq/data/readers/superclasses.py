"""Super-classes with one sub-class held out of training, as a test of generalisation to unseen sub-classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from opteq.common.errors import UserError
from opteq.data.dataset import Labels, Pixels
from opteq.data.readers.source import Source, Stream

PARTS = 5
"""Sub-classes of each of CIFAR-100's super-classes."""


def hold_out(
    classes: tuple[str, ...], train: tuple[Stream, Labels], test: tuple[Stream, Labels], place: Path
) -> Source:
    """The GEQ paper's test on unseen sub-classes: the last sub-class of each class is held out of training.

    Sub-classes are ordered by their labels, which for CIFAR-100 is the alphabet. Training and test images are those of
    the first four; ``unseen`` has the test images of the fifth. (The paper says "samples from unseen sub-classes"
    without naming the split; test images keep the two accuracies comparable.)

    Args:
        classes: names of the classes.
        train: the training split, and the sub-class label of each image.
        test: the test split in the same way.
        place: the source of both, for messages.
    """
    owner = _owners(train, place)
    last = []
    for number, name in enumerate(classes):
        parts = [part for part, whose in owner.items() if whose == number]
        if len(parts) != PARTS:
            raise UserError(
                f"{place}: the super-class {name!r} has {len(parts)} classes where CIFAR-100 has {PARTS}; "
                "this is another data set or a damaged file"
            )
        last.append(max(parts))
    return Source(
        classes,
        train=_chosen(train[0], ~np.isin(train[1], last)),
        test=_chosen(test[0], ~np.isin(test[1], last)),
        unseen=_chosen(test[0], np.isin(test[1], last)),
    )


def _owners(split: tuple[Stream, Labels], place: Path) -> dict[int, int]:
    """The class of each sub-class."""
    owner: dict[int, int] = {}
    for whose, part in np.unique(np.stack((split[0].labels, split[1]), axis=1), axis=0).tolist():
        if owner.setdefault(part, whose) != whose:
            raise UserError(
                f"{place}: the class {part} belongs to the super-classes {owner[part]} and {whose}; "
                "this is another data set or a damaged file"
            )
    return owner


def _chosen(stream: Stream, where: npt.NDArray[np.bool_]) -> Stream:
    """The images of a split where the mask ``where`` is true."""

    def pieces() -> Iterator[Pixels]:
        start = 0
        for piece in stream.pieces():
            yield piece[where[start : start + len(piece)]]
            start += len(piece)

    return Stream(stream.labels[where], stream.shape, pieces)
