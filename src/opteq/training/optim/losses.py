"""What is minimised: cross-entropy, and the papers' additions to it."""

from __future__ import annotations

from types import TracebackType

import torch.nn.functional as F
from torch import Tensor, nn

from opteq import regularizers
from opteq.common.errors import UserError
from opteq.couplings import augmented_loss
from opteq.data.dataset import IGNORED
from opteq.models import Classifier, equilibria
from opteq.training.recipe.sections import LossSection


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy as a sum over pictures.

    Args:
        logits: ``(B, K)``, or ``(B, K, H, W)`` for every pixel.
        labels: classes ``(B,)``, shares of classes ``(B, K)``, or classes of pixels ``(B, H, W)``, 255 for none. A
            picture's loss is then the sum over its pixels with a label, divided by the number of all its pixels: so
            every such pixel counts the same, in whatever part of a batch it is.
        label_smoothing: share that is spread over all classes.
    """
    if logits.ndim == 2:
        return F.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=label_smoothing)
    total = F.cross_entropy(
        logits.float(), labels, reduction="sum", label_smoothing=label_smoothing, ignore_index=IGNORED
    )
    return total / labels[0].numel()


class Loss:
    """The loss of a batch, as a sum over its pictures.

    A sum, because the pictures of one optimiser step may be spread over processes and accumulated parts: whoever
    divides by their whole number gets the same gradient however they were spread.

    - cross-entropy, with ``label_smoothing``;
    - ``weight * R(features)``, for R among ridge, l1, incay, decorrelation and hsic: a prior through the loss, beside
      the ways inside the objective and by SAM, which are options of the models. ``features`` is what the last linear
      layer sees. Where R is a property of a whole batch (decorrelation, hsic) it is that of the part at hand;
    - ``augmented * sum over neighbours of (lambda D - H)`` over the branches of the equilibrium: the augmented loss
      that the MOptEq paper trains POptEq with, its sign corrected (as printed it would reward what it means to punish).

    The features are caught on their way by hooks, so nothing is computed twice; leave the context to remove them.
    """

    def __init__(self, options: LossSection, label_smoothing: float, model: Classifier) -> None:
        self.options = options
        self.label_smoothing = label_smoothing
        self.features: Tensor | None = None
        self.branches: tuple[Tensor, ...] | None = None
        self._hooks = []
        self._regularizer = None
        if options.regularizer is not None:
            self._regularizer = regularizers.get(options.regularizer)
            self._hooks.append(_last_linear(model).register_forward_pre_hook(self._see_features))
        if options.augmented:
            layers = equilibria(model)
            if not layers:
                raise UserError("loss.augmented needs a model with branches, such as popteq-193k; this one has none")
            self._hooks.append(layers[0][1].register_forward_hook(self._see_branches))

    def __enter__(self) -> Loss:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum over the batch, to be called right after the forward pass that gave ``logits``.

        Args:
            logits: ``(B, K)``, or ``(B, K, H, W)`` for every pixel.
            labels: theirs, as :func:`cross_entropy` takes them.
        """
        total = cross_entropy(logits, labels, self.label_smoothing)
        if self._regularizer is not None:
            assert self.features is not None
            values = self._regularizer.value(self.features)
            # A property of the whole batch comes as equal shares; as a mean over pictures it is that property.
            scale = values.numel() if self._regularizer.couples_batch else 1
            total = total + self.options.weight * scale * values.sum()
        if self.options.augmented:
            assert self.branches is not None
            term = augmented_loss(self.branches, self.options.diversity, self.options.smoothing)
            total = total + self.options.augmented * len(logits) * term
        self.features = self.branches = None
        return total

    def _see_features(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.features = inputs[0]

    def _see_branches(self, _: nn.Module, __: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        if isinstance(output, Tensor):
            raise UserError(
                "loss.augmented needs the features of every branch, but this model's equilibrium hands on one tensor; "
                'use a model whose branches are not fused, such as popteq-193k with fusion = "none"'
            )
        self.branches = output


def _last_linear(model: Classifier) -> nn.Linear:
    layers = [module for module in model.head.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise UserError("loss.regularizer needs a head with a linear layer, whose input is what it is applied to")
    return layers[-1]
