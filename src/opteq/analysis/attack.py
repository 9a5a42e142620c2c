"""Adversarial attacks: projected gradient ascent of the loss in a small ball around an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.analysis.terms import evaluation_mode
from opteq.common import validate as _validate
from opteq.common.options import NamedOptions
from opteq.states import working_dtype

REACH = 2.5
"""Default total length of the steps, in units of epsilon: every point of the ball can be reached from every other one,
with some steps to spare (Madry et al. 2018)."""

AMPLIFIED = 256.0
"""Factor of the loss. Only the signs of its gradient are used; without the factor small gradients would underflow in
float16."""


@dataclass(frozen=True)
class PGD(metaclass=NamedOptions):
    """Projected gradient ascent in the largest-entry norm: PGD-k is this with ``steps=k`` (Madry et al. 2018).

    From the image, or a random point of the ball, repeat ``steps`` times: a step of ``step_size`` along the sign of the
    gradient of the cross-entropy, then the projection onto the ball of radius ``epsilon`` around the image and onto the
    range of pixels. The accuracy under the strongest attack is at most the accuracy under this one.

    The attack runs in evaluation mode and leaves the model unchanged: the mode of every module, running averages, and
    gradients of parameters. In training mode it would update the running averages of batch normalisation ``steps``
    times per batch, and an image's attack would depend on the other samples of its batch. The perturbation inside an
    MOptEq, which belongs to training, is off as well.

    The gradient is that of the model. With a coarse approximation such as ``gradient="one-step"`` a network looks more
    robust than it is; ``"implicit"`` is exact.

    Args:
        epsilon: radius of the ball, for pixels in 0..1. 8/255 is usual for CIFAR.
        steps: number of gradient steps.
        step_size: length of a step; 2.5 epsilon / steps by default.
        random_start: start at a uniformly random point of the ball, and not at the image.

    >>> PGD(epsilon=0.04, steps=20).length
    0.005
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    >>> images = torch.rand(3, 1, 2, 2)
    >>> moved = PGD(epsilon=0.1, steps=3)(model, images, torch.tensor([0, 1, 1]))
    >>> bool((moved - images).abs().max() <= 0.1 + 1e-6), moved.min() >= 0 and moved.max() <= 1
    (True, tensor(True))
    """

    epsilon: float
    steps: int = 20
    step_size: float | None = None
    random_start: bool = True

    def __post_init__(self) -> None:
        _validate.share(self, "epsilon")
        _validate.whole(self, "steps")
        if self.step_size is not None:
            _validate.share(self, "step_size")
        _validate.flag(self, "random_start")

    @property
    def length(self) -> float:
        """The length of a step: ``step_size`` or its default."""
        return REACH * self.epsilon / self.steps if self.step_size is None else self.step_size

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
            model: from images to logits ``(B, K)``, or ``(B, K, h, w)`` for segmentation.
            images: ``(B, C, h, w)``, normalised as the model takes them: ``(pixel - mean) / std``.
            labels: classes ``(B,)``, soft labels ``(B, K)``, or label maps ``(B, h, w)`` with 255 for no class.
            mean: of the normalisation, one value per channel, or one for all.
            std: the same.
            noise: values in [-1, 1] in the shape of ``images`` for the random start; drawn by torch by default.
                :meth:`opteq.data.Batches.noise` makes the attack reproducible.
        """
        from opteq.data.dataset import IGNORE_INDEX  # imported here: `import opteq` does not load data sets

        images = images.detach()
        least, most = ball(self.epsilon, images, mean, std)
        radius, stride = (channel_values([value / s for s in std], images) for value in (self.epsilon, self.length))
        unlabelled = IGNORE_INDEX if labels.ndim == 3 else -100
        moved = random_point(images, radius, noise).clamp(least, most) if self.random_start else images
        with evaluation_mode(model), torch.enable_grad():
            for _ in range(self.steps):
                moved = moved.detach().requires_grad_()
                logits = model(moved)
                wide = logits.to(working_dtype(logits.dtype))
                loss = F.cross_entropy(wide, labels, reduction="sum", ignore_index=unlabelled)
                # With respect to the images only: gradients of parameters stay unchanged.
                (slope,) = torch.autograd.grad(AMPLIFIED * loss, moved)
                # A pixel without a finite gradient is not changed.
                direction = torch.nan_to_num(slope, nan=0.0).sign()
                moved = (moved.detach() + stride * direction).clamp(least, most)
        return moved.detach()


def random_point(images: Tensor, radius: Tensor, noise: Tensor | None) -> Tensor:
    """``images`` moved by ``radius`` times ``noise``: values in [-1, 1], drawn by torch where none are given."""
    return images + radius * (2 * torch.rand_like(images) - 1 if noise is None else noise.to(images.dtype))


def ball(epsilon: float, images: Tensor, mean: Sequence[float], std: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The smallest and largest values of normalised images within ``epsilon`` of these, for pixels in 0..1."""
    _check_normalisation(mean, std, images.shape[1])
    radius = channel_values([epsilon / s for s in std], images)
    black, white = (
        channel_values([(value - m) / s for m, s in zip(mean, std, strict=True)], images) for value in (0.0, 1.0)
    )
    return torch.maximum(images - radius, black), torch.minimum(images + radius, white)


def _check_normalisation(mean: Sequence[float], std: Sequence[float], channels: int) -> None:
    numbers = [*mean, *std]
    fitting = len(mean) == len(std) and len(mean) in (1, channels)
    if not fitting or not all(map(math.isfinite, numbers)) or not all(value > 0 for value in std):
        raise ValueError(
            f"PGD's mean and std should have one value for each of {channels} channels, or one for all, std above 0; "
            f"got {tuple(mean)} and {tuple(std)}"
        )


def channel_values(values: Sequence[float], images: Tensor) -> Tensor:
    """One value per channel as ``(1, C, 1, 1)``, filled in on the device: a copy from the host would wait for it."""
    return torch.cat([torch.full_like(images[:1, :1, :1, :1], value) for value in values], dim=1)


__all__ = ["PGD"]
