"""A classifier on the page: the solve step by step, evidence, terms and certificate."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from opteq.analysis.certified_radius import CertifiedClassifier
from opteq.analysis.evidence import class_evidence
from opteq.analysis.local import LocalCertificate, local_certificate
from opteq.analysis.rescaled import rescaled_terms, scalable_terms
from opteq.common.errors import UserError, unknown_name
from opteq.equilibrium import Equilibrium
from opteq.models import Classifier, equilibria
from opteq.models.prediction import ImageLike, Preprocessing
from opteq.play.plain_values import certificate_of, replace_non_finite
from opteq.play.steps import plain_steps
from opteq.report.charts.images import image_data_url, signed_map
from opteq.states import inner

LARGEST_FACTOR = 4.0

CERTIFIED_TOL = 1e-5
"""A certificate is about an equilibrium: whatever the tolerance of the answer, it is solved to this at least."""

CERTIFIED_STEPS = 30
"""Lanczos steps of a certificate: its bounds are somewhat looser than with more, and it comes sooner."""


RIVALS = 5
"""Classes, the most probable ones, whose distance is estimated: each takes a backward pass."""


class ClassifierSession:
    """A classifier behind the page.

    Terms are scaled in the model itself, so a copy of it answers one request at a time. Certificates take longer, and
    have a copy of their own: answers do not wait for them.

    Args:
        model: on the CPU; it is left as it is.
        name: of the run.
    """

    def __init__(self, model: Classifier, name: str) -> None:
        self.model, self._certified = _evaluation_copy(model), _evaluation_copy(model)
        self.name = name
        self.preprocessing = Preprocessing.of(model.config)
        self._lock, self._certified_lock = Lock(), Lock()
        self.layer = _single_layer(self.model)
        self._certificate = None if self.layer is None else certificate_of(self.layer.problem)
        self._terms = self._read_terms()

    def describe(self) -> dict[str, Any]:
        """The data of the page before an image is given."""
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

    def answer(
        self,
        image: ImageLike,
        tol: float | None = None,
        factors: Mapping[str, float] | None = None,
        rival: int | None = None,
    ) -> Any:
        """The answer for an image, as plain values for JSON.

        Args:
            image: see :meth:`~opteq.models.Classifier.predict`.
            tol: tolerance of the solver; the model's own by default.
            factors: of the terms of the objective, from 0 to 4.
            rival: index of the class that evidence is against; the runner-up by default.
        """
        factors = self._checked(tol, factors or {}, rival)
        pixels = self.preprocessing.pixels(image)
        x = self._input(pixels)
        with self._lock, _temporary_settings(self.layer, tol, factors):
            evidence = class_evidence(self.model, x)
            if rival is not None and rival != int(evidence.target[0]):
                evidence = class_evidence(self.model, x, rival=torch.tensor([rival]))
            with torch.no_grad():
                logits = self.model(x)[0]
                report = None if self.layer is None or self.layer.last is None else self.layer.last[0]
                steps = [] if self.layer is None else plain_steps(self.model, self.layer, x)
        if not bool(logits.isfinite().all()):
            raise UserError("the model's logits are not finite, so it names no class; look at its weights")
        channels = sorted(
            ((f"{b}.{c}" if len(evidence.features) > 1 else str(c), share) for b, one in enumerate(evidence.channels())
             for c, share in enumerate(one[0].tolist())),
            key=lambda pair: -abs(pair[1]),
        )  # fmt: skip
        return replace_non_finite({
            "image": image_data_url(pixels),
            "logits": logits.tolist(),
            "probabilities": logits.softmax(0).tolist(),
            "predicted": int(evidence.target[0]),
            "evidence": {
                "rival": int(evidence.rival[0]),
                "difference": float(evidence.difference[0]),
                "channels": channels[:8],
                "others": sum(share for _, share in channels[8:]),
                "bias": float(evidence.bias[0]),
                "pixels": signed_map(evidence.pixels[0].sum(dim=0)),
                "exact": evidence.affine,
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

    def certify(self, image: ImageLike, tol: float | None = None, factors: Mapping[str, float] | None = None) -> Any:
        """The certificate at the equilibrium of an image, and its distance from another prediction.

        See :func:`~opteq.analysis.local_certificate` and :class:`~opteq.analysis.CertifiedClassifier`.
        """
        factors = self._checked(tol, factors or {})
        layer = _single_layer(self._certified)
        if layer is None:
            return {"error": "this model has no single equilibrium layer"}
        with self._certified_lock, _temporary_settings(layer, min(tol or CERTIFIED_TOL, CERTIFIED_TOL), factors):
            pixels = self.preprocessing.pixels(image)
            with torch.no_grad():
                given = self._certified.stem(self._input(pixels))
            try:
                certificate = local_certificate(layer, given, CERTIFIED_STEPS)
            except ValueError as error:
                return {"error": str(error)}
            assert layer.last is not None
            norm = inner(given, given).sqrt()
            return replace_non_finite({
                "converged": bool(layer.last[0].converged[0]),
                "strict_minimum": bool(certificate.strict_minimum[0]),
                "contraction": float(certificate.contraction[0]),
                "lipschitz": float(certificate.lipschitz[0]),
                "radius": None if certificate.radius is None else float(certificate.radius[0]),
                "norm": float(norm[0]),
                "probability": certificate.probability,
                **self._distances(pixels, certificate),
            })  # fmt: skip

    def _distances(self, pixels: Tensor, local: LocalCertificate) -> dict[str, Any]:
        """How far the image may move, for pixels in 0..1 (Euclidean norm), before another class is predicted.

        ``proved``: nearer than that there is no such image. ``estimated``: where the nearest would be if logits were
        affine in the pixels, over the most probable other classes.
        """
        proved, unproved = None, None
        x, std = self._input(pixels), self.preprocessing.std
        try:
            proved = float(CertifiedClassifier(self._certified, std)(x, local=local).radius[0])
        except UserError as error:
            unproved = str(error)
        at = (x * x.new_tensor(std)[:, None, None]).requires_grad_()  # in the units of pixels in 0..1
        with torch.enable_grad():
            logits = self._certified(at / x.new_tensor(std)[:, None, None])[0]
            best, *others = logits.topk(min(RIVALS + 1, len(logits))).indices.tolist()
            leads = [logits[best] - logits[other] for other in others]
            slopes = [torch.autograd.grad(lead, at, retain_graph=True)[0].norm() for lead in leads]
        ratios = [float(lead.detach() / slope) for lead, slope in zip(leads, slopes, strict=True) if slope > 0]
        return {"proved": proved, "unproved": unproved, "estimated": min(ratios, default=None)}

    def _input(self, pixels: Tensor) -> Tensor:
        return self.preprocessing.normalised(pixels)[None].to(next(self.model.parameters()).dtype)

    def _checked(self, tol: float | None, factors: Mapping[str, float], rival: int | None = None) -> dict[str, float]:
        classes = self.model.config["num_classes"]
        if rival is not None and (isinstance(rival, bool) or not isinstance(rival, int) or not 0 <= rival < classes):
            raise UserError(f"the rival should be the index of a class, 0 to {classes - 1}; got {rival!r}")
        if not isinstance(factors, Mapping):
            raise UserError(f"factors should be given by the names of terms; got {factors!r}")
        if tol is not None and not (isinstance(tol, int | float) and 1e-10 <= tol < 1):
            raise UserError(f"the tolerance should lie in [1e-10, 1); got {tol!r}")
        for name, factor in factors.items():
            if name not in self._terms:
                raise unknown_name("term", name, self._terms)
            good = isinstance(factor, int | float) and not isinstance(factor, bool) and 0 <= factor <= LARGEST_FACTOR
            if not good:
                raise UserError(f"the factor of {name} should lie in [0, {LARGEST_FACTOR:g}]; got {factor!r}")
        return {name: float(factor) for name, factor in factors.items() if factor != 1}

    def _read_terms(self) -> list[str]:
        if self.layer is None:
            return []
        blank = torch.zeros(1, self.preprocessing.channels, *(self.preprocessing.size or (32, 32)))
        with torch.no_grad():
            return scalable_terms(self.layer.problem(self.model.stem(blank.to(next(self.model.parameters()).dtype))))


def _evaluation_copy(model: Classifier) -> Classifier:
    """A copy in evaluation mode; the page says whether it converged, so no layer warns."""
    copied = copy.deepcopy(model).eval()
    for _, layer in equilibria(copied):
        layer.on_failure = "ignore"
    return copied


def _single_layer(model: Classifier) -> Equilibrium | None:
    return model.equilibrium if isinstance(model.equilibrium, Equilibrium) else None


@contextmanager
def _temporary_settings(layer: Equilibrium | None, tol: float | None, factors: Mapping[str, float]) -> Iterator[None]:
    """Inside, a layer has another tolerance and its terms are scaled."""
    if layer is None:
        yield
        return
    solver = layer.solver
    try:
        if tol is not None:
            layer.solver = replace(solver, tol=tol, max_steps=max(solver.max_steps, 200))
        with rescaled_terms(layer, factors) if factors else nullcontext():
            yield
    finally:
        layer.solver = solver
