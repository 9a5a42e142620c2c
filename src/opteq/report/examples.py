"""A few test pictures, explained: what was predicted, what was minimised for them, and where the model looked."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.analysis.attention import attention_map, patch_weights
from opteq.analysis.saliency import saliency_map
from opteq.analysis.terms import equilibrium_inputs, objective_terms
from opteq.common.errors import ConvergenceWarning
from opteq.report.examine import Examination, Pictures
from opteq.states import blocks

_WRONG, _ALL = 3, 6


@dataclass(frozen=True)
class Example:
    """One picture.

    Attributes:
        pixels: uint8 ``(C, H, W)``.
        label, predicted: classes.
        likely: the most probable classes with their probabilities, best first.
        terms: one entry a layer: its name, and the terms at the start and at the equilibrium.
        reasons: why a layer has no terms, by its name.
        view: a map ``(height, width)``: weights of patches, or how strongly pixels move the score.
        kind: ``"attention"`` or ``"saliency"``.
    """

    pixels: Tensor
    label: int
    predicted: int
    likely: list[tuple[int, float]]
    terms: list[tuple[str, dict[str, float], dict[str, float]]]
    reasons: dict[str, str]
    view: Tensor
    kind: str

    @property
    def right(self) -> bool:
        """Whether the prediction is."""
        return self.label == self.predicted


def explain(model: nn.Module, pictures: Pictures, found: Examination) -> list[Example]:
    """Up to three mistakes and as many right ones as make six."""
    rows = choose(found, pictures.labels[found.order])
    if not rows:
        return []
    device = next(model.parameters()).device
    indices = found.order[rows]
    x = pictures.batch(indices, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        layers = [terms.merged() for terms in objective_terms(model, x)]
        views, kind = look(model, x, found.predictions[rows].to(device))
    top = found.probabilities[rows].topk(min(3, found.probabilities.shape[1]), dim=1)
    return [
        Example(
            pixels=pictures.images[indices[place]],
            label=int(pictures.labels[indices[place]]),
            predicted=int(found.predictions[row]),
            likely=list(zip(top.indices[place].tolist(), top.values[place].tolist(), strict=True)),
            terms=[(one.layer, _numbers(one.start, place), _numbers(one.end, place)) for one in layers if one.end],
            reasons={one.layer: one.reason for one in layers if one.reason is not None},
            view=views[place].cpu(),
            kind=kind,
        )
        for place, row in enumerate(rows)
    ]


def choose(found: Examination, labels: Tensor) -> list[int]:
    """Rows of the examination: the surest mistakes, the least sure right one, then sure ones; new classes first."""
    sureness = found.probabilities.gather(1, found.predictions[:, None]).squeeze(1)
    sureness = sureness.nan_to_num(nan=0.0)
    right = found.predictions == labels
    order = sureness.argsort(descending=True, stable=True).tolist()
    wrong = _spread_over_classes([row for row in order if not right[row]], labels, _WRONG)
    good = [row for row in order if right[row]]
    # From the middle of the right ones: neither the easiest of all nor the narrowest escape, which comes first.
    ordinary = good[len(good) // 2 :] + good[: len(good) // 2]
    narrow = good[-1:]
    rest = [row for row in ordinary if row not in narrow]
    taken = _spread_over_classes(rest, labels, _ALL - len(wrong) - len(narrow))
    return [*wrong, *narrow, *taken][:_ALL]


def look(model: nn.Module, x: Tensor, predicted: Tensor) -> tuple[Tensor, str]:
    """Attention where the equilibria weigh patches (GEQ), saliency of the predicted class elsewhere."""
    size = (x.shape[2], x.shape[3])
    maps = []
    for _, layer, given in equilibrium_inputs(model, x):
        with torch.no_grad():
            hidden = layer.problem(given)
            weighs = bool(patch_weights(hidden, hidden.start())) and all(part.ndim == 4 for part in blocks(given))
        if weighs:
            maps.append(attention_map(layer, given, size))
    if maps:
        return torch.stack(maps).mean(dim=0), "attention"
    return saliency_map(model, x, predicted), "saliency"


def _spread_over_classes(rows: list[int], labels: Tensor, most: int) -> list[int]:
    """The first rows, one a class before a class comes twice."""
    seen: set[int] = set()
    first: list[int] = []
    later: list[int] = []
    for row in rows:
        label = int(labels[row])
        (later if label in seen else first).append(row)
        seen.add(label)
    return [*first, *later][: max(0, most)]


def _numbers(terms: dict[str, Tensor], place: int) -> dict[str, float]:
    return {name: float(values[place]) for name, values in terms.items()}
