"""Metrics of training and testing, accumulated on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.data.dataset import IGNORE_INDEX
from opteq.solution import Report
from opteq.training.devices import Accelerator

_SUMS = ("loss", "correct", "label_count", "top5", "samples", "solves", "steps", "residual", "converged", "lost")


@dataclass(frozen=True)
class Metrics:
    """Sums over images, and over solves (one per image and equilibrium layer).

    ``label_count`` counts images, or pixels with a class. ``confusion`` has a row per true class and
    a column per predicted class; None where it was not computed. Steps that were skipped, because their gradient was
    not finite, count in ``skipped`` alone; ``skipped_in_a_row`` is the longest run of them.
    """

    loss: float
    correct: float
    label_count: float
    top5: float
    samples: float
    solves: float
    steps: float
    residual: float
    converged: float
    lost: float
    worst: float
    confusion: list[list[float]] | None = None
    skipped: float = 0.0
    skipped_in_a_row: float = 0.0

    @property
    def mean_loss(self) -> float:
        """Loss per image."""
        return self.loss / max(self.samples, 1)

    @property
    def accuracy(self) -> float:
        """Fraction of images, or of pixels, whose class was predicted."""
        return self.correct / max(self.label_count, 1)

    @property
    def mean_iou(self) -> float:
        """Mean over classes of intersection over union.

        Classes that neither occur nor are predicted are left out.
        """
        table = self._table()
        right = table.diagonal()
        return _mean_share(right, table.sum(dim=0) + table.sum(dim=1) - right)

    @property
    def class_accuracy(self) -> float:
        """Mean accuracy over the classes that occur."""
        table = self._table()
        return _mean_share(table.diagonal(), table.sum(dim=1))

    def _table(self) -> Tensor:
        if self.confusion is None:
            raise ValueError("there is no confusion matrix; give RunningMetrics the number of classes")
        return torch.tensor(self.confusion, dtype=torch.float64)

    @property
    def mean_steps(self) -> float:
        """Solver steps per solve; 0 for a network without equilibria."""
        return self.steps / max(self.solves, 1)

    @property
    def converged_share(self) -> float:
        """Fraction of solves that reached the solver's tolerance; 1 for a network without equilibria."""
        return self.converged / self.solves if self.solves else 1.0

    @property
    def lost_share(self) -> float:
        """Fraction of solves whose residual is above the guard's."""
        return self.lost / max(self.solves, 1)


class RunningMetrics:
    """Accumulates sums and one maximum on the device. :meth:`update` does not wait for a GPU, :meth:`compute` does.

    Args:
        device: where the batches are.
        lost_above: relative residual above which a solve counts as lost.
        classes: number of classes of a confusion matrix; None for no matrix.
        with_top5: whether to compute top-5 accuracy, which costs more than the rest.
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
        # float64: in float32 a sum over millions of images would stop growing by single counts.
        self.sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self.worst = torch.zeros((), dtype=torch.float64, device=device)
        self.skips = torch.zeros(3, dtype=torch.float64, device=device)  # all, the present run of them, the longest
        self.classes = classes
        # One more cell for pixels without a label.
        cells = 0 if classes is None else classes**2 + 1
        self.cells = torch.zeros(cells, dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self, loss: Tensor, logits: Tensor, labels: Tensor, reports: Iterable[Report]) -> None:
        """Add one batch.

        Args:
            loss: sum over the images.
            logits: ``(B, K)``, or ``(B, K, h, w)`` for every pixel.
            labels: ``(B,)``, soft labels ``(B, K)``, whose largest entry is the class, or label maps ``(B, h, w)`` with
                255 for no class.
            reports: of the solves of all equilibrium layers.
        """
        classes = labels.argmax(dim=1) if labels.ndim == 2 else labels
        zero = self.sums.new_zeros(())
        predicted, top5 = logits.argmax(dim=1), zero
        # No class has the index of "no label", so a correct pixel always has a label.
        correct = (predicted == classes).sum()
        label_count = classes.numel() if labels.ndim < 3 else (classes != IGNORE_INDEX).sum()
        if self.classes is not None:
            cells = torch.where(classes == IGNORE_INDEX, self.classes**2, classes * self.classes + predicted).flatten()
            self.cells.index_add_(0, cells, torch.ones_like(cells, dtype=torch.float64))
        if self.with_top5:
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices
            top5 = (best == classes[:, None]).any(dim=1).sum()
        solves, steps, residuals, converged, lost = 0, zero, zero, zero, zero
        for report in reports:
            # A residual of NaN becomes infinite, which survives a maximum.
            residual = torch.nan_to_num(report.residual.double(), nan=math.inf, posinf=math.inf)
            solves += residual.numel()
            steps = steps + report.steps.sum()
            residuals = residuals + residual.sum()
            converged = converged + report.converged.sum()
            if report.tol:  # a network of a fixed number of steps has no equilibrium to lose
                lost = lost + (residual > self.lost_above).sum()
            if residual.numel():
                self.worst = torch.maximum(self.worst, residual.max())
        counts = (correct, label_count, top5, len(labels), solves, steps, residuals, converged, lost)
        # Values known on the host are filled in on the device: a copy would wait for it.
        parts = [part.double() if isinstance(part, Tensor) else torch.full_like(zero, part) for part in counts]
        self.sums += torch.stack([loss.detach().double(), *parts])

    @torch.no_grad()
    def skip_if(self, failed: Tensor, sums: Tensor) -> None:
        """Count a step as skipped where ``failed``; ``sums`` are those from before it."""
        count, run, longest = self.skips.unbind()
        run = (run + 1) * failed
        self.skips = torch.stack([count + failed, run, torch.maximum(longest, run)])
        self.sums = torch.where(failed, sums, self.sums)

    def continue_skips(self, before: RunningMetrics) -> None:
        """Let a run of skipped steps go on from an earlier epoch."""
        self.skips[1] = before.skips[1]

    def compute(self, accelerator: Accelerator | None = None) -> Metrics:
        """The metrics, over all processes if an ``accelerator`` is given. This waits for the device."""
        sums, most = self.sums, torch.cat([self.worst[None], self.skips[[0, 2]]])
        if accelerator is not None and accelerator.num_processes > 1:
            gathered = accelerator.gather(torch.cat([sums, most])[None])
            # All processes skip the same steps.
            sums, most = gathered[:, :-3].sum(dim=0), gathered[:, -3:].amax(dim=0)
        confusion = None
        if self.classes is not None:
            cells = self.cells if accelerator is None else accelerator.reduce(self.cells, "sum")
            confusion = cells[:-1].reshape(self.classes, self.classes).tolist()
        worst, skipped, in_a_row = most.tolist()
        counts = dict(zip(_SUMS, sums.tolist(), strict=True))
        return Metrics(**counts, worst=worst, confusion=confusion, skipped=skipped, skipped_in_a_row=in_a_row)

    def restore(self, counts: Metrics) -> None:
        """Continue from metrics computed earlier."""
        self.sums.copy_(torch.tensor([getattr(counts, name) for name in _SUMS], dtype=torch.float64))
        self.worst.fill_(counts.worst)
        self.skips[0], self.skips[2] = counts.skipped, counts.skipped_in_a_row


def _mean_share(parts: Tensor, wholes: Tensor) -> float:
    there = wholes > 0
    return float((parts[there] / wholes[there]).mean()) if bool(there.any()) else 0.0
