"""Solvers that take exactly ``max_steps`` steps, to measure the cost of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from opteq.solvers import Anderson, Picard
from opteq.solvers.linear import CG
from opteq.solvers.loop import Rule

# No residual is negative, so no sample converges.
_NEVER = -1.0


@dataclass(frozen=True, kw_only=True)
class ExactAnderson(Anderson):
    """Anderson acceleration for exactly ``max_steps`` steps."""

    def rule(self, device: torch.device, eps: float) -> Rule:
        """The parent's rule without convergence."""
        return replace(super().rule(device, eps), tol=_NEVER)


@dataclass(frozen=True, kw_only=True)
class ExactPicard(Picard):
    """Plain iteration for exactly ``max_steps`` steps."""

    def rule(self, device: torch.device, eps: float) -> Rule:
        """The parent's rule without convergence."""
        return replace(super().rule(device, eps), tol=_NEVER)


@dataclass(frozen=True, kw_only=True)
class ExactCG(CG):
    """Conjugate gradients for exactly ``max_steps`` steps."""

    def rule(self, dtype: torch.dtype, device: torch.device, eps: float) -> Rule:
        """The parent's rule without convergence."""
        return replace(super().rule(dtype, device, eps), tol=_NEVER)
