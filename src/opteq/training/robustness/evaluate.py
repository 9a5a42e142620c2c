"""One evaluation of robustness: corruptions, curves or both, recorded beside the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opteq.common.errors import UserError
from opteq.data import Split
from opteq.data.corruptions.published import PublishedCorruptions
from opteq.training.open_run import LoadedRun, open_run
from opteq.training.recipe.sections import fraction
from opteq.training.robustness.corrupted import (
    check_published,
    measure_corruptions,
    relative_errors,
    select_names,
    source_of,
)
from opteq.training.robustness.curves import EPSILON, measure_curves
from opteq.training.robustness.record import FILE, keep_earlier, markdown, read_record, read_reference


def evaluate_robustness(
    run: str | Path,
    corruptions: bool = True,
    curves: bool = False,
    *,
    only: Sequence[str] = (),
    reference: str | Path | None = None,
    images: int | None = None,
    seed: int = 0,
    attack: float | str | None = None,
    attack_steps: int | None = None,
    say: Callable[[str], None] = lambda _: None,
    tol: float | None = None,
    max_steps: int | None = None,
    device: str = "auto",
    precision: str | None = None,
    root: str | None = None,
    corruption_files: str | Path | None = None,
    batch_size: int | None = None,
) -> dict[str, Any]:
    """Measure a finished run on corrupted and attacked images; writes ``robustness.json`` and ``.md`` beside it.

    A part that is not asked for is kept as an earlier evaluation left it; so are corruptions that ``only`` leaves out,
    if they were measured in the same way.

    Args:
        run: the run's folder.
        corruptions: measure the 19 corruptions at 5 severities, see :func:`measure_corruptions`.
        curves: measure accuracy against radius and steps of attacks, and certified accuracy: :func:`measure_curves`.
        only: names of corruptions; all by default.
        reference: folder of a run that was measured in the same way, a ResNet-18 for instance: errors are also
            given relative to its errors.
        images: how many test images, drawn at random with a fixed seed; all by default.
        seed: of the corruptions.
        attack: radius of the attacks, a number or a fraction; 8/255 by default.
        attack_steps: their steps; 20 by default.
        say: gets a line for each thing measured.
        tol: as for :func:`~opteq.training.evaluate`, with those below.
        max_steps: most solver steps.
        device: ``auto``, ``cpu`` or ``cuda``.
        precision: of the model.
        root: folder of the images.
        corruption_files: folder with the published files of CIFAR-10-C or CIFAR-100-C, which are read in place of
            generating corrupted images; classes have to be in the order of its labels.
        batch_size: images at a time, the recipe's by default.
    """
    belonging = {"only": only or None, "reference": reference, "corruption-files": corruption_files}
    _check_options({} if corruptions else belonging, images, attack_steps)
    epsilon = _radius(attack)
    opened = open_run(run, tol, max_steps, device, precision, root, batch_size)
    _check_classifier(opened)
    published = None if corruption_files is None else PublishedCorruptions(corruption_files)
    test = opened.dataset.test
    rows = random_rows(len(test), images)
    split = test if rows is None else Split(test.images[rows], test.labels[rows])
    marks = {"images": len(split), "seed": seed, "source": source_of(published), "labels": _mark_labels(opened, split)}
    names = _names_to_measure(opened, only, published) if corruptions else ()
    others = None if reference is None else read_reference(Path(reference), {**marks, "accuracy": dict.fromkeys(names)})
    opened.check_writable(FILE)  # refused, as all before it, before hours are spent
    record = read_record(opened.path)
    if corruptions:
        found = {**measure_corruptions(opened, split, only, seed, say, published, rows), "labels": marks["labels"]}
        if only:
            keep_earlier(found, record.get("corruptions"))
        if reference is not None and others is not None:
            found["relative"] = _relative(found, Path(reference), others)
        record["corruptions"] = found
    if curves:
        record["curves"] = measure_curves(opened, split, epsilon, attack_steps or 20, say)
    _write(opened, record)
    return record


def _check_classifier(opened: LoadedRun) -> None:
    if opened.dataset.test.dense:
        raise UserError(
            f"{opened.path} was trained for segmentation: corruptions and attack curves need a classifier of images"
        )


def _relative(found: dict[str, Any], reference: Path, others: dict[str, Any]) -> dict[str, Any]:
    """Errors relative to those of the reference, under the corruptions that both were measured on."""
    shared = {name: row for name, row in found["accuracy"].items() if name in others["accuracy"]}
    return {"reference": _title(reference), **relative_errors({**found, "accuracy": shared}, others)}


def _names_to_measure(
    opened: LoadedRun, only: Sequence[str], published: PublishedCorruptions | None
) -> tuple[str, ...]:
    """The corruptions, by name; published files have to be those of the run's test images."""
    test = opened.dataset.test
    if published is not None:
        check_published(published, test, len(opened.dataset.classes))
    return select_names(only, test.images.shape[1], published)


def _mark_labels(opened: LoadedRun, split: Split) -> str:
    """A short mark of the classes and the labels, by which test images of another data set are known."""
    names = "\n".join(opened.dataset.classes)
    return hashlib.sha256(names.encode() + split.labels.cpu().numpy().tobytes()).hexdigest()[:16]


def _check_options(idle: dict[str, Any], images: int | None, attack_steps: int | None) -> None:
    """Refuse options that would have no effect, and numbers out of range."""
    for name, value in idle.items():
        if value is not None:
            raise UserError(f"--{name} belongs to --corruptions; add that")
    for name, count in (("images", images), ("attack-steps", attack_steps)):
        if count is not None and count < 1:
            raise UserError(f"--{name} should be at least 1; got {count}")


def _write(opened: LoadedRun, record: dict[str, Any]) -> None:
    opened.write(FILE, json.dumps(record, indent=2) + "\n")
    opened.write("robustness.md", markdown(record, _title(opened.path)))


def _title(folder: Path) -> str:
    return folder.resolve().name


def _radius(attack: float | str | None) -> float:
    epsilon = EPSILON if attack is None else fraction(attack)
    if not isinstance(epsilon, int | float) or not 0 < epsilon <= 1:
        raise UserError(f"--attack {attack} is not right: a radius is a number in (0, 1] such as 8/255")
    return float(epsilon)


def random_rows(total: int, count: int | None) -> Tensor | None:
    """Images drawn at random, the same ones every time: data sets may lie in the order of their classes."""
    if count is None or count >= total:
        return None
    return torch.randperm(total, generator=torch.Generator().manual_seed(0))[:count].sort().values
