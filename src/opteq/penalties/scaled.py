"""A penalty times a step length that differs by sample: its prox is what a proximal gradient step applies."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from opteq.penalties.base import ElementwisePenalty, Linearised, Penalty, multiplication, of_its_prox
from opteq.states import may_branch_on_values, per_row, working_dtype

_STEPS = 40


class ScaledPenalty:
    """``t f`` for a convex penalty f and a positive t per sample.

    Where f has a degree, its prox gives that of ``t f``. Other penalties are elementwise: with ``y = sigma(a)`` the
    prox of ``t f`` at u solves ``t a + (1 - t) sigma(a) = u``, whose left side increases in a. The root is bracketed,
    and found by Newton's method with bisection, down to the rounding of both sides. On a CPU that ends where all
    entries are there; elsewhere the number of steps is fixed, so that the host has nothing to wait for.

    Args:
        penalty: f.
        length: t, ``(B,)``.
    """

    lipschitz = 1.0  # as f is convex

    def __init__(self, penalty: Penalty, length: Tensor) -> None:
        self.penalty: Any = _check(penalty)
        self._degree = of_its_prox(penalty, "degree")
        self.length = length
        self.has_total = penalty.has_total

    def prox(self, u: Tensor) -> Tensor:
        """The prox of ``t f``, in the shape and dtype of u."""
        penalty = self.penalty
        if self._degree == 0:
            return cast(Tensor, penalty.prox(u))
        if self._degree == 1:
            at, length = self._unit(u)
            return cast(Tensor, length * penalty.prox(at)).to(u.dtype)
        t = per_row(self.length, u)
        # The root is a constant. Newton steps, which move nothing, carry derivatives: two of them the second, too.
        root = self._root(u.detach(), t)
        slope = t + (1 - t) * penalty.derivative(root)
        for _ in range(2):
            root = root + (u - t * root - (1 - t) * penalty.prox(root)) / slope
        return cast(Tensor, penalty.prox(root))

    def linearise(self, u: Tensor) -> Linearised:
        """The derivative of the prox at u."""
        if isinstance(self.penalty, ElementwisePenalty):
            return multiplication(self.derivative(u))
        return cast(Linearised, self.penalty.linearise(self._unit(u)[0].to(u.dtype)))

    def derivative(self, u: Tensor) -> Tensor:
        """The slope of an elementwise prox at u: ``s / (t + (1 - t) s)`` with s the activation's slope at the root."""
        penalty = self.penalty
        if self._degree is not None:
            return cast(Tensor, penalty.derivative(self._unit(u)[0])).to(u.dtype)
        t = per_row(self.length, u)
        slope = penalty.derivative(self._root(u, t))
        return cast(Tensor, slope / (t + (1 - t) * slope))

    def total(self, y: Tensor) -> Tensor:
        """``f`` of each sample, without t."""
        return cast(Tensor, self.penalty.total(y))

    def project(self, y: Tensor) -> Tensor:
        """The nearest point of f's domain."""
        return cast(Tensor, self.penalty.project(y))

    def distance_to_kink(self, u: Tensor) -> Tensor | None:
        """How far each entry is from a kink of the prox; None where that is not piecewise linear."""
        if self._degree is None:
            return None
        at, t = self._unit(u)
        distance = self.penalty.distance_to_kink(at)
        return None if distance is None else t * distance

    def _unit(self, u: Tensor) -> tuple[Tensor, Tensor | float]:
        """``u / t`` and t where f grows like a norm: the prox of ``t f`` at u is t times that of f at ``u / t``."""
        if self._degree == 0:
            return u, 1.0
        t = per_row(self.length, u).to(working_dtype(u.dtype))
        return u / t, t

    @torch.no_grad()
    def _root(self, u: Tensor, t: Tensor) -> Tensor:
        """The a with ``t a + (1 - t) sigma(a) = u``."""
        penalty = self.penalty
        error = t * u + (1 - t) * penalty.prox(u) - u
        # The left side has slopes between min(t, 1) and max(t, 1), since those of sigma lie in [0, 1].
        # Where sigma is flat the root is at the end itself: it should lie inside, or bisection would take over.
        reach = 1.01 * error.abs() / t.clamp(max=1)
        low, high = u - reach, u + reach
        root, early, eps = u, may_branch_on_values(u), torch.finfo(u.dtype).eps
        for _ in range(_STEPS):
            error = t * root + (1 - t) * penalty.prox(root) - u
            # Rounding of the two sides: beyond it a step would go by noise, and a bisection lead away from the root.
            there = error.abs() <= 2 * eps * (u.abs() + (t * root).abs())
            if early and bool((there | error.isnan()).all()):
                break
            low, high = torch.where(error < 0, root, low), torch.where(error > 0, root, high)
            newton = root - error / (t + (1 - t) * penalty.derivative(root))
            inside = (newton > low) & (newton < high)
            root = torch.where(there, root, torch.where(inside, newton, (low + high) / 2))
        return root


def _check(penalty: Penalty) -> Penalty:
    degree = of_its_prox(penalty, "degree")
    if isinstance(degree, bool) or degree not in (None, 0, 1):
        raise ValueError(
            f"{type(penalty).__name__}.degree should be 0 (a constraint), 1 (a norm) or None; got {degree!r}"
        )
    if not isinstance(penalty, ElementwisePenalty) and degree is None:
        raise TypeError(
            f"the penalty of an objective should act on every entry alone (an ElementwisePenalty), or declare its "
            f"degree: 0 for a constraint, 1 for a norm; got {type(penalty).__name__}"
        )
    if penalty.lipschitz > 1:
        raise ValueError(
            f"the penalty of an objective should be convex, so that its activation has slopes of at most 1; "
            f"{penalty.name} has {penalty.lipschitz:g}"
        )
    return penalty
