"""Classes made of parts, one of which training does not see: does a network recognise kinds that it never saw?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from opteq.common.errors import UserError
from opteq.data.dataset import Labels, Pixels
from opteq.data.readers.source import Source, Stream

PARTS = 5
"""Classes in each of CIFAR-100's super-classes."""


def hold_out(
    classes: tuple[str, ...], train: tuple[Stream, Labels], test: tuple[Stream, Labels], place: Path
) -> Source:
    """The GEQ paper's test on unseen kinds: of each class the last part is kept from training.

    Parts are counted in the order of their labels, which for CIFAR-100 is that of the alphabet. Training and test
    pictures are those of the first four parts; ``unseen`` has the fifth part's pictures of the test split. (The paper
    says "samples from unseen sub-classes" and not of which split; test pictures keep the two accuracies comparable.)

    Args:
        classes: names of the classes.
        train: the training split as it was read, and for each picture the label of its part.
        test: the test split in the same way.
        place: where both came from, for messages.
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
    """For each part the class that it belongs to."""
    owner: dict[int, int] = {}
    for whose, part in np.unique(np.stack((split[0].labels, split[1]), axis=1), axis=0).tolist():
        if owner.setdefault(part, whose) != whose:
            raise UserError(
                f"{place}: the class {part} belongs to the super-classes {owner[part]} and {whose}; "
                "this is another data set or a damaged file"
            )
    return owner


def _chosen(stream: Stream, where: npt.NDArray[np.bool_]) -> Stream:
    """The pictures of a split at which ``where`` holds."""

    def pieces() -> Iterator[Pixels]:
        start = 0
        for piece in stream.pieces():
            yield piece[where[start : start + len(piece)]]
            start += len(piece)

    return Stream(stream.labels[where], stream.shape, pieces)
