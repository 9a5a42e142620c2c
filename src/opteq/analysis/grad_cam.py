"""Grad-CAM: where in the features at the equilibrium the evidence for a class lies (Selvaraju et al. 2017)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opteq.analysis.terms import evaluation_mode
from opteq.models.classifier import Classifier
from opteq.states import blocks


def grad_cam(model: Classifier, x: Tensor, target: Tensor | None = None) -> Tensor:
    """Maps ``(B, height, width)`` of the evidence for a class, not negative, at the size of the images.

    The channels of every branch's features are summed, each weighted by the mean over pixels of the gradient of the
    class's logit. Maps of coarser branches are upsampled bilinearly and added. Negative values are set to zero.

    Args:
        model: runs in evaluation mode; its mode is restored.
        x: images as the model takes them, ``(B, C, height, width)``.
        target: the class to explain for each image, ``(B,)``; the predicted ones by default.

    >>> import opteq.models
    >>> grad_cam(opteq.models.create("opteq-digits", in_channels=1), torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 8, 8])
    """
    if not isinstance(model, Classifier):
        raise TypeError(f"Grad-CAM needs a classifier of opteq.models; got {type(model).__name__}")
    with evaluation_mode(model):
        with torch.no_grad():
            features = model._before_head(x)
        leaves = tuple(part.detach().requires_grad_() for part in blocks(features))
        if any(part.ndim != 4 for part in leaves):
            raise ValueError(f"Grad-CAM needs features (B, C, h, w); got {[tuple(part.shape) for part in leaves]}")
        with torch.enable_grad():
            logits = model.head(leaves if isinstance(features, tuple) else leaves[0])
            if target is None:
                target = logits.detach().argmax(dim=1)
            elif target.shape != x.shape[:1]:
                raise ValueError(
                    f"target should have one class per image, shape ({x.shape[0]},); got {tuple(target.shape)}"
                )
            # Samples are independent in evaluation mode, so the gradient of the sum has each sample's gradient.
            slopes = torch.autograd.grad(logits.gather(1, target[:, None]).sum(), leaves)
    size = (x.shape[2], x.shape[3])
    maps = [
        (slope.mean(dim=(2, 3), keepdim=True) * part.detach()).sum(dim=1, keepdim=True)
        for slope, part in zip(slopes, leaves, strict=True)
    ]
    large = [F.interpolate(one.float(), size=size, mode="bilinear", align_corners=False) for one in maps]
    return torch.stack(large).sum(dim=0).clamp_min(0).squeeze(1)
