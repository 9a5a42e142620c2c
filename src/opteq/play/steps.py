"""Plain steps of a layer, one by one: what the slider of the page goes through."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from opteq.common.errors import ConvergenceError
from opteq.equilibrium import Equilibrium
from opteq.models import Classifier
from opteq.problems.hidden import BoundMap
from opteq.report.charts.images import heatmap
from opteq.states import State, blocks, inner, like

MOST_STEPS = 60
"""Plain steps that the page can go through one by one."""

MOST_CHANNELS = 16
"""State maps in one image."""


def plain_steps(model: Classifier, layer: Equilibrium, x: Tensor) -> list[dict[str, Any]]:
    """From the start until the tolerance of the layer's solver: residual, terms, probabilities and state maps."""
    hidden = layer.problem(model.stem(x))
    y, steps_taken, damping = hidden.start(), [], hidden.damping

    def mixed(a: Tensor, b: Tensor) -> Tensor:
        return a + _rows(damping, a) * (b - a)

    for _ in range(MOST_STEPS + 1):
        image = hidden.step(y)
        change = _map(lambda a, b: b - a, y, image)
        residual = float((inner(change, change) / inner(image, image).clamp_min(1e-30)).sqrt())
        logits = model.head(hidden.features(y))[0]
        terms = _terms(hidden, y)
        steps_taken.append({
            "residual": residual,
            "objective": None if terms is None else sum(terms.values()),
            "terms": terms,
            "probabilities": logits.softmax(0).tolist(),
            "state": _montage(y),
        })  # fmt: skip
        if residual <= layer.solver.tol or not math.isfinite(residual):
            break
        y = _map(mixed, y, image)
    return steps_taken


def _terms(hidden: BoundMap, y: State) -> dict[str, float] | None:
    try:
        terms = hidden.terms(y)
    except (ValueError, NotImplementedError, ConvergenceError):
        return None
    return {name: float(value[0]) for name, value in terms.items()}


def _montage(y: State) -> str | None:
    """The first channels of the state as tiles of one image, brighter for larger values."""
    maps = [one for block in blocks(y) if block.ndim == 4 for one in block[0]]
    if not maps:
        return None
    height, width = max((one.shape[0], one.shape[1]) for one in maps)
    chosen = [
        torch.nn.functional.interpolate(one[None, None].float(), (height, width), mode="nearest")[0, 0]
        for one in maps[:MOST_CHANNELS]
    ]
    columns = math.ceil(math.sqrt(len(chosen)))
    tiles = torch.full((math.ceil(len(chosen) / columns) * (height + 1), columns * (width + 1)), math.nan)
    for place, one in enumerate(chosen):
        row, column = divmod(place, columns)
        top, left = row * (height + 1), column * (width + 1)
        tiles[top : top + height, left : left + width] = one
    known = tiles[torch.isfinite(tiles)]
    return heatmap(tiles, float(known.min()), float(known.max())) if known.numel() else None


def _map(function: Any, a: State, b: State) -> State:
    return like(a, tuple(function(one, other) for one, other in zip(blocks(a), blocks(b), strict=True)))


def _rows(damping: float | Tensor, y: Tensor) -> float | Tensor:
    return damping.reshape(-1, *[1] * (y.ndim - 1)).to(y) if isinstance(damping, Tensor) else damping
