"""Predictions of the saved model on test images, and statistics of its solves."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.common.errors import ConvergenceWarning
from opteq.data.dataset import LazyImages
from opteq.equilibrium import Equilibrium
from opteq.solution import Report
from opteq.solvers import Status

_BATCH = 64


@dataclass(frozen=True)
class LabelledImages:
    """Images, uint8 ``(N, C, h, w)``, with labels (classes or label maps), class names, mean and std."""

    images: Tensor | LazyImages
    labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def batch(self, indices: Tensor, device: torch.device) -> Tensor:
        """The normalised images ``indices``."""
        pixels = self.images[indices].to(device).float() / 255
        mean, std = (pixels.new_tensor(numbers).reshape(1, -1, 1, 1) for numbers in (self.mean, self.std))
        return (pixels - mean) / std


@dataclass(frozen=True)
class SolveRecord:
    """Statistics of the solves of one layer over all images that were evaluated.

    Attributes:
        layer: its name in the model.
        method: the solver.
        tol: its tolerance.
        median, worst: relative residual after every step, from the initial state on.
        mean_steps: steps per image.
        worst_residual: largest final residual.
        converged: fraction of images within the tolerance.
        failures: number of images with another status.
    """

    layer: str
    method: str
    tol: float
    median: list[float]
    worst: list[float]
    mean_steps: float
    worst_residual: float
    converged: float
    failures: dict[Status, int]


@dataclass(frozen=True)
class Predictions:
    """The model's predictions on test images.

    Attributes:
        order: indices of the images that were evaluated.
        predicted: their predicted classes.
        probabilities: of all classes, ``(n, classes)``.
        confusion: counts, with a row per true class.
        solves: one record per layer; empty for a baseline.
        total: number of test images.
    """

    order: Tensor
    predicted: Tensor
    probabilities: Tensor
    confusion: Tensor
    solves: list[SolveRecord]
    total: int

    @property
    def complete(self) -> bool:
        """Whether all test images were evaluated."""
        return len(self.order) == self.total

    @property
    def accuracy(self) -> float:
        """Fraction of correct predictions."""
        return float(self.confusion.diagonal().sum()) / max(1, int(self.confusion.sum()))


class SolveMonitor:
    """Collects the solve reports of a model's equilibrium layers."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, Equilibrium)]
        self.reports: dict[str, list[Report]] = {name: [] for name, _ in self.layers}

    def record(self) -> None:
        """Add the latest report of every layer."""
        for name, layer in self.layers:
            if layer.last is not None:
                self.reports[name].append(layer.last[0])

    def records(self) -> list[SolveRecord]:
        """One record per layer with a report."""
        return [_record(name, found) for name, found in self.reports.items() if found]


@torch.no_grad()
def predict(model: nn.Module, images: LabelledImages, seconds: float) -> Predictions:
    """Predict the test images in random order, until all are done or ``seconds`` have passed."""
    device = next(model.parameters()).device
    monitor = SolveMonitor(model)
    order = torch.randperm(len(images.labels), generator=torch.Generator().manual_seed(0))
    scores: list[Tensor] = []
    model.eval()
    deadline = time.monotonic() + seconds
    # The report shows which images did not converge.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for indices in torch.split(order, _BATCH):
            scores.append(model(images.batch(indices, device)).float().cpu())
            monitor.record()
            if time.monotonic() > deadline:
                break
    probabilities = torch.cat(scores).softmax(dim=1) if scores else torch.zeros(0, len(images.classes))
    order = order[: len(probabilities)]
    predictions = probabilities.argmax(dim=1)
    size = len(images.classes)
    cells = images.labels[order] * size + predictions
    confusion = torch.bincount(cells, minlength=size * size).reshape(size, size)
    return Predictions(order, predictions, probabilities, confusion, monitor.records(), len(images.labels))


def _record(layer: str, reports: list[Report]) -> SolveRecord:
    residual = torch.cat([report.residual.cpu() for report in reports])
    steps = torch.cat([report.steps.cpu() for report in reports]).float()
    codes = Counter(code for report in reports for code in report.codes.tolist())
    trace = _joined([report.trace.cpu().double() for report in reports if report.trace is not None])
    finite = residual[torch.isfinite(residual)]
    return SolveRecord(
        layer=layer,
        method=reports[0].method,
        tol=reports[0].tol,
        median=trace.nanmedian(dim=1).values.tolist() if trace.numel() else [],
        worst=trace.nan_to_num(nan=-1.0, posinf=-1.0).amax(dim=1).tolist() if trace.numel() else [],
        mean_steps=float(steps.mean()),
        worst_residual=float(finite.max()) if finite.numel() else float("nan"),
        converged=codes[int(Status.CONVERGED)] / max(1, len(residual)),
        failures={Status(code): times for code, times in codes.items() if code != int(Status.CONVERGED)},
    )


def _joined(traces: list[Tensor]) -> Tensor:
    """Concatenate the traces of several batches; shorter ones repeat their last residual."""
    if not traces:
        return torch.zeros(0, 0)
    longest = max(len(trace) for trace in traces)
    padded = [torch.cat([trace, trace[-1:].expand(longest - len(trace), -1)]) for trace in traces]
    return torch.cat(padded, dim=1)
