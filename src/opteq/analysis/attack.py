"""Pictures changed so little that nobody sees it, and so that a network errs: projected gradient ascent of its loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.analysis.terms import evaluating
from opteq.common import validate as _validate
from opteq.common.options import NamedOptions
from opteq.states import working_dtype

REACH = 2.5
"""All steps together are so many times epsilon by default: every point of the ball can be reached from every other
one, with some steps left to turn round (Madry et al. 2018)."""

AMPLIFIED = 256.0
"""What the loss is multiplied by. Only signs of its gradient are used, so nothing changes but this: in float16 small
gradients would otherwise become zero, and pixels with them would not be attacked."""


@dataclass(frozen=True)
class PGD(metaclass=NamedOptions):
    """Projected gradient ascent in the largest-entry norm: PGD-k is this with ``steps=k`` (Madry et al. 2018).

    From the picture, or a random point near it, go ``step_size`` along the sign of the gradient of the cross-entropy,
    back into the ball of radius ``epsilon`` about the picture and into the range of pixels, ``steps`` times. What it
    finds is a lower bound of what can be found: accuracy under attack is at most what is measured.

    **The model is attacked as it will be used**, in evaluation mode, and is afterwards as it was: the mode of every
    part, running averages, and gradients in the parameters. In training mode the attack would move the
    averages of batch normalisation ``steps`` times a batch, and a picture's attack would depend on its batch mates, so
    that two processes would train with other pictures than one. Perturbations inside of an MOptEq, which belong to
    training, are likewise off while the attack is computed.

    The gradient is the model's own. Behind a coarse approximation (``gradient="one-step"``, say) a network looks more
    robust than it is; the exact one is ``"implicit"``.

    Args:
        epsilon: how far a pixel may move, in units where pixels go from 0 to 1. 8/255 is usual for CIFAR.
        steps: gradients taken for each picture.
        step_size: how far a step goes, in the same units; 2.5 epsilon / steps by default.
        random_start: begin at a random point of the ball, uniformly. Without it, at the picture itself.

    >>> PGD(epsilon=0.04, steps=20).length
    0.005
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    >>> pictures = torch.rand(3, 1, 2, 2)
    >>> moved = PGD(epsilon=0.1, steps=3)(model, pictures, torch.tensor([0, 1, 1]))
    >>> bool((moved - pictures).abs().max() <= 0.1 + 1e-6), moved.min() >= 0 and moved.max() <= 1
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
        if not isinstance(self.random_start, bool):
            raise TypeError(f"PGD.random_start should be True or False; got {self.random_start!r}")

    @property
    def length(self) -> float:
        """How far a step goes: ``step_size``, or what it is by default."""
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
        """The attacked pictures, detached, in the form of ``images``.

        Args:
            model: from pictures to logits ``(B, K)``, or ``(B, K, H, W)`` where every pixel has a class.
            images: ``(B, C, H, W)``, normalised as the model takes them: ``(pixel - mean) / std``.
            labels: classes ``(B,)``, or shares of classes ``(B, K)``, or maps ``(B, H, W)`` with 255 for no class.
            mean: of the normalisation, one number a channel, or one for all.
            std: the same.
            noise: numbers in [-1, 1], shaped like ``images``, for the random start; drawn by torch by default. Give
                those of :meth:`opteq.data.Batches.noise` to get the same attack again.
        """
        from opteq.data.dataset import IGNORED  # late: `import opteq` brings no data sets along

        images = images.detach()
        _check_colours(mean, std, images.shape[1])
        radius, stride = (_channels([value / s for s in std], images) for value in (self.epsilon, self.length))
        black, white = (
            _channels([(value - m) / s for m, s in zip(mean, std, strict=True)], images) for value in (0.0, 1.0)
        )
        least, most = torch.maximum(images - radius, black), torch.minimum(images + radius, white)
        unlabelled = IGNORED if labels.ndim == 3 else -100
        moved = images
        if self.random_start:
            chance = 2 * torch.rand_like(images) - 1 if noise is None else noise.to(images.dtype)
            moved = (images + radius * chance).clamp(least, most)
        with evaluating(model), torch.enable_grad():
            for _ in range(self.steps):
                moved = moved.detach().requires_grad_()
                logits = model(moved)
                wide = logits.to(working_dtype(logits.dtype))
                loss = F.cross_entropy(wide, labels, reduction="sum", ignore_index=unlabelled)
                # With respect to the pictures alone: the parameters' own gradients stay as they are.
                (slope,) = torch.autograd.grad(AMPLIFIED * loss, moved)
                # Where there is no finite slope there is no direction, and the pixel stays.
                direction = torch.nan_to_num(slope, nan=0.0).sign()
                moved = (moved.detach() + stride * direction).clamp(least, most)
        return moved.detach()


def _check_colours(mean: Sequence[float], std: Sequence[float], channels: int) -> None:
    numbers = [*mean, *std]
    fitting = len(mean) == len(std) and len(mean) in (1, channels)
    if not fitting or not all(map(math.isfinite, numbers)) or not all(value > 0 for value in std):
        raise ValueError(
            f"PGD's mean and std should have one number for each of {channels} channels, or one for all, std above 0; "
            f"got {tuple(mean)} and {tuple(std)}"
        )


def _channels(values: Sequence[float], images: Tensor) -> Tensor:
    """One number a channel as ``(1, C, 1, 1)``. Filled in on the device: a copy from the host would wait for it."""
    return torch.cat([torch.full_like(images[:1, :1, :1, :1], value) for value in values], dim=1)


__all__ = ["PGD"]
