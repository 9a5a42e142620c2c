"""What a solve reports: one report for the forward pass, one for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from opteq.solvers.base import Report
from opteq.solvers.status import Status
from opteq.states import State, blocks


@dataclass
class BackwardSlot:
    """Where the backward pass leaves its report: it runs after the solution was handed out."""

    report: Report | None = None


@dataclass(frozen=True, repr=False)
class Solution:
    """The equilibrium of a batch.

    Attributes:
        features: what the network hands on, with its gradient attached.
        state: the equilibrium itself, with its gradient attached. Features need not hang on it: either may be
            differentiated by inputs and weights, not one by the other.
        report: how the solve went; its fields can be read here directly.
        term_traces: where they were asked for, the terms of the objective at the points of the solve, each
            ``(steps + 1, B)``.
    """

    features: State
    state: State
    report: Report
    slot: BackwardSlot = field(default_factory=BackwardSlot, repr=False)
    term_traces: dict[str, Tensor] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        features, state = (", ".join(str(tuple(t.shape)) for t in blocks(one)) for one in (self.features, self.state))
        return f"Solution(features {features}; state {state}; {self.report})"

    @property
    def objective_trace(self) -> Tensor | None:
        """The objective at the points of the solve, ``(steps + 1, B)``; None where it was not asked for."""
        return None if self.term_traces is None else torch.stack(list(self.term_traces.values())).sum(dim=0)

    @property
    def residual(self) -> Tensor:
        """Relative residual of the state, ``(B,)``."""
        return self.report.residual

    @property
    def steps(self) -> Tensor:
        """Steps taken, ``(B,)``."""
        return self.report.steps

    @property
    def converged(self) -> Tensor:
        """Which samples reached the tolerance, ``(B,)``."""
        return self.report.converged

    @property
    def status(self) -> tuple[Status, ...]:
        """A status per sample."""
        return self.report.status

    @property
    def trace(self) -> Tensor | None:
        """Residual after every step, ``(steps + 1, B)``."""
        return self.report.trace

    @property
    def backward(self) -> Report | None:
        """How the backward pass went; None until it has run."""
        return self.slot.report


__all__ = ["BackwardSlot", "Report", "Solution"]
