"""The whole objective, written by a user as on paper: the layer is its argmin."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from opteq import penalties
from opteq.common.curvature.certify import certify_objective, start_for, without_memory
from opteq.common.returns import check_terms, try_once
from opteq.penalties import Penalty
from opteq.penalties.scaled import ScaledPenalty
from opteq.problems.base import WrittenProblem, check_called
from opteq.problems.certificate import Certificate, for_finite_weights, unknown
from opteq.problems.proximal import ProximalGradient
from opteq.problems.written import WrittenMap
from opteq.solvers.fista import FISTA
from opteq.solvers.linear.lanczos import largest_curvature
from opteq.states import Layout, State, blocks, map_state, working_dtype

_MARGIN = 1.1
"""By how much a step length stays below what a measured curvature allows."""


class Objective(WrittenProblem):
    """A network defined by the objective that it minimises: ``sum of terms(y, x) + penalty(y)``.

    - ``terms(y, x)``: a dict of named terms with one value per sample each; their sum is the smooth part F.
    - ``penalty``: the non-smooth part h, an activation's name or a convex :class:`~opteq.penalties.Penalty`
      (``"relu"``: y is not negative); None by default. One that mixes entries declares its ``degree``.
    - ``start(x)``: the initial state, which also sets its shape; zeros like ``x`` by default.
    - ``features(y)``: the output of the layer; ``y`` by default.
    - ``curvature``: a bound on the largest eigenvalue of F's Hessian: a number, one value per sample ``(B,)``, or a
      method of ``x`` that returns either. It sets the step length. None measures it for every batch.
    - ``takes_tuples = True`` in the class: ``x`` may be a tuple of tensors, such as images and noise levels.

    The step is the proximal gradient step ``prox_{t h}(y - t grad F(y; x))`` with t the inverse of the curvature. The
    fixed points are the stationary points of ``F + h`` for every t. :class:`~opteq.FISTA`, the default solver of
    objectives, detects and corrects a curvature that is too small.

    >>> import torch, opteq
    >>> class Denoiser(opteq.Objective):
    ...     def terms(self, y, x):
    ...         rough = (y[:, 1:] - y[:, :-1]).square().sum(1)
    ...         return {"data": 0.5 * (y - x).square().sum(1), "smoothness": 0.5 * rough}
    >>> layer = opteq.Equilibrium(Denoiser())
    >>> layer(torch.tensor([[0.0, 3.0, 0.0]])).detach().round(decimals=3)
    tensor([[0.7500, 1.5000, 0.7500]])
    """

    # Without values here: a class attribute would hide a module or a buffer of that name.
    penalty: str | Penalty | None
    curvature: Any

    def terms(self, y: Any, x: Any) -> dict[str, Tensor]:
        """The terms of the smooth part, one value per sample each."""
        raise NotImplementedError(f"{type(self).__name__} should define terms(y, x), one value per sample each")

    def bind(self, x: Any) -> ProximalGradient:
        """The objective with ``x`` bound, and a step length per sample."""
        check_called(self)
        return BoundObjective(self, x)

    def default_solver(self) -> FISTA:
        """FISTA, which stops by the estimated distance to the minimiser, with a high limit on the steps."""
        return FISTA(measure="error", max_steps=10_000)

    def default_gradient_steps(self) -> int:
        """As many as conjugate gradients may need where conditioning is 1e4."""
        return 1000

    @for_finite_weights
    def certificate(self) -> Certificate:
        """From terms made of squares, potentials, linear maps and differences; override it where more is known."""
        chosen = getattr(self, "penalty", None)
        if chosen is not None and penalties.get(chosen).lipschitz > 1:
            return unknown("the penalty is not convex")
        start, curvature = start_for(self, WrittenProblem.start), getattr(self, "curvature", None)
        known = certify_objective(without_memory(self).terms, start, self._returns_state(), curvature)
        return Certificate(**known)


class BoundObjective(WrittenMap, ProximalGradient):
    """A user's objective with its input bound, and a step length per sample from its curvature."""

    def __init__(self, problem: Objective, x: Any) -> None:
        super().__init__(problem, x)
        try_once(problem, self.smooth_parts, self._start, "terms(y, x)", differentiable=True)
        declared = getattr(problem, "curvature", None)
        declared = declared(x) if callable(declared) else declared
        with torch.no_grad():
            self.length = 1 / (self._measured_curvature() * _MARGIN if declared is None else self._declared(declared))
        chosen = getattr(problem, "penalty", None)
        written = penalties.get("identity" if chosen is None else chosen)
        self.penalised = chosen is not None
        self.penalty = ScaledPenalty(written, self.length)
        self.has_merit = written.has_total

    def smooth_parts(self, y: State) -> dict[str, Tensor]:
        terms = self.bound.call("terms", y, self.bound.x)
        return check_terms(terms, blocks(y)[0].shape[0], f"{type(self.bound.module).__name__}.terms(y, x)")

    def _measured_curvature(self) -> Tensor:
        start = map_state(Tensor.detach, self._start)
        if (first := blocks(start)[0]).is_meta:  # there is nothing to measure
            return torch.ones(len(first), device="meta")
        curvature, dtype = largest_curvature(self.hessian_at(start), start), Layout.of(start).dtype
        # Where the start knows nothing (a Hessian of zeros, or of NaN), any length is as good as another.
        return torch.where(curvature > torch.finfo(dtype).tiny ** 0.5, curvature, 1.0).to(dtype)

    def _declared(self, curvature: Any) -> Tensor:
        first = blocks(self._start)[0]
        batch, dtype = first.shape[0], working_dtype(first.dtype)
        name = f"{type(self.bound.module).__name__}.curvature"
        if isinstance(curvature, Tensor):
            if curvature.shape not in ((), (batch,)):
                raise ValueError(
                    f"{name} should be one number, or one per sample of shape ({batch},); "
                    f"got shape {tuple(curvature.shape)}"
                )
            curvature = curvature.detach().to(first.device, dtype).expand(batch)
            return torch.where(curvature > 0, curvature, torch.nan)  # without a look at values: the status will tell
        if isinstance(curvature, bool) or not isinstance(curvature, Real) or not 0 < float(curvature) < math.inf:
            raise ValueError(f"{name} should be a positive finite number, a tensor or None; got {curvature!r}")
        return torch.full((batch,), float(curvature), dtype=dtype, device=first.device)
