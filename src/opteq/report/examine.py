"""Running the saved model over the test pictures: what it predicts, and how its solves go."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.common.errors import ConvergenceWarning
from opteq.equilibrium import Equilibrium
from opteq.solution import Report
from opteq.solvers import Status

_BATCH = 64


@dataclass(frozen=True)
class Pictures:
    """Test pictures: uint8 ``(N, C, H, W)``, their labels (a class or a map each), the names of the classes, and the
    pixels' statistics.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def batch(self, indices: Tensor, device: torch.device) -> Tensor:
        """Some pictures as the model takes them."""
        pixels = self.images[indices].to(device).float() / 255
        mean, std = (pixels.new_tensor(numbers).reshape(1, -1, 1, 1) for numbers in (self.mean, self.std))
        return (pixels - mean) / std


@dataclass(frozen=True)
class SolveRecord:
    """How the solves of one layer went over all pictures that were looked at.

    Attributes:
        layer: its name in the model.
        method: the solver.
        tol: its tolerance.
        median, worst: relative residual after every step, from the start on.
        mean_steps: steps a picture.
        worst_residual: largest residual of an answer.
        converged: share of pictures within the tolerance.
        failures: how many pictures ended otherwise, by status.
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
class Examination:
    """What the model did with the test pictures.

    Attributes:
        order: the pictures that were looked at, by their index.
        predictions: the class predicted for each.
        probabilities: of all classes, ``(n, classes)``.
        confusion: counts, a row for each true class.
        solves: one record a layer; empty for a baseline.
        total: how many test pictures there are.
    """

    order: Tensor
    predictions: Tensor
    probabilities: Tensor
    confusion: Tensor
    solves: list[SolveRecord]
    total: int

    @property
    def complete(self) -> bool:
        """Whether every test picture was looked at."""
        return len(self.order) == self.total

    @property
    def accuracy(self) -> float:
        """Share of right predictions."""
        return float(self.confusion.diagonal().sum()) / max(1, int(self.confusion.sum()))


class Watch:
    """Keeps how the solves of a model's equilibrium layers go."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, Equilibrium)]
        self.reports: dict[str, list[Report]] = {name: [] for name, _ in self.layers}

    def look(self) -> None:
        """Note the latest solve of every layer."""
        for name, layer in self.layers:
            if layer.last is not None:
                self.reports[name].append(layer.last[0])

    def records(self) -> list[SolveRecord]:
        """One a layer that was seen solving."""
        return [_record(name, found) for name, found in self.reports.items() if found]


@torch.no_grad()
def examine(model: nn.Module, pictures: Pictures, seconds: float) -> Examination:
    """Predict the test pictures until all are done or ``seconds`` are over, in an order that mixes the classes."""
    device = next(model.parameters()).device
    watch = Watch(model)
    order = torch.randperm(len(pictures.labels), generator=torch.Generator().manual_seed(0))
    scores: list[Tensor] = []
    model.eval()
    deadline = time.monotonic() + seconds
    # The page tells which pictures did not converge; a warning on the terminal would say it twice.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for indices in torch.split(order, _BATCH):
            scores.append(model(pictures.batch(indices, device)).float().cpu())
            watch.look()
            if time.monotonic() > deadline:
                break
    probabilities = torch.cat(scores).softmax(dim=1) if scores else torch.zeros(0, len(pictures.classes))
    order = order[: len(probabilities)]
    predictions = probabilities.argmax(dim=1)
    size = len(pictures.classes)
    cells = pictures.labels[order] * size + predictions
    confusion = torch.bincount(cells, minlength=size * size).reshape(size, size)
    return Examination(order, predictions, probabilities, confusion, watch.records(), len(pictures.labels))


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
    """Traces of several batches beside each other; one that ended early keeps its last residual."""
    if not traces:
        return torch.zeros(0, 0)
    longest = max(len(trace) for trace in traces)
    padded = [torch.cat([trace, trace[-1:].expand(longest - len(trace), -1)]) for trace in traces]
    return torch.cat(padded, dim=1)
