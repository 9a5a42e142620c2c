"""Super-classes with one sub-class held out of training, as a test of generalisation to unseen sub-classes."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from opteq.common.errors import UserError
from opteq.data.dataset import Labels, Pixels
from opteq.data.readers.source import Source, Stream, reason

TABLE = "superclasses.csv"
HEADER = "expected a first line class,superclass and then a line for every class folder"
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


def read_table(path: Path, classes: Sequence[str]) -> tuple[tuple[str, ...], dict[int, int], dict[int, int]]:
    """The super-classes of a folder's ``classes``, from a table with the columns ``class`` and ``superclass``.

    Returns:
        The names of the super-classes in alphabetical order, and two maps from labels of classes to labels of
        super-classes: of all classes but the last of each super-class, and of these last ones.
    """
    owner = _owner_by_name(path)
    for name in classes:
        if name not in owner:
            raise UserError(f"{path}: has no line for the class {name!r}; add one with its super-class")
    for name in owner:
        if name not in classes:
            raise UserError(f"{path}: there are no images of the class {name!r}; add them or remove its line")
    names = tuple(sorted(set(owner.values())))
    known: dict[int, int] = {}
    held_out: dict[int, int] = {}
    for number, whose in enumerate(names):
        parts = [label for label, name in enumerate(classes) if owner[name] == whose]
        if len(parts) < 2:
            raise UserError(
                f"{path}: the super-class {whose!r} has the class {classes[parts[0]]!r} alone; "
                "it needs two at least, since one is held out"
            )
        *first, last = sorted(parts, key=lambda label: classes[label])
        known |= dict.fromkeys(first, number)
        held_out[last] = number
    return names, known, held_out


def _owner_by_name(path: Path) -> dict[str, str]:
    """The super-class of each class, as the file says."""
    owner: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file, skipinitialspace=True)
            if not {"class", "superclass"} <= set(table.fieldnames or ()):
                raise UserError(f"{path}: its first line is {','.join(table.fieldnames or ()) or 'empty'}; {HEADER}")
            for row in table:
                name, whose = ((row[column] or "").strip() for column in ("class", "superclass"))
                if not name or not whose:
                    raise UserError(f"{path}: line {table.line_num} has no class or no super-class; {HEADER}")
                if name in owner:
                    raise UserError(f"{path}: line {table.line_num} names the class {name!r} again; give it one line")
                owner[name] = whose
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file, the table of super-classes; {HEADER}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as a table ({reason(error)}); {HEADER}") from error
    return owner
