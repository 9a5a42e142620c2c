"""A penalty times a step length that differs by sample: its prox is what a proximal gradient step applies."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.penalties.base import ElementwisePenalty, Linearised, Penalty, multiplication
from opteq.penalties.piecewise import HardTanh, Identity, ReLU, SoftThreshold
from opteq.states import may_branch_on_values, per_row

_STEPS = 40


class ScaledPenalty:
    """``t f`` for a convex elementwise penalty f and a positive t per sample.

    With ``y = sigma(a)`` the prox of ``t f`` at u solves ``t a + (1 - t) sigma(a) = u``, whose left side increases in
    a. Penalties whose activation is made of simple pieces have a closed form; for others the root is bracketed and
    found by Newton's method with bisection, down to the rounding of both sides. On a CPU that ends where all entries
    are there; elsewhere the number of steps is fixed, so that the host has nothing to wait for.

    Args:
        penalty: f.
        length: t, ``(B,)``.
    """

    lipschitz = 1.0  # as f is convex

    def __init__(self, penalty: Penalty, length: Tensor) -> None:
        self.penalty = _check(penalty)
        self.length = length
        self.has_total = penalty.has_total
        # An indicator function, or nothing: t changes neither.
        self._unscaled = type(self.penalty) in (Identity, ReLU, HardTanh)
        self._threshold = self.penalty.threshold if type(self.penalty) is SoftThreshold else None

    def prox(self, u: Tensor) -> Tensor:
        """The prox of ``t f``, in the shape and dtype of u."""
        penalty = self.penalty
        if self._unscaled:
            return penalty.prox(u)
        t = per_row(self.length, u)
        if self._threshold is not None:
            edge = self._threshold * t
            return u - torch.maximum(torch.minimum(u, edge), -edge)
        # The root is a constant. Newton steps, which move nothing, carry derivatives: two of them the second, too.
        root = self._root(u.detach(), t)
        slope = t + (1 - t) * penalty.derivative(root)
        for _ in range(2):
            root = root + (u - t * root - (1 - t) * penalty.prox(root)) / slope
        return penalty.prox(root)

    def linearise(self, u: Tensor) -> Linearised:
        """Multiplication by the square root of the prox's slope at u, its own adjoint."""
        return multiplication(self.derivative(u))

    def derivative(self, u: Tensor) -> Tensor:
        """The slope of the prox at u: ``s / (t + (1 - t) s)`` with s the activation's slope at the root."""
        penalty = self.penalty
        if self._unscaled:
            return penalty.derivative(u)
        t = per_row(self.length, u)
        if self._threshold is not None:
            return (u.abs() > self._threshold * t).to(u.dtype)
        slope = penalty.derivative(self._root(u, t))
        return slope / (t + (1 - t) * slope)

    def total(self, y: Tensor) -> Tensor:
        """``f`` of each sample, without t."""
        return self.penalty.total(y)

    def project(self, y: Tensor) -> Tensor:
        """The nearest point of f's domain."""
        return self.penalty.project(y)

    def distance_to_kink(self, u: Tensor) -> Tensor | None:
        """How far each entry is from a kink of the prox; None where that is not piecewise linear."""
        if self._threshold is not None:
            return (u.abs() - self._threshold * per_row(self.length, u)).abs()
        return self.penalty.distance_to_kink(u) if self._unscaled else None

    @torch.no_grad()
    def _root(self, u: Tensor, t: Tensor) -> Tensor:
        """The a with ``t a + (1 - t) sigma(a) = u``."""
        penalty = self.penalty
        error = t * u + (1 - t) * penalty.prox(u) - u
        # The left side has slopes between min(t, 1) and max(t, 1), since those of sigma lie in [0, 1].
        reach = error.abs() / t.clamp(max=1)
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


def _check(penalty: Penalty) -> ElementwisePenalty:
    if not isinstance(penalty, ElementwisePenalty):
        raise TypeError(
            f"the penalty of an objective should act on every entry alone (an ElementwisePenalty); "
            f"got {type(penalty).__name__}"
        )
    if penalty.lipschitz > 1:
        raise ValueError(
            f"the penalty of an objective should be convex, so that its activation has slopes of at most 1; "
            f"{penalty.name} has {penalty.lipschitz:g}"
        )
    return Identity() if type(penalty) is SoftThreshold and not penalty.threshold else penalty
