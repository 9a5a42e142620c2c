"""Accuracy on corrupted images, and errors relative to those of a reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opteq.common.errors import UserError, unknown_name
from opteq.data import Batches, Split, corruptions
from opteq.training.opened import OpenedRun

Say = Callable[[str], None]


class Corrupted:
    """Corrupts the normalised images of a batch, as pixels of 8 bits; a change for :func:`~opteq.training.validate`.

    Args:
        name: of the corruption.
        severity: 0 to 5.
        seed: of its random numbers.
    """

    def __init__(self, name: str, severity: int, seed: int = 0) -> None:
        self.name, self.severity, self.seed = name, severity, seed

    def __call__(self, images: Tensor, batches: Batches, index: int) -> Tensor:
        """The corrupted images of this process's share of batch ``index``."""
        mean, std = (images.new_tensor(values).view(1, -1, 1, 1) for values in (batches.mean, batches.std))
        pixels = (255 * (images * std + mean)).round().clamp(0, 255).to(torch.uint8)
        first = index * batches.batch_size + batches.share(index).start
        made = corruptions.corrupt(pixels, self.name, self.severity, seed=self.seed, first=first)
        return (made.to(images.dtype) / 255 - mean) / std


def chosen_names(only: Sequence[str], channels: int) -> tuple[str, ...]:
    """The corruptions to run: all that fit the images, or those of ``only``."""
    fitting = corruptions.names(channels)
    for name in only:
        if name not in corruptions.NAMES:
            raise unknown_name("corruption", name, corruptions.NAMES)
        if name not in fitting:
            raise UserError(f"{name} changes colors, and the images of this run are grey: leave it out")
    return tuple(name for name in fitting if name in only) if only else fitting


def measure_corruptions(
    opened: OpenedRun, split: Split, only: Sequence[str] = (), seed: int = 0, say: Say = lambda _: None
) -> dict[str, Any]:
    """Accuracy for every corruption and severity, in a form that JSON takes.

    Args:
        opened: the run.
        split: the images.
        only: names of corruptions; all by default.
        seed: of the corruptions.
        say: gets a line after each corruption.

    Returns:
        ``clean`` (accuracy as they are), ``accuracy`` (by name, one number per severity), ``mean`` (over all of
        these), ``images``, ``seed``, and the settings of the run.
    """
    names = chosen_names(only, split.images.shape[1])
    clean = opened.counts(split).accuracy
    accuracy: dict[str, list[float]] = {}
    for place, name in enumerate(names, start=1):
        accuracy[name] = [
            opened.counts(split, change=Corrupted(name, severity, seed)).accuracy for severity in corruptions.SEVERITIES
        ]
        shown = " ".join(f"{100 * one:5.1f}" for one in accuracy[name])
        say(f"{place:2d}/{len(names)} {name:<18} accuracy at severity 1 to 5, in %: {shown}")
    return {
        "clean": clean,
        "accuracy": accuracy,
        "mean": _mean([value for row in accuracy.values() for value in row]),
        "images": len(split),
        "seed": seed,
        **opened.settings,
    }


def relative_errors(own: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Errors relative to those of a reference network (Hendrycks and Dietterich 2019).

    The corruption error of c is the sum of errors over severities divided by that of the reference; the relative one
    counts what is added to the error on clean images. A corruption that the reference has no error on has none.

    Args:
        own: result of :func:`measure_corruptions`.
        reference: that of the reference.

    Returns:
        ``corruption_errors`` by name, ``mean`` over all of them, ``mean_15`` over the 15 of the paper where all are
        there, and ``relative_mean``.

    >>> own = {"clean": 0.9, "accuracy": {"fog": [0.8] * 5}}
    >>> found = relative_errors(own, {"clean": 0.8, "accuracy": {"fog": [0.6] * 5}})
    >>> round(found["mean"], 3), round(found["relative_mean"], 3)
    (0.5, 0.5)
    """
    ratios: dict[str, float | None] = {}
    added: list[float] = []
    for name, row in own["accuracy"].items():
        errors, others = (sum(1 - value for value in one) for one in (row, reference["accuracy"][name]))
        ratios[name] = errors / others if others > 0 else None
        worse, base = errors - len(row) * (1 - own["clean"]), others - len(row) * (1 - reference["clean"])
        if base > 0:
            added.append(worse / base)
    known = {name: value for name, value in ratios.items() if value is not None}
    main = [known[name] for name in corruptions.MAIN if name in known]
    return {
        "corruption_errors": ratios,
        "mean": _mean(list(known.values())),
        "mean_15": _mean(main) if len(main) == len(corruptions.MAIN) else None,
        "relative_mean": _mean(added),
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
