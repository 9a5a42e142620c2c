"""What is counted while training and testing, kept on the device until somebody looks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.data.dataset import IGNORED
from opteq.solution import Report
from opteq.training.devices import Accelerator

_SUMS = ("loss", "correct", "judged", "top5", "samples", "solves", "steps", "residual", "converged", "lost")


@dataclass(frozen=True)
class Counts:
    """A tally read off: sums over pictures, and over solves (one for each picture and equilibrium layer).

    ``judged`` is the number of labels: of pictures, or of the pixels that have one. ``confusion`` has a row for each
    true class and a column for each predicted one; None where it was not counted.
    """

    loss: float
    correct: float
    judged: float
    top5: float
    samples: float
    solves: float
    steps: float
    residual: float
    converged: float
    lost: float
    worst: float
    confusion: list[list[float]] | None = None

    @property
    def mean_loss(self) -> float:
        """Loss a picture."""
        return self.loss / max(self.samples, 1)

    @property
    def accuracy(self) -> float:
        """Share of pictures, or of pixels, whose class was named first."""
        return self.correct / max(self.judged, 1)

    @property
    def mean_iou(self) -> float:
        """Mean over classes of intersection over union: right ones over all that are, or were said to be, of a class.

        Classes that neither occur nor are named have none and do not count.
        """
        table = self._table()
        right = table.diagonal()
        return _mean_share(right, table.sum(dim=0) + table.sum(dim=1) - right)

    @property
    def class_accuracy(self) -> float:
        """Mean over the classes that occur of the share that was right."""
        table = self._table()
        return _mean_share(table.diagonal(), table.sum(dim=1))

    def _table(self) -> Tensor:
        if self.confusion is None:
            raise ValueError("these counts have no confusion matrix; give the tally a number of classes")
        return torch.tensor(self.confusion, dtype=torch.float64)

    @property
    def mean_steps(self) -> float:
        """Solver steps a solve; 0 for a network without equilibria."""
        return self.steps / max(self.solves, 1)

    @property
    def converged_share(self) -> float:
        """Share of solves that reached the solver's tolerance; 1 for a network without equilibria."""
        return self.converged / self.solves if self.solves else 1.0

    @property
    def lost_share(self) -> float:
        """Share of solves whose residual is above the guard's."""
        return self.lost / max(self.solves, 1)


class Tally:
    """Sums and one maximum on the device. Adding makes no GPU wait; :meth:`read` does.

    Args:
        device: where the batches are.
        lost_above: relative residual above which an equilibrium counts as lost.
        classes: how many there are, to count which is taken for which; None for not to.
        with_top5: whether to count pictures whose class is among the first five; sorting costs more than the rest.
    """

    def __init__(
        self,
        device: torch.device,
        lost_above: float = 0.1,
        with_top5: bool = False,
        classes: int | None = None,
    ) -> None:
        self.lost_above = lost_above
        self.with_top5 = with_top5
        # Double precision: in float32 a sum over a million pictures would stop growing by single counts.
        self.sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self.worst = torch.zeros((), dtype=torch.float64, device=device)
        self.classes = classes
        # One cell more than the matrix has, for pixels without a label.
        cells = 0 if classes is None else classes**2 + 1
        self.cells = torch.zeros(cells, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, labels: Tensor, reports: Iterable[Report]) -> None:
        """Count one batch.

        Args:
            loss: its sum over pictures.
            logits: ``(B, K)``, or ``(B, K, H, W)`` for every pixel.
            labels: ``(B,)``, or ``(B, K)`` where pictures were mixed: the largest share is then the class. Of pixels
                ``(B, H, W)``, 255 for none.
            reports: how each equilibrium layer's solve went.
        """
        classes = labels.argmax(dim=1) if labels.ndim == 2 else labels
        zero = self.sums.new_zeros(())
        predicted, top5 = logits.argmax(dim=1), zero
        # No class has the number of "no label", so what is right is always judged.
        correct = (predicted == classes).sum()
        judged = classes.numel() if labels.ndim < 3 else (classes != IGNORED).sum()
        if self.classes is not None:
            cells = torch.where(classes == IGNORED, self.classes**2, classes * self.classes + predicted).flatten()
            self.cells.index_add_(0, cells, torch.ones_like(cells, dtype=torch.float64))
        if self.with_top5:
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices
            top5 = (best == classes[:, None]).any(dim=1).sum()
        solves, steps, residuals, converged, lost = 0, zero, zero, zero, zero
        for report in reports:
            # A solve that ended in NaN has no residual to speak of; infinity says so and survives a maximum.
            residual = torch.nan_to_num(report.residual.double(), nan=math.inf, posinf=math.inf)
            solves += residual.numel()
            steps = steps + report.steps.sum()
            residuals = residuals + residual.sum()
            converged = converged + report.converged.sum()
            lost = lost + (residual > self.lost_above).sum()
            if residual.numel():
                self.worst = torch.maximum(self.worst, residual.max())
        counts = (correct, judged, top5, len(labels), solves, steps, residuals, converged, lost)
        # Numbers that the host knows are filled in on the device: making tensors of them would be copies that wait.
        parts = [part.double() if isinstance(part, Tensor) else torch.full_like(zero, part) for part in counts]
        self.sums += torch.stack([loss.detach().double(), *parts])

    def read(self, accelerator: Accelerator | None = None) -> Counts:
        """The numbers, over all processes where an ``accelerator`` is given. This waits for the device."""
        sums, worst = self.sums, self.worst
        if accelerator is not None and accelerator.num_processes > 1:
            gathered = accelerator.gather(torch.cat([sums, worst[None]])[None])
            sums, worst = gathered[:, :-1].sum(dim=0), gathered[:, -1].max()
        confusion = None
        if self.classes is not None:
            cells = self.cells if accelerator is None else accelerator.reduce(self.cells, "sum")
            confusion = cells[:-1].reshape(self.classes, self.classes).tolist()
        return Counts(**dict(zip(_SUMS, sums.tolist(), strict=True)), worst=float(worst), confusion=confusion)

    def restore(self, counts: Counts) -> None:
        """Go on from numbers that were read earlier."""
        self.sums.copy_(torch.tensor([getattr(counts, name) for name in _SUMS], dtype=torch.float64))
        self.worst.fill_(counts.worst)


def _mean_share(parts: Tensor, wholes: Tensor) -> float:
    there = wholes > 0
    return float((parts[there] / wholes[there]).mean()) if bool(there.any()) else 0.0
