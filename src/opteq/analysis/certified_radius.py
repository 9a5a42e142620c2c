"""How far an image may move before the prediction can change: from Lipschitz constants of the parts of a classifier.

A classifier is ``head(equilibrium(stem(x)))``. With constants s of the stem and q of the equilibrium, and ``h[a, b]``
of the difference of the logits a and b as a function of the features, that difference changes by at most ``h[a, b] q s
d`` where the image moves by d (Euclidean norm). So the prediction a stays as long as ``d < min over b of (logit_a -
logit_b) / (h[a, b] q s)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opteq.analysis.local import LocalCertificate, does_as, is_solved, local_certificate
from opteq.analysis.terms import evaluation_mode
from opteq.common.errors import UserError
from opteq.equilibrium import Equilibrium
from opteq.models.blocks.parts import Head
from opteq.models.blocks.pyramid import Pyramid
from opteq.models.blocks.residual import InvertedBlock, ResidualBlock
from opteq.models.classifier import Classifier
from opteq.operators.spectral.norms import module_norm
from opteq.problems.base import is_hooked
from opteq.states import blocks

_CONTRACTIONS = (nn.ReLU, nn.Identity, nn.Dropout, nn.Dropout2d, nn.Flatten, nn.Hardtanh, nn.Tanh, nn.Sigmoid)


@dataclass(frozen=True)
class CertifiedRadius:
    """For each of B images the distance within which the prediction is proved to stay.

    Attributes:
        radius: Euclidean distance, for pixels in 0..1, ``(B,)``.
        predicted: the predicted classes, ``(B,)``.
        source: ``"weights"`` where the equilibrium's Lipschitz constant is that of its certificate, for all inputs at
            once; ``"point"`` where it is :func:`~opteq.analysis.local_certificate`'s.
        probability: that the radius is right for a given image; 1 where it comes from the weights.
    """

    radius: Tensor
    predicted: Tensor
    source: str
    probability: float


class CertifiedClassifier:
    """The Lipschitz constants of a classifier, computed once, and certified radii from them.

    The radii hold for exact equilibria, so give the layer a tight tolerance; they are 0 where a solve failed.
    Certificates at the point hold for the equilibrium that continues the computed one; it is the only one if the
    certificate says so. Where the model has changed since, its constants are computed again.

    Args:
        model: with one equilibrium layer between stem and head.
        std: by which pixels were divided.

    Raises:
        UserError: a part of the model has no known Lipschitz constant; the message names it.
    """

    def __init__(self, model: Classifier, std: tuple[float, ...] = (1.0,)) -> None:
        self.model, self.std = model, std
        self._computed_for: tuple[list[object], list[Tensor]] = ([], [])
        self._compute()

    def _compute(self) -> None:
        """The constants, anew where the model has changed."""
        model, problem = self.model, _check(self.model).problem
        values = [value.detach() for value in (*model.parameters(), *model.buffers())]
        skipped = ("last", "training")
        form: list[object] = [(value.dtype, value.device) for value in values]
        for part in model.modules():
            options = {name: one for name, one in vars(part).items() if name[0] != "_" and name not in skipped}
            form.append((type(part), is_hooked(part), repr(options)))
        if form == self._computed_for[0] and all(map(torch.equal, values, self._computed_for[1])):
            return
        with evaluation_mode(model):
            self.stem = lipschitz_bound(model.stem) / min(self.std)
            self.equilibrium = problem.certificate().lipschitz
        binds, certifies = (next(k for k in type(problem).__mro__ if n in vars(k)) for n in ("bind", "certificate"))
        if is_hooked(problem) or not issubclass(certifies, binds):  # a certificate of something else
            self.equilibrium = None
        self._computed_for = form, [value.clone() for value in values]

    @torch.no_grad()
    def __call__(
        self, x: Tensor, steps: int = 60, failure: float = 1e-3, local: LocalCertificate | None = None
    ) -> CertifiedRadius:
        """The radii of images ``(B, C, h, w)``, normalised as the model takes them.

        Args:
            x: the images.
            steps: Lanczos steps of the certificate at the point.
            failure: probability that its bounds fail for an image.
            local: that certificate, where it is known already.
        """
        self._compute()
        model, layer = self.model, _check(self.model)
        with evaluation_mode(model):
            given = model.stem(x)
            features = layer(given)
            assert layer.last is not None
            solved = is_solved(layer, layer.last[0])
            scores = model.head(features)
            logits = scores.double()
            assert isinstance(model.head, Head)
            slopes = head_slopes(model.head, blocks(features))
            predicted = logits.argmax(dim=1)
            rounding = 16 * torch.finfo(scores.dtype).eps * logits.abs().amax(dim=1, keepdim=True)
            margin = logits.gather(1, predicted[:, None]) - logits - rounding
            # Of the own class: no margin, and nothing to fear.
            distance = torch.where(margin > 0, margin / slopes[predicted].clamp_min(1e-300), 0.0)
            distance = distance.scatter(1, predicted[:, None], torch.inf).amin(dim=1)
            distance = torch.where(solved, distance, 0.0)
            if self.equilibrium is not None:
                radius = distance / max(self.equilibrium, 1e-300) / self.stem
                return CertifiedRadius(radius, predicted, "weights", 1.0)
            if local is None:
                try:
                    local = local_certificate(layer, given, steps, failure)
                except ValueError as error:
                    raise UserError(str(error)) from error
            if local.radius is None:
                raise UserError(
                    "the Lipschitz constant of the equilibrium is known neither from the weights nor in a ball around "
                    "a point: its objective is not piecewise quadratic"
                )
            reach = torch.minimum(distance / local.lipschitz.double(), local.radius.double())
            return CertifiedRadius(torch.nan_to_num(reach, nan=0.0) / self.stem, predicted, "point", local.probability)


def _check(model: Classifier) -> Equilibrium:
    """The layer of a model, or an error unless that is a chain of parts that do what their classes say."""
    if not isinstance(model, Classifier) or not isinstance(model.equilibrium, Equilibrium):
        raise UserError("a certified radius needs a classifier with one equilibrium layer between stem and head")
    head = model.head
    if not isinstance(head, Head):
        raise UserError(
            f"a certified radius needs the head of opteq's own models; this one has a {type(head).__name__}"
        )
    if head.fuse is not None:
        raise UserError("a certified radius needs a head without a fusion of branches before it")
    if not isinstance(head.linear, nn.Linear):
        raise UserError("a certified radius needs classes, and this model has none")
    expected = {head: Head, head.pool: nn.AdaptiveAvgPool2d, head.dropout: nn.Dropout, head.linear: nn.Linear}
    for part, kind in {model.equilibrium: Equilibrium, **expected}.items():
        if not does_as(part, kind):
            raise _unknown(part)
    # A wrapper of the model's forward, for mixed precision say, calls the same parts.
    if any([type(model).forward is not Classifier.forward, model._forward_hooks, model._forward_pre_hooks]):
        raise _unknown(model)
    return model.equilibrium


def _unknown(module: nn.Module) -> UserError:
    why = ": it has hooks, which may change what it gives" if is_hooked(module) else ""
    return UserError(f"no Lipschitz constant is known for a {type(module).__name__}{why}")


def head_slopes(head: Head, features: tuple[Tensor, ...]) -> Tensor:
    """``h[a, b]``: a Lipschitz constant of ``logit_a - logit_b`` by the features, ``(K, K)``, in evaluation mode.

    With the weights w of the difference, the scales s of the batch normalisation and n pixels in a window of the
    pooling, it is ``(sum w^2 s^2 / n)^1/2`` by Cauchy and Schwarz.
    """
    assert isinstance(head.linear, nn.Linear)
    weight = head.linear.weight.double()
    if does_as(head.hidden, nn.Identity):
        widths = [len(_scale(norm)) * _windows(head.pool) for norm in head.norms]
        shared = head.readout == "mean"
        parts = [weight / len(widths)] * len(widths) if shared else list(torch.split(weight, widths, dim=1))
        scaled = torch.cat(
            [
                part * _per_entry(norm, head.pool) * _pooling(head.pool, z.shape[2:])
                for part, norm, z in zip(parts, head.norms, features, strict=True)
            ],
            dim=1,
        )
        return torch.cdist(scaled, scaled, compute_mode="donot_use_mm_for_euclid_dist")
    inner = max(
        float(_scale(norm).max()) * _pooling(head.pool, z.shape[2:])
        for norm, z in zip(head.norms, features, strict=True)
    )
    if head.readout == "mean":
        inner /= math.sqrt(len(features))
    between = torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist")
    return between * inner * lipschitz_bound(head.hidden)


def lipschitz_bound(module: nn.Module) -> float:
    """A Lipschitz constant of a module in evaluation mode, for stems and hidden layers as this library makes them.

    A normalisation is folded into the convolution before it, whose norm is then certified for images of every size.

    >>> lipschitz_bound(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) > 0
    True
    """
    if does_as(module, Pyramid):
        return _pyramid(module)
    if does_as(module, ResidualBlock) and does_as(module.weights, nn.Identity):
        return lipschitz_bound(module.past) + lipschitz_bound(module.first) * lipschitz_bound(module.second)
    if does_as(module, InvertedBlock) and does_as(module.weights, nn.Identity):
        bound = math.prod(lipschitz_bound(part) for part in (module.spread, module.widen, module.narrow))
        return lipschitz_bound(module.past) + bound
    if does_as(module, nn.Sequential):
        return math.prod(lipschitz_bound(part) for part in _fold_batch_norms(list(module)))
    if does_as(module, nn.BatchNorm2d):
        return float(_scale(module).max())
    if does_as(module, nn.LayerNorm):
        weight = 1.0 if module.weight is None else float(module.weight.detach().abs().max())
        return weight / math.sqrt(module.eps)
    if does_as(module, *_CONTRACTIONS):
        return 1.0
    plain = {"padding": (0, (0, 0)), "divisor_override": (None,), "stride": (getattr(module, "kernel_size", None),)}
    if does_as(module, nn.AvgPool2d) and all(getattr(module, name) in right for name, right in plain.items()):
        return 1.0  # windows do not overlap; at the border they may hold a single pixel
    norm = module_norm(module)
    if norm is None:
        raise _unknown(module)
    return float(norm)


def _fold_batch_norms(parts: list[nn.Module]) -> list[nn.Module]:
    """The parts, each batch normalisation that follows a convolution multiplied into its kernel."""
    result: list[nn.Module] = []
    for part in parts:
        before = result[-1] if result else None
        if before is not None and does_as(part, nn.BatchNorm2d) and does_as(before, nn.Conv2d):
            names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
            sizes: dict[str, Any] = {name: getattr(before, name) for name in names}
            # A copy would keep what parametrises the weight.
            scaled = nn.Conv2d(**sizes, padding_mode=before.padding_mode, device="meta")
            scaled.weight = nn.Parameter(before.weight.detach() * _scale(part).to(before.weight)[:, None, None, None])
            result[-1] = scaled
        else:
            result.append(part)
    return result


def _pyramid(stem: Pyramid) -> float:
    """Of all its levels together: the root of the sum of squares over the branches that see them."""
    constants, so_far = [], 1.0
    for stage in stem.stages:
        so_far *= lipschitz_bound(stage)
        constants.append(so_far)
    return so_far if stem.levels is None else math.hypot(*(constants[level] for level in stem.levels))


def _scale(norm: nn.Module) -> Tensor:
    """By what a batch normalisation multiplies every channel, ``(C,)``; of a sequence, its first part times a bound."""
    if does_as(norm, nn.Sequential):
        first, *rest = norm
        return _scale(first) * math.prod(map(lipschitz_bound, rest))
    if not does_as(norm, nn.BatchNorm2d):
        raise _unknown(norm)
    if norm.running_var is None:
        raise UserError("batch normalisation without running averages has no Lipschitz constant")
    weight = torch.ones_like(norm.running_var) if norm.weight is None else norm.weight.detach()
    return weight.double().abs() / (norm.running_var.double() + norm.eps).sqrt()


def _per_entry(norm: nn.Module, pool: nn.AdaptiveAvgPool2d) -> Tensor:
    """The scale of every entry after pooling and flattening."""
    return _scale(norm).repeat_interleave(_windows(pool))


def _windows(pool: nn.AdaptiveAvgPool2d) -> int:
    """How many windows there are."""
    return _side(pool) ** 2


def _pooling(pool: nn.AdaptiveAvgPool2d, size: torch.Size) -> float:
    """The norm of the pooling, row by row and column by column: ``1 / sqrt(n)`` for disjoint windows of n pixels."""
    sides = [nn.functional.adaptive_avg_pool1d(torch.eye(side).double(), _side(pool)) for side in size]
    return math.prod(float(torch.linalg.matrix_norm(side, 2)) for side in sides)


def _side(pool: nn.AdaptiveAvgPool2d) -> int:
    assert isinstance(pool.output_size, int)  # as Head makes it
    return pool.output_size


__all__ = ["CertifiedClassifier", "CertifiedRadius", "lipschitz_bound"]
