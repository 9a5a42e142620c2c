"""APGD: projected gradient ascent with momentum that chooses its step lengths itself (Croce and Hein 2020)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.analysis.attack import AMPLIFIED, ball, channel_values, random_point
from opteq.analysis.terms import evaluation_mode
from opteq.common import validate as _validate
from opteq.common.options import NamedOptions
from opteq.states import working_dtype

MOMENTUM = 0.25
"""Weight of the step before in a step."""
RISING = 0.75
"""A step length is kept while the loss rose in this share of the steps since the last check."""
LOSSES = ("cross-entropy", "dlr")


@dataclass(frozen=True)
class APGD(metaclass=NamedOptions):
    """Projected gradient ascent in the largest-entry norm with automatic step lengths.

    The step length of an image is halved at checks where the loss rose too rarely, and the attack continues from the
    best point so far.

    Steps and checks are those of Croce and Hein (2020). The result is the misclassified point with the highest loss,
    or, without one, the point with the highest loss. The model is left unchanged, as by :class:`~opteq.analysis.PGD`.

    Args:
        epsilon: radius of the ball, for pixels in 0..1.
        steps: number of gradient steps.
        loss: ``"cross-entropy"``, or ``"dlr"``: the difference of logits relative to that of the first and the third,
            which does not vanish where a network is very confident. It needs three classes.
        random_start: start at a uniformly random point of the ball, and not at the image.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> images = torch.rand(5, 1, 2, 2)
    >>> moved = APGD(epsilon=0.1, steps=5, loss="dlr")(model, images, torch.tensor([0, 1, 2, 0, 1]))
    >>> bool((moved - images).abs().max() <= 0.1 + 1e-6)
    True
    """

    epsilon: float
    steps: int = 50
    loss: str = "cross-entropy"
    random_start: bool = True

    def __post_init__(self) -> None:
        _validate.share(self, "epsilon")
        _validate.whole(self, "steps")
        _validate.choice(self, "loss", LOSSES)
        _validate.flag(self, "random_start")

    def __call__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
        noise: Tensor | None = None,
    ) -> Tensor:
        """The attacked images, detached, normalised like ``images``.

        Args:
            model: from images to logits ``(B, K)``.
            images: ``(B, C, h, w)``, normalised as the model takes them: ``(pixel - mean) / std``.
            labels: classes ``(B,)``.
            mean: of the normalisation, one value per channel, or one for all.
            std: the same.
            noise: values in [-1, 1] in the shape of ``images`` for the random start; drawn by torch by default.
        """
        if labels.ndim != 1:
            raise ValueError(f"APGD needs one class per image as labels, (B,); got {tuple(labels.shape)}")
        images = images.detach()
        least, most = ball(self.epsilon, images, mean, std)
        unit = channel_values([self.epsilon / s for s in std], images)
        x = random_point(images, unit, noise).clamp(least, most) if self.random_start else images
        with evaluation_mode(model), torch.enable_grad():
            now = self._evaluate_at(model, x, labels)
            best = top = now
            before, length = x, torch.full_like(now.loss, 2.0)  # in units of epsilon
            rises, checked, last = torch.zeros_like(now.loss), 0, (length, now.loss)
            checks = checkpoints(self.steps)
            for step in range(1, self.steps + 1):
                ascent = (x + _per_image(length, x) * unit * now.slope.sign()).clamp(least, most)
                # The first step has no step before it.
                weight = 1 - MOMENTUM if step > 1 else 1.0
                x, before = (x + weight * (ascent - x) + (1 - weight) * (x - before)).clamp(least, most), x
                point = self._evaluate_at(model, x, labels)
                rises += (point.loss > now.loss).to(rises)
                now = point
                best = _where(now.rank() > best.rank(), now, best)
                top = _where(now.loss > top.loss, now, top)
                if step in checks:
                    rarely = rises < RISING * (step - checked)
                    stuck = (length == last[0]) & (top.loss == last[1])
                    shorter = rarely | stuck
                    last = (length, top.loss)
                    length = torch.where(shorter, length / 2, length)
                    now = _where(shorter, top, now)
                    x = now.x
                    rises, checked = torch.zeros_like(rises), step
        return best.x

    def _evaluate_at(self, model: nn.Module, x: Tensor, labels: Tensor) -> _Point:
        x = x.detach().requires_grad_()
        logits = model(x)
        wide = logits.to(working_dtype(logits.dtype))
        loss = F.cross_entropy(wide, labels, reduction="none") if self.loss == LOSSES[0] else dlr(wide, labels)
        (slope,) = torch.autograd.grad(AMPLIFIED * loss.sum(), x)
        wrong = wide.detach().argmax(dim=1) != labels
        # A pixel without a finite gradient is not changed.
        return _Point(x.detach(), loss.detach(), torch.nan_to_num(slope, nan=0.0), wrong)


class _Point(NamedTuple):
    """Images, their losses ``(B,)``, the gradients, and which are misclassified."""

    x: Tensor
    loss: Tensor
    slope: Tensor
    wrong: Tensor

    def rank(self) -> Tensor:
        """Larger for a better result: misclassified before others, then by the loss."""
        squashed = torch.atan(self.loss.double()) / math.pi  # between -1/2 and 1/2
        return self.wrong.double() + torch.nan_to_num(squashed, nan=-1.0)


def checkpoints(steps: int) -> set[int]:
    """The steps after which lengths are checked: first after 22 %, then after shorter and shorter stretches.

    >>> sorted(checkpoints(100))
    [22, 41, 57, 70, 80, 87, 93, 99]
    """
    checked_steps, share, stretch = set(), 0.0, 0.22
    while share + stretch <= 1:
        share += stretch
        checked_steps.add(math.ceil(steps * share - 1e-9))
        stretch = max(stretch - 0.03, 0.06)
    return checked_steps


def dlr(logits: Tensor, labels: Tensor) -> Tensor:
    """``-(z_y - max other z) / (z_1 - z_3)`` with the logits in falling order, ``(B,)``: free of scale and shift."""
    if logits.shape[1] < 3:
        raise ValueError(f"the loss 'dlr' needs three classes or more; got {logits.shape[1]}")
    order = logits.topk(3, dim=1).values
    own = logits.gather(1, labels[:, None]).squeeze(1)
    other = logits.scatter(1, labels[:, None], -torch.inf).amax(dim=1)
    return (other - own) / (order[:, 0] - order[:, 2]).clamp_min(torch.finfo(logits.dtype).tiny ** 0.5)


def _per_image(values: Tensor, images: Tensor) -> Tensor:
    return values.to(images.dtype).reshape(-1, 1, 1, 1)


def _where(which: Tensor, first: _Point, second: _Point) -> _Point:
    return _Point(
        *(torch.where(which.reshape(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(first, second, strict=True))
    )


__all__ = ["APGD"]
