"""Evidence for the predicted class against the runner-up, split over branches, channels, regions and pixels.

In evaluation mode the usual classifier is piecewise affine. The end of its head, ``logits = A r + b``, is affine in the
activations r of the features, so the difference of two logits is ``sum_j (A[a, j] - A[c, j]) r_j`` plus that of the
biases: every activation has a share, and the shares add up exactly. Below that, the equilibrium of a problem with a
piecewise linear activation is affine in its input as long as no unit changes sides, so that the difference is also
``<g, x>`` plus a constant, with g its (implicit) gradient at the image x.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from opteq.analysis.rescaled import Rescaled
from opteq.analysis.terms import evaluation_mode
from opteq.common.errors import UserError
from opteq.equilibrium import Equilibrium
from opteq.models.blocks.parts import Head
from opteq.models.classifier import Classifier
from opteq.operators import Operator
from opteq.penalties import HardTanh, Identity, LeakyReLU, ReLU, SoftThreshold
from opteq.problems import DeepOptEq, MOptEq, OptEq, Parallel, POptEq, Problem
from opteq.states import blocks

_PIECEWISE_LINEAR = (HardTanh, Identity, LeakyReLU, ReLU, SoftThreshold)
_AFFINE = (
    nn.Conv2d, nn.Linear, _BatchNorm, nn.ReLU, nn.LeakyReLU, nn.Hardtanh, nn.Identity, nn.Dropout, nn.Dropout2d,
    nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.MaxPool2d, nn.Flatten, Operator,
)  # fmt: skip


@dataclass(frozen=True)
class Evidence:
    """Shares of ``logits[target] - logits[rival]``, per image. A positive share is evidence for the target.

    Attributes:
        target, rival: the two classes, ``(B,)``.
        difference: of their logits, ``(B,)``.
        features: the share of every activation of every branch, a tuple of ``(B, channels, h, w)``.
        bias: the share of the last layer's bias, ``(B,)``. The shares of features and bias sum to the difference.
        pixels: the share of every pixel, ``(B, channels, h, w)``, relative to an image of the mean color.
        offset: the difference that the affine map at this image gives for the mean color, ``(B,)``. The shares of
            pixels and the offset sum to the difference.
        affine: whether the model is piecewise affine, so that pixels' shares are exact as long as no unit crosses zero.
            For other models they are those of the first-order expansion.
    """

    target: Tensor
    rival: Tensor
    difference: Tensor
    features: tuple[Tensor, ...]
    bias: Tensor
    pixels: Tensor
    offset: Tensor
    affine: bool

    def branches(self) -> Tensor:
        """The share of every branch, ``(B, branches)``."""
        return torch.stack([share.flatten(1).sum(dim=1) for share in self.features], dim=1)

    def channels(self) -> tuple[Tensor, ...]:
        """The share of every channel of every branch, a tuple of ``(B, channels)``."""
        return tuple(share.flatten(2).sum(dim=2) for share in self.features)

    def regions(self) -> Tensor:
        """The share of every place of the finest branch, ``(B, h, w)``; that of a coarser place is spread evenly."""
        maps = [share.sum(dim=1) for share in self.features]
        size = max((one.shape[1], one.shape[2]) for one in maps)
        return torch.stack([_spread(_spread(one, size[0], 1), size[1], 2) for one in maps]).sum(dim=0)


def class_evidence(model: Classifier, x: Tensor, target: Tensor | None = None, rival: Tensor | None = None) -> Evidence:
    """The evidence for a class against another, at the equilibrium.

    Args:
        model: runs in evaluation mode; its mode is restored.
        x: images as the model takes them, ``(B, channels, h, w)``.
        target: a class per image, ``(B,)``; the predicted one by default.
        rival: likewise; the best of all others by default.

    >>> import opteq.models
    >>> found = class_evidence(opteq.models.create("opteq-digits", in_channels=1), torch.rand(2, 1, 8, 8))
    >>> total = found.branches().sum(1) + found.bias
    >>> torch.allclose(total, found.difference, atol=1e-4), found.regions().shape
    (True, torch.Size([2, 8, 8]))
    """
    if not isinstance(model, Classifier):
        raise TypeError(f"evidence needs a classifier of opteq.models; got {type(model).__name__}")
    x = x.detach().requires_grad_()
    with evaluation_mode(model), torch.enable_grad(), _frozen_scales(model.head):
        with _activations(model.head) as kept:
            handed_on = model._before_head(x)
            logits = model.head(handed_on)
        if logits.ndim != 2 or logits.shape[1] < 2:
            raise UserError(f"evidence needs logits of two classes or more per image; got {tuple(logits.shape)}")
        target, rival = _pair(logits.detach(), target, rival)
        rows = torch.arange(len(x), device=x.device)
        difference = logits[rows, target] - logits[rows, rival]
        # Samples are independent in evaluation mode, so the gradient of the sum has each sample's gradient.
        tensors = tuple(kept) or blocks(handed_on)
        *slopes, at_pixels = torch.autograd.grad(difference.sum(), (*tensors, x))
    with torch.no_grad():
        shares = tuple(slope * tensor for slope, tensor in zip(slopes, tensors, strict=True))
        pixels = at_pixels * x
        total = torch.stack([share.flatten(1).sum(dim=1) for share in shares]).sum(dim=0)
        offset = difference - pixels.flatten(1).sum(dim=1)
    return Evidence(
        target,
        rival,
        difference.detach(),
        tuple(share.detach() for share in shares),
        (difference - total).detach(),
        pixels.detach(),
        offset.detach(),
        piecewise_affine(model),
    )


def piecewise_affine(model: nn.Module) -> bool:
    """Whether a model in evaluation mode is known to be affine in its input wherever no unit changes sides."""
    inside: set[int] = set()
    for layer in model.modules():
        if isinstance(layer, Equilibrium):
            if not _affine_problem(layer.problem):
                return False
            inside |= {id(part) for part in layer.problem.modules() if isinstance(part, Operator)}
    leaves = [part for part in model.modules() if not any(part.children()) and not isinstance(part, Equilibrium)]
    return all(isinstance(leaf, _AFFINE) for leaf in leaves if id(leaf) not in inside)


def _affine_problem(problem: Problem) -> bool:
    if isinstance(problem, Rescaled):
        return _affine_problem(problem.problem)
    if isinstance(problem, Parallel | POptEq):
        return all(_affine_problem(part) for part, _ in problem.parts())
    if isinstance(problem, MOptEq):
        return isinstance(problem.penalty, _PIECEWISE_LINEAR) and not problem.coupling.diversity
    if isinstance(problem, OptEq | DeepOptEq):
        return isinstance(problem.penalty, _PIECEWISE_LINEAR) and problem.regularizer is None
    return False


def _pair(logits: Tensor, target: Tensor | None, rival: Tensor | None) -> tuple[Tensor, Tensor]:
    count, classes = logits.shape
    for name, value in (("target", target), ("rival", rival)):
        if value is not None and (value.shape != (count,) or bool(((value < 0) | (value >= classes)).any())):
            raise UserError(
                f"{name} should have a class from 0 to {classes - 1} for each of {count} images; got {value}"
            )
    target = logits.argmax(dim=1) if target is None else target.to(logits.device)
    if rival is None:
        rival = logits.scatter(1, target[:, None], -torch.inf).argmax(dim=1)
    rival = rival.to(logits.device)
    if bool((target == rival).any()):
        raise UserError("target and rival should be two different classes")
    return target, rival


@contextmanager
def _activations(head: nn.Module) -> Iterator[list[Tensor]]:
    """The activations that the pooling and the last layer of a :class:`Head` read; none for other heads."""
    kept: list[Tensor] = []
    norms = list(head.norms) if isinstance(head, Head) else []
    handles = [norm.register_forward_hook(lambda _module, _given, made: kept.append(made)) for norm in norms]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _frozen_scales(head: nn.Module) -> Iterator[None]:
    """Layer normalisations that divide by a constant, the deviation of the sample: they are affine then."""

    def affine(module: nn.Module, given: tuple[Tensor, ...], _made: Tensor) -> Tensor:
        assert isinstance(module, nn.LayerNorm)
        x = given[0]
        dims = tuple(range(-len(module.normalized_shape), 0))
        centred = x - x.mean(dim=dims, keepdim=True)
        scale = (centred.detach().square().mean(dim=dims, keepdim=True) + module.eps).rsqrt()
        scaled = centred * scale
        weighed = scaled if module.weight is None else scaled * module.weight
        return weighed if module.bias is None else weighed + module.bias

    handles = [part.register_forward_hook(affine) for part in head.modules() if isinstance(part, nn.LayerNorm)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _spread(maps: Tensor, size: int, dim: int) -> Tensor:
    """Shares on a finer grid along one dimension: each is divided among the places that lie in its own."""
    old = maps.shape[dim]
    place = torch.arange(size, device=maps.device) * old // size
    among = torch.bincount(place, minlength=old)[place].to(maps.dtype)
    return maps.index_select(dim, place) / among.reshape([-1 if axis == dim else 1 for axis in range(maps.ndim)])
