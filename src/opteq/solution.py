"""The solution of a layer, with a report of the forward pass and one of the backward pass."""

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
        features: the output of the layer, differentiable.
        state: the equilibrium itself, differentiable. Both may be differentiated with respect to inputs and weights,
            but features not with respect to the state.
        report: the outcome per sample; its fields are also attributes of the solution.
        term_traces: with ``trace_objective=True``, the terms of the objective after every step, each
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
        """The objective after every step, ``(steps + 1, B)``; None without ``trace_objective=True``."""
        return None if self.term_traces is None else torch.stack(list(self.term_traces.values())).sum(dim=0)

    @property
    def residual(self) -> Tensor:
        """Relative residual of the state, or of a smaller variable: see :class:`Report`; ``(B,)``."""
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
        """The report of the backward pass; None until it has run."""
        return self.slot.report


__all__ = ["BackwardSlot", "Report", "Solution"]
