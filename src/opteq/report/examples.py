"""Example images with prediction, evidence, equilibrium and counterfactuals."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from opteq.analysis.attention import attention_map, patch_weights
from opteq.analysis.evidence import Evidence, class_evidence
from opteq.analysis.rescaled import counterfactuals
from opteq.analysis.terms import equilibrium_inputs
from opteq.common.errors import ConvergenceWarning
from opteq.models import Classifier
from opteq.report.layer_solve import LayerSolve, layer_solves
from opteq.report.predictions import LabelledImages, Predictions
from opteq.states import blocks

_WRONG, _ALL = 3, 6
_CHANNELS = 6
"""Channels whose shares are shown one by one; the others are added up."""


@dataclass(frozen=True)
class ShareOfEvidence:
    """Evidence for the predicted class against the runner-up, of one image.

    Attributes:
        rival: the runner-up.
        shares: by branch, or by channel where there is one branch, and of the bias; they add up to the difference of
            the two logits.
        channels: the strongest channels of all branches, where there are several branches.
        pixels: the share of every pixel, ``(h, w)``.
        offset: what the pixels' shares and it add up to is the difference.
        affine: whether the pixels' shares are exact, see :class:`~opteq.analysis.Evidence`.
    """

    rival: int
    shares: dict[str, float]
    channels: dict[str, float]
    pixels: Tensor
    offset: float
    affine: bool


@dataclass(frozen=True)
class WhatIf:
    """The answer with one term scaled: its class and logit difference, or no equilibrium."""

    layer: str
    term: str
    factor: float
    predicted: int
    difference: float
    converged: bool


@dataclass(frozen=True)
class Example:
    """One image.

    Attributes:
        pixels: uint8 ``(C, h, w)``.
        predicted: the predicted class.
        likely: the most probable classes with their probabilities.
        evidence: for the predicted class against the runner-up.
        label: the true class; None where it is not known.
        name: of the image.
        solves: how each layer was solved.
        what_if: counterfactuals.
        attention: an attention map ``(height, width)`` of GEQ; None for others.
    """

    pixels: Tensor
    predicted: int
    likely: list[tuple[int, float]]
    evidence: ShareOfEvidence
    label: int | None = None
    name: str = ""
    solves: list[LayerSolve] = field(default_factory=list)
    what_if: list[WhatIf] = field(default_factory=list)
    attention: Tensor | None = None

    @property
    def right(self) -> bool | None:
        """Whether the prediction is correct; None where the true class is not known."""
        return None if self.label is None else self.label == self.predicted


def explain(model: Classifier, images: LabelledImages, predictions: Predictions, seconds: float) -> list[Example]:
    """Up to three mistakes, and correct predictions up to six in total."""
    rows = choose(predictions, images.labels[predictions.order])
    if not rows:
        return []
    indices = predictions.order[rows]
    x = images.batch(indices, next(model.parameters()).device)
    return explain_images(model, x, images.images[indices], images.labels[indices].tolist(), seconds=seconds)


def explain_images(
    model: Classifier,
    x: Tensor,
    pixels: Tensor,
    labels: Sequence[int | None],
    names: Sequence[str] | None = None,
    seconds: float = float("inf"),
) -> list[Example]:
    """The explanation of every image.

    Args:
        model: in evaluation mode.
        x: its input, ``(B, C, h, w)``.
        pixels: the same as uint8.
        labels: the true classes; None where they are not known.
        names: of the images.
        seconds: time limit of the counterfactuals.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        evidence = class_evidence(model, x)
        with torch.no_grad():
            probabilities = model(x).float().softmax(dim=1).cpu()
        solves = layer_solves(model, x)
        attention = model_attention(model, x)
        answers = counterfactuals(model, x, seconds=seconds)
    top = probabilities.topk(min(3, probabilities.shape[1]), dim=1)
    rows = range(len(x))

    def what_if(row: int) -> list[WhatIf]:
        pair = int(evidence.target[row]), int(evidence.rival[row])
        return [
            WhatIf(
                one.layer,
                one.term,
                one.factor,
                int(one.logits[row].argmax()),
                float(one.logits[row, pair[0]] - one.logits[row, pair[1]]),
                bool(one.converged[row]),
            )
            for one in answers
        ]

    return [
        Example(
            pixels=pixels[row].cpu(),
            predicted=int(evidence.target[row]),
            likely=list(zip(top.indices[row].tolist(), top.values[row].tolist(), strict=True)),
            evidence=_share(evidence, row),
            label=labels[row],
            name=names[row] if names else "",
            solves=solves[row],
            what_if=what_if(row),
            attention=None if attention is None else attention[row].cpu(),
        )
        for row in rows
    ]


def _share(evidence: Evidence, row: int) -> ShareOfEvidence:
    several = len(evidence.features) > 1
    channels = {
        (f"channel {index}.{place}" if several else f"channel {place}"): share
        for index, branch in enumerate(evidence.channels())
        for place, share in enumerate(branch[row].tolist())
    }
    strongest = dict(sorted(channels.items(), key=lambda pair: -abs(pair[1]))[:_CHANNELS])
    if several:
        shares = {f"branch {index}": share for index, share in enumerate(evidence.branches()[row].tolist())}
    else:
        rest = sum(share for name, share in channels.items() if name not in strongest)
        shares = {**strongest, "other channels": rest} if len(channels) > _CHANNELS else dict(strongest)
    return ShareOfEvidence(
        rival=int(evidence.rival[row]),
        shares={**shares, "bias": float(evidence.bias[row])},
        channels=strongest if several else {},
        pixels=evidence.pixels[row].sum(dim=0).cpu(),
        offset=float(evidence.offset[row]),
        affine=evidence.affine,
    )


def choose(predictions: Predictions, labels: Tensor) -> list[int]:
    """Rows: the most confident mistakes, the least confident correct one, then average correct ones, over classes."""
    confidence = predictions.probabilities.gather(1, predictions.predicted[:, None]).squeeze(1)
    confidence = confidence.nan_to_num(nan=0.0)
    right = predictions.predicted == labels
    order = confidence.argsort(descending=True, stable=True).tolist()
    wrong = _spread_over_classes([row for row in order if not right[row]], labels, _WRONG)
    good = [row for row in order if right[row]]
    # Average confidence: from the middle of the correct ones.
    ordinary = good[len(good) // 2 :] + good[: len(good) // 2]
    narrow = good[-1:]
    rest = [row for row in ordinary if row not in narrow]
    taken = _spread_over_classes(rest, labels, _ALL - len(wrong) - len(narrow))
    return [*wrong, *narrow, *taken][:_ALL]


def model_attention(model: nn.Module, x: Tensor) -> Tensor | None:
    """The attention maps of GEQ, over all its layers; None for other models."""
    maps = []
    for _, layer, given in equilibrium_inputs(model, x):
        with torch.no_grad():
            hidden = layer.problem(given)
            weighs = bool(patch_weights(hidden, hidden.start())) and all(part.ndim == 4 for part in blocks(given))
        if weighs:
            maps.append(attention_map(layer, given, (x.shape[2], x.shape[3])))
    return torch.stack(maps).mean(dim=0) if maps else None


def _spread_over_classes(rows: list[int], labels: Tensor, most: int) -> list[int]:
    """The first rows, preferring classes that have not occurred."""
    seen: set[int] = set()
    first: list[int] = []
    later: list[int] = []
    for row in rows:
        label = int(labels[row])
        (later if label in seen else first).append(row)
        seen.add(label)
    return [*first, *later][: max(0, most)]
