"""Solvers that take all their steps, whatever the residual: the cost of a step needs a known number of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from opteq.solvers import Anderson, Picard
from opteq.solvers.linear import CG
from opteq.solvers.loop import Rule

# No residual is below zero, so no row ever counts as finished.
_NEVER = -1.0


@dataclass(frozen=True, kw_only=True)
class ExactAnderson(Anderson):
    """Anderson acceleration for exactly ``max_steps`` steps."""

    def _rule(self, tol: float, device: torch.device) -> Rule:
        return replace(super()._rule(tol, device), tol=_NEVER)


@dataclass(frozen=True, kw_only=True)
class ExactPicard(Picard):
    """Plain iteration for exactly ``max_steps`` steps."""

    def _rule(self, tol: float, device: torch.device) -> Rule:
        return replace(super()._rule(tol, device), tol=_NEVER)


@dataclass(frozen=True, kw_only=True)
class ExactCG(CG):
    """Conjugate gradients for exactly ``max_steps`` steps."""

    def rule(self, dtype: torch.dtype, device: torch.device, eps: float) -> Rule:
        """As the parent's, without an end before the last step."""
        return replace(super().rule(dtype, device, eps), tol=_NEVER)
