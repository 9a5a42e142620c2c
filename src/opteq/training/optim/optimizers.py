"""SGD and AdamW as a recipe names them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opteq.training.recipe.sections import OptimizerSection

_NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def optimizer(options: OptimizerSection, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser of a recipe for all weights of ``model`` that want a gradient.

    On a GPU its update is one fused kernel; elsewhere torch's own choice is kept. With ``decay_all = false``
    vectors and single numbers (biases, gains, learnable alphas) and everything inside a normalisation are not decayed:
    pulling a gain towards zero is no prior worth having.
    """
    groups = _groups(options, model)
    fused = all(weight.is_cuda for group in groups for weight in group["params"])
    extra: dict[str, Any] = {"fused": True} if fused else {}
    if options.name == "adamw":
        return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, **extra)
    return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, nesterov=options.nesterov, **extra)


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
