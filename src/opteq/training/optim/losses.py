"""The training loss: cross-entropy and the papers' additional terms."""

from __future__ import annotations

from types import TracebackType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq import regularizers
from opteq.common.errors import UserError
from opteq.couplings import Coupling, Features
from opteq.data.dataset import IGNORE_INDEX
from opteq.models import Classifier, equilibria
from opteq.states import sum_over_sample, working_dtype
from opteq.training.optim.jacobian import JacobianPenalty
from opteq.training.recipe.sections import LossSection


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy, summed over images.

    Args:
        logits: ``(B, K)``, or ``(B, K, h, w)`` for segmentation.
        labels: classes ``(B,)``, soft labels ``(B, K)``, or label maps ``(B, h, w)`` with 255 for no class. For label
            maps the loss of an image is the sum over its pixels with a class, divided by the number of all its pixels,
            so that every such pixel has the same weight.
        label_smoothing: weight that is spread over all classes.
    """
    if logits.ndim == 2:
        return F.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=label_smoothing)
    total = F.cross_entropy(
        logits.float(), labels, reduction="sum", label_smoothing=label_smoothing, ignore_index=IGNORE_INDEX
    )
    return total / labels[0].numel()


class Loss:
    """The loss of a batch, summed over its images.

    A sum, because the images of one optimiser step may be divided among processes and micro-batches; divided by their
    total number it gives the same gradient for every division.

    - cross-entropy, with ``label_smoothing``;
    - ``weight * R(features)``, for R among ridge, l1, incay, decorrelation and hsic: a prior in the loss. (Priors in
      the objective and in SAM are options of the models.) ``features`` is the input of the last linear layer. Where R
      depends on the whole batch (decorrelation, hsic), it is computed per micro-batch;
    - ``augmented * sum over neighbours of (lambda D - H)`` over the branches of the equilibrium: the augmented loss
      that the MOptEq paper trains POptEq with, its sign corrected (the printed one rewards what it should penalise).
      Features have length 1 in it unless ``normalised = false``, where longer features lower it without end;
    - ``jacobian * |J|_F^2 / n``, estimated by one random vector a batch: it keeps equilibria easy to find where no
      bound on the weights does (see :func:`~opteq.training.optim.jacobian.squared_jacobian`). With a limit r it is
      ``jacobian * max(0, radius^2 - r^2)`` of J's spectral radius: what does not endanger convergence is free.

    Forward hooks read the features; leaving the context removes them.
    """

    def __init__(
        self,
        options: LossSection,
        label_smoothing: float,
        model: Classifier,
        jacobian: float = 0.0,
        jacobian_limit: float | None = None,
    ) -> None:
        self.options = options
        self.label_smoothing = label_smoothing
        self.jacobian = jacobian
        self._penalty = JacobianPenalty(model, jacobian_limit) if jacobian else None
        self._classes: int = model.config["num_classes"]
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
        if self._penalty is not None:
            self._penalty.close()

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum over the batch; call it directly after the forward pass that computed ``logits``.

        Args:
            logits: ``(B, K)``, or ``(B, K, h, w)`` for segmentation.
            labels: as :func:`cross_entropy` takes them.
        """
        if logits.ndim not in (2, 4) or logits.shape[1] != self._classes:  # of a model of one's own
            raise UserError(
                f"the model's head returns the shape {tuple(logits.shape)} for {len(labels)} images of {self._classes} "
                f"classes; it should return logits ({len(labels)}, {self._classes})"
            )
        total = cross_entropy(logits, labels, self.label_smoothing)
        if self._regularizer is not None:
            assert self.features is not None
            values = self._regularizer.value(self.features)
            # A value of the whole batch comes in equal shares per sample, whose sum it is.
            scale = values.numel() if self._regularizer.couples_batch else 1
            total = total + self.options.weight * scale * values.sum()
        if self.options.augmented:
            assert self.branches is not None
            options = self.options
            term = augmented_loss(self.branches, options.diversity, options.smoothing, options.normalised)
            total = total + self.options.augmented * len(logits) * term
        if self._penalty is not None:
            total = total + self.jacobian * self._penalty.take()
        self.features = self.branches = None
        return total

    def _see_features(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.features = inputs[0]

    def _see_branches(self, _: nn.Module, __: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        if isinstance(output, Tensor):
            raise UserError(
                "loss.augmented needs the features of every branch, but this model's equilibrium returns one tensor; "
                'use a model whose branches are not fused, such as popteq-193k with fusion = "none"'
            )
        self.branches = output


def _last_linear(model: Classifier) -> nn.Linear:
    layers = [module for module in model.head.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise UserError("loss.regularizer needs a head with a linear layer: it applies to that layer's input")
    return layers[-1]


def augmented_loss(features: Features, diversity: float, smoothing: float = 0.0, normalised: bool = False) -> Tensor:
    """``sum over neighbours of (lambda D - H)``, averaged over the batch: a term for a training loss.

    It asks of a network without the fusion, such as POptEq, by training what MOptEq does by construction; the paper
    compares the two. (The paper prints it with the opposite sign, which would reward what its objective punishes.)

    Longer features make H larger without limit: the term is unbounded below. With ``normalised`` every branch has
    length 1 in each sample first, so that H is a cosine and the term at least minus the number of branches.

    Args:
        features: one tensor per branch.
        diversity: lambda.
        smoothing: tau, see :func:`opteq.couplings.diversity`.
        normalised: scale the features of every branch to length 1, per sample.
    """
    coupling = Coupling(diversity, smoothing)
    if normalised:
        features = tuple(_unit_samples(z) for z in features)
    return 2 * torch.stack(list(coupling.terms(features).values())).sum(dim=0).mean()


def _unit_samples(z: Tensor) -> Tensor:
    """``z / |z|`` per sample; a sample of zeros stays zero."""
    wide = z.to(working_dtype(z.dtype))
    length = sum_over_sample(wide.square()).clamp_min(torch.finfo(wide.dtype).tiny ** 0.5).sqrt()
    return wide / length.reshape(-1, *[1] * (z.ndim - 1))
