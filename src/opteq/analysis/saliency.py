"""Which pixels a prediction hangs on: the gradient of a class's score, averaged over slightly noisy pictures."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.analysis.terms import evaluating


def saliency_map(
    model: nn.Module,
    x: Tensor,
    target: Tensor | None = None,
    samples: int = 16,
    noise: float = 0.1,
    blur: float | None = None,
    seed: int = 0,
) -> Tensor:
    """How strongly each pixel moves the score of a class, ``(B, height, width)``, not negative.

    The score is the class's logit minus the mean of all logits: adding one number to every logit changes no
    prediction, so it should change no map. Its gradient is averaged over noisy copies of the picture (SmoothGrad),
    since that of a single picture jumps from pixel to pixel wherever an activation has a kink, and its length over
    channels is then blurred a little. Values are in score per unit of input; only their ratios matter for a picture.

    Args:
        model: maps pictures ``(B, C, height, width)`` to logits ``(B, classes)``; it runs in evaluation mode.
        x: the pictures as the model takes them.
        target: the class to explain for each picture, ``(B,)``; the predicted ones by default.
        samples: noisy copies; 1 with ``noise=0`` is the plain gradient.
        noise: standard deviation of the noise as a share of each picture's range of values. A tenth is small enough
            to leave predictions as they are and large enough to average over kinks.
        blur: standard deviation of the blur in pixels, 0 for none; 1/32 of the longer side by default, which leaves
            small pictures as they are.
        seed: of the noise, so that a map can be drawn again.

    >>> weight = torch.tensor([[1.0, 0.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False))
    >>> _ = model[1].weight.data.copy_(weight)
    >>> saliency_map(model, torch.ones(1, 1, 2, 2), target=torch.tensor([0]))
    tensor([[[0.5000, 0.0000],
             [0.0000, 1.0000]]])
    """
    if x.ndim != 4:
        raise ValueError(f"a saliency map needs pictures (batch, channels, height, width); got {tuple(x.shape)}")
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples should be a whole number of at least 1; got {samples!r}")
    for name, value in (("noise", noise), ("blur", blur)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} should be a finite number of at least 0; got {value!r}")
    sigma = max(x.shape[2:]) / 32 if blur is None else blur
    with evaluating(model):
        if target is None:
            with torch.no_grad():
                target = model(x).argmax(dim=1)
        elif target.shape != x.shape[:1]:
            raise ValueError(
                f"target should have one class a picture, shape ({x.shape[0]},); got {tuple(target.shape)}"
            )
        mean = _mean_gradient(model, x.detach(), target, samples, noise, seed)
    return _blurred(mean.square().sum(dim=1).sqrt(), sigma)


def _mean_gradient(model: nn.Module, x: Tensor, target: Tensor, samples: int, noise: float, seed: int) -> Tensor:
    flat = x.flatten(1)
    spread = noise * (flat.amax(dim=1) - flat.amin(dim=1)).reshape(-1, 1, 1, 1)
    # Drawn on the CPU in float32, one for all pictures: a map depends on no device, precision or batch mate.
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros_like(x)
    for _ in range(samples):
        step = torch.randn(x.shape[1:], generator=generator).to(x)
        noisy = (x + spread * step).requires_grad_()
        with torch.enable_grad():
            logits = model(noisy)
            score = logits.gather(1, target[:, None]).squeeze(1) - logits.mean(dim=1)
            # Pictures do not see each other in evaluation mode, so one gradient of the sum is that of each.
            (slope,) = torch.autograd.grad(score.sum(), noisy)
        total += slope
    return total / samples


def _blurred(maps: Tensor, sigma: float) -> Tensor:
    """A Gaussian blur, one direction after the other; at the border the weights that fall outside are left out."""
    radius = min(math.ceil(3 * sigma), min(maps.shape[1:]) - 1)
    if sigma < 0.3 or radius < 1:  # a neighbour's weight would be below half a percent
        return maps
    distance = torch.arange(-radius, radius + 1, dtype=maps.dtype, device=maps.device)
    weights = torch.exp(-(distance**2) / (2 * sigma**2))
    result = maps[:, None]
    for shape, padding in (((1, 1, -1, 1), (radius, 0)), ((1, 1, 1, -1), (0, radius))):
        kernel = weights.reshape(shape)
        reached = F.conv2d(torch.ones_like(result[:1]), kernel, padding=padding)
        result = F.conv2d(result, kernel, padding=padding) / reached
    return result.squeeze(1)
