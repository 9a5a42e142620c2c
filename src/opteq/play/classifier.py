"""What the page shows of a classifier: the solve step by step, evidence, terms and certificate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from opteq.analysis.evidence import class_evidence
from opteq.analysis.rescaled import rescaled, scalable_terms
from opteq.analysis.terms import state_terms
from opteq.common.errors import ConvergenceError, ConvergenceWarning, UserError, unknown_name
from opteq.equilibrium import Equilibrium
from opteq.models import Classifier
from opteq.models.prediction import ImageLike, Preprocessing
from opteq.problems.hidden import BoundMap
from opteq.report.charts.images import heatmap, image_data_url, signed_map
from opteq.report.html.numbers import with_symbols
from opteq.states import State, blocks, inner, like

MOST_STEPS = 60
"""Plain steps that the page can go through one by one."""

MOST_CHANNELS = 16
"""State maps in one image."""

LARGEST_FACTOR = 4.0


class ClassifierSession:
    """A classifier behind the page. Requests are answered one at a time: terms are scaled in the model itself.

    Args:
        model: on the CPU, in evaluation mode.
        name: of the run.
    """

    def __init__(self, model: Classifier, name: str) -> None:
        self.model = model.eval()
        self.name = name
        self.preprocessing = Preprocessing.of(model.config)
        self._lock = Lock()
        self.layer = model.equilibrium if isinstance(model.equilibrium, Equilibrium) else None
        self._certificate = self._read_certificate()
        self._terms = self._read_terms()

    def describe(self) -> dict[str, Any]:
        """What the page needs to know before an image is given."""
        return {
            "kind": "classifier",
            "name": self.name,
            "model": self.model.config["name"],
            "classes": list(self.preprocessing.classes),
            "size": list(self.preprocessing.size or (32, 32)),
            "grey": self.preprocessing.channels == 1,
            "terms": self._terms,
            "tol": None if self.layer is None else self.layer.solver.tol,
            "certificate": self._certificate,
        }

    def answer(self, image: ImageLike, tol: float | None = None, factors: Mapping[str, float] | None = None) -> Any:
        """The answer for an image, as plain values for JSON.

        Args:
            image: see :meth:`~opteq.models.Classifier.predict`.
            tol: tolerance of the solver; the model's own by default.
            factors: of the terms of the objective, from 0 to 4.
        """
        factors = self._checked(tol, factors or {})
        pixels = self.preprocessing.pixels(image)
        x = self.preprocessing.normalised(pixels)[None].to(next(self.model.parameters()).dtype)
        with self._lock, self._changed(tol, factors):
            found = class_evidence(self.model, x)
            with torch.no_grad():
                logits = self.model(x)[0]
                report = None if self.layer is None or self.layer.last is None else self.layer.last[0]
                steps = [] if self.layer is None else self._steps(x, self.layer.solver.tol)
        channels = sorted(
            ((f"{b}.{c}" if len(found.features) > 1 else str(c), share) for b, one in enumerate(found.channels())
             for c, share in enumerate(one[0].tolist())),
            key=lambda pair: -abs(pair[1]),
        )  # fmt: skip
        return finite({
            "image": image_data_url(pixels),
            "logits": logits.tolist(),
            "probabilities": logits.softmax(0).tolist(),
            "predicted": int(found.target[0]),
            "evidence": {
                "rival": int(found.rival[0]),
                "difference": float(found.difference[0]),
                "channels": channels[:8],
                "others": sum(share for _, share in channels[8:]),
                "bias": float(found.bias[0]),
                "pixels": signed_map(found.pixels[0].sum(dim=0)),
                "exact": found.affine,
            },
            "solve": None if report is None else {
                "method": report.method,
                "steps": int(report.steps[0]),
                "residual": float(report.residual[0]),
                "status": report.status[0].name,
                "message": report.status[0].message,
                "tol": report.tol,
            },
            "steps": steps,
        })  # fmt: skip

    def _checked(self, tol: float | None, factors: Mapping[str, float]) -> dict[str, float]:
        if tol is not None and not (isinstance(tol, int | float) and 1e-10 <= tol < 1):
            raise UserError(f"the tolerance should lie in [1e-10, 1); got {tol!r}")
        for name, factor in factors.items():
            if name not in self._terms:
                raise unknown_name("term", name, self._terms)
            good = isinstance(factor, int | float) and not isinstance(factor, bool) and 0 <= factor <= LARGEST_FACTOR
            if not good:
                raise UserError(f"the factor of {name} should lie in [0, {LARGEST_FACTOR:g}]; got {factor!r}")
        return {name: float(factor) for name, factor in factors.items() if factor != 1}

    @contextmanager
    def _changed(self, tol: float | None, factors: Mapping[str, float]) -> Iterator[None]:
        layer = self.layer
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            if layer is None:
                yield
                return
            solver = layer.solver
            try:
                if tol is not None:
                    layer.solver = replace(solver, tol=tol, max_steps=max(solver.max_steps, 200))
                if factors:
                    with rescaled(layer, factors):
                        yield
                else:
                    yield
            finally:
                layer.solver = solver

    def _steps(self, x: Tensor, tol: float) -> list[dict[str, Any]]:
        """Plain steps from the start until the tolerance: residual, terms, probabilities and state maps."""
        assert self.layer is not None
        hidden = self.layer.problem(self.model.stem(x))  # with its terms scaled, inside _changed
        y, found, damping = hidden.start(), [], hidden.damping

        def mixed(a: Tensor, b: Tensor) -> Tensor:
            return a + _rows(damping, a) * (b - a)

        for _ in range(MOST_STEPS + 1):
            image = hidden.step(y)
            change = _map(lambda a, b: b - a, y, image)
            residual = float((inner(change, change) / inner(image, image).clamp_min(1e-30)).sqrt())
            logits = self.model.head(hidden.features(y))[0]
            terms = _terms(hidden, y)
            found.append({
                "residual": residual,
                "objective": None if terms is None else sum(terms.values()),
                "terms": terms,
                "probabilities": logits.softmax(0).tolist(),
                "state": _montage(y),
            })  # fmt: skip
            if residual <= tol or not math.isfinite(residual):
                break
            y = _map(mixed, y, image)
        return found

    def _read_certificate(self) -> Any:
        if self.layer is None:
            return None
        try:
            certificate = self.layer.problem.certificate()
        except (ValueError, RuntimeError) as error:
            return {"error": str(error)}
        return finite({
            "exists": certificate.exists,
            "unique": certificate.unique,
            "contraction": certificate.contraction,
            "lipschitz": certificate.lipschitz,
            "reasons": {name: with_symbols(reason) for name, reason in certificate.reasons.items()},
        })  # fmt: skip

    def _read_terms(self) -> list[str]:
        if self.layer is None:
            return []
        blank = torch.zeros(1, self.preprocessing.channels, *(self.preprocessing.size or (32, 32)))
        with torch.no_grad():
            return scalable_terms(self.layer.problem(self.model.stem(blank.to(next(self.model.parameters()).dtype))))


def finite(value: Any) -> Any:
    """The same with None in the place of numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inside) for key, inside in value.items()}
    return [finite(inside) for inside in value] if isinstance(value, list | tuple) else value


def _terms(hidden: BoundMap, y: State) -> dict[str, float] | None:
    try:
        found = state_terms(hidden, y)
    except (ValueError, NotImplementedError, ConvergenceError):
        return None
    return {name: float(value[0]) for name, value in found.items()}


def _montage(y: State) -> str | None:
    """The strongest channels of the state as tiles of one image, brighter for larger values."""
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
