"""The run that figures are about: its model, some of its test images, and what was measured before."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opteq.analysis.terms import equilibrium_inputs
from opteq.equilibrium import Equilibrium
from opteq.models import Classifier
from opteq.report.run import short_names
from opteq.states import State
from opteq.training.open_run import LoadedRun, open_run
from opteq.training.robustness import read_record


class FigureUnavailableError(Exception):
    """A figure that this run can't have; the message says why."""


@dataclass(frozen=True)
class Subject:
    """A finished run of a classifier.

    Attributes:
        opened: the run.
        title: by which it is told from others.
        beside: other runs, drawn in the same figure where that makes sense.
    """

    opened: LoadedRun
    title: str
    beside: tuple[Subject, ...] = field(default=())

    @cached_property
    def model(self) -> Classifier:
        """In evaluation mode, on its device."""
        model = self.opened.accelerator.unwrap_model(self.opened.model)
        assert isinstance(model, Classifier)
        return model.eval()

    @cached_property
    def record(self) -> dict[str, Any]:
        """The record of robustness; empty where nothing was measured."""
        return read_record(self.opened.path)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return tuple(self.opened.dataset.classes)

    def images(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised images, their pixels as uint8 and their labels: a random choice, the same every time."""
        split = self.opened.dataset.test
        order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:count]
        pixels, device = split.images[order], self.opened.accelerator.device
        extra, dataset = self.opened.extra, self.opened.dataset
        mean, std = (extra.get(name, getattr(dataset, name)) for name in ("mean", "std"))
        x = pixels.to(device).float() / 255
        mean, std = (x.new_tensor(values).view(1, -1, 1, 1) for values in (mean, std))
        return (x - mean) / std, pixels, split.labels[order].to(device)

    def equilibrium(self, count: int) -> tuple[Equilibrium, State, Tensor]:
        """The first equilibrium layer, its input for some test images, and their labels."""
        x, _, labels = self.images(count)
        calls = equilibrium_inputs(self.model, x)
        if not calls:
            raise FigureUnavailableError(f"{self.title} has no equilibrium layer")
        return calls[0][1], calls[0][2], labels

    def check_classifies(self) -> None:
        """Raise where labels are maps."""
        if self.opened.dataset.test.dense:
            raise FigureUnavailableError("it needs a classifier of images, and this run was trained for segmentation")


def open_subject(run: Path, beside: tuple[Path, ...] = (), device: str = "auto", root: str | None = None) -> Subject:
    """The run in a folder, with others beside it; ``device`` and ``root`` as for :func:`~opteq.training.evaluate`.

    In full precision whatever the run was trained in: residuals are drawn below the rounding of bfloat16.
    """
    folders = (run, *beside)
    titles = short_names(folders)
    opened = (open_run(folder, device=device, precision="no", root=root) for folder in folders)
    first, *others = map(Subject, opened, titles)
    return dataclasses.replace(first, beside=tuple(others))
