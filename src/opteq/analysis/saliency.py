"""Saliency maps: the gradient of a class score with respect to the pixels, averaged over noisy images."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.analysis.terms import evaluation_mode


def saliency_map(
    model: nn.Module,
    x: Tensor,
    target: Tensor | None = None,
    samples: int = 16,
    noise: float = 0.1,
    blur: float | None = None,
    seed: int = 0,
) -> Tensor:
    """The sensitivity of a class score to each pixel, ``(B, height, width)``, not negative.

    The score is the class's logit minus the mean of all logits: a constant added to all logits changes neither the
    prediction nor the map. Its gradient is averaged over noisy copies of the image (SmoothGrad), since the gradient at
    a single image is discontinuous where activations have kinks. The norm over channels is then blurred.

    Args:
        model: maps images ``(B, C, height, width)`` to logits ``(B, classes)``; it runs in evaluation mode.
        x: the images as the model takes them.
        target: the class to explain for each image, ``(B,)``; the predicted ones by default.
        samples: noisy copies; 1 with ``noise=0`` is the plain gradient.
        noise: standard deviation of the noise, relative to each image's range of values. 0.1 is small enough to leave
            predictions unchanged and large enough to average over kinks.
        blur: standard deviation of the blur in pixels, 0 for none; 1/32 of the longer side by default, which leaves
            small images as they are.
        seed: of the noise.

    >>> weight = torch.tensor([[1.0, 0.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False))
    >>> _ = model[1].weight.data.copy_(weight)
    >>> saliency_map(model, torch.ones(1, 1, 2, 2), target=torch.tensor([0]))
    tensor([[[0.5000, 0.0000],
             [0.0000, 1.0000]]])
    """
    if x.ndim != 4:
        raise ValueError(f"a saliency map needs images (batch, channels, height, width); got {tuple(x.shape)}")
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples should be a positive integer; got {samples!r}")
    for name, value in (("noise", noise), ("blur", blur)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} should be a finite number of at least 0; got {value!r}")
    sigma = max(x.shape[2:]) / 32 if blur is None else blur
    with evaluation_mode(model):
        if target is None:
            with torch.no_grad():
                target = model(x).argmax(dim=1)
        elif target.shape != x.shape[:1]:
            raise ValueError(
                f"target should have one class per image, shape ({x.shape[0]},); got {tuple(target.shape)}"
            )
        mean = _mean_gradient(model, x.detach(), target, samples, noise, seed)
    return _blur(mean.square().sum(dim=1).sqrt(), sigma)


def _mean_gradient(model: nn.Module, x: Tensor, target: Tensor, samples: int, noise: float, seed: int) -> Tensor:
    flat = x.flatten(1)
    spread = noise * (flat.amax(dim=1) - flat.amin(dim=1)).reshape(-1, 1, 1, 1)
    # Drawn on the CPU in float32, the same for all images: independent of device, precision and batch.
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros_like(x)
    for _ in range(samples):
        step = torch.randn(x.shape[1:], generator=generator).to(x)
        noisy = (x + spread * step).requires_grad_()
        with torch.enable_grad():
            logits = model(noisy)
            score = logits.gather(1, target[:, None]).squeeze(1) - logits.mean(dim=1)
            # Samples are independent in evaluation mode, so the gradient of the sum has each sample's gradient.
            (slope,) = torch.autograd.grad(score.sum(), noisy)
        total += slope
    return total / samples


def _blur(maps: Tensor, sigma: float) -> Tensor:
    """A separable Gaussian blur; at the border the weights are renormalised."""
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
