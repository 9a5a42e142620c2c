"""SGD and AdamW from a recipe."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opteq.training.optim.skipping import start_momentum
from opteq.training.recipe.sections import OptimizerSection

_NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def optimizer(options: OptimizerSection, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser of a recipe for all parameters of ``model`` that require a gradient.

    On a GPU the update is fused. With ``decay_all = false`` weight decay leaves out vectors and scalars (biases, gains,
    learnable alphas) and all parameters of normalisation layers.
    """
    groups = _groups(options, model)
    fused = all(weight.is_cuda for group in groups for weight in group["params"])
    extra: dict[str, Any] = {"fused": True} if fused else {}
    if options.name == "adamw":
        return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, **extra)
    sgd = torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, nesterov=options.nesterov, **extra)
    return start_momentum(sgd)


def _groups(options: OptimizerSection, model: nn.Module) -> list[dict[str, Any]]:
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    spared: set[str] = set()
    if not options.decay_all:
        spared = {name for name, weight in weights.items() if weight.ndim < 2}
        for prefix, module in model.named_modules():
            if isinstance(module, _NORMALISATIONS):
                spared |= {f"{prefix}.{name}" for name, _ in module.named_parameters()}
    decayed = [weight for name, weight in weights.items() if name not in spared]
    free = [weight for name, weight in weights.items() if name in spared]
    groups = [(decayed, options.weight_decay), (free, 0.0)]
    return [{"params": members, "weight_decay": decay} for members, decay in groups if members]
