"""SHINE: the backward pass reuses the forward solver's estimate of the inverse Jacobian."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from opteq.common.validate import positive
from opteq.gradients.base import Gradient, Gradients, Record, attach_approximate, filled, find_no_grad
from opteq.problems.hidden import BoundMap
from opteq.solvers import Outcome, Solver
from opteq.states import Autocast, Layout, State, blocks, nan_samples, row_norms


@dataclass(frozen=True)
class Shine(Gradient):
    """Use the solver's own estimate of ``(I - J)^-1``, transposed: no products with J in the backward pass at all.

    Broyden and Anderson keep such an estimate. Solvers without one (Picard, FISTA, SAM) use the identity, which is
    :class:`~opteq.gradients.phantom.OneStep`. The estimate fits the steps of the solve, not the incoming gradient, so
    it may be far off. Where it increases the norm of the gradient by more than ``limit``, the gradient of one step is
    used instead.

    Args:
        limit: largest accepted growth of the norm. On the problems of the test suite, larger limits accept estimates
            that are worse than one step.
    """

    limit: float = 1.3

    def __post_init__(self) -> None:
        positive(self, "limit")

    def run(self, hidden: BoundMap, solver: Solver, start: State | None, record: Record) -> tuple[State, Outcome]:
        state, outcome = find_no_grad(hidden, solver, start, keep_inverse=True)
        inverse = outcome.inverse_adjoint
        layout = Layout.of(state, hidden.coupled or solver.couples_batch)
        autocast = Autocast.current(layout.device)

        def adjoint(gradients: Gradients) -> Gradients:
            gradient = filled(gradients, state)
            assert gradient is not None
            assert inverse is not None
            rows = layout.pack(nan_samples(gradient, layout.coupled))
            with autocast.off():
                estimate = inverse(rows)
                believed = row_norms(estimate) <= self.limit * row_norms(rows)  # false for NaN, which both are
            return blocks(layout.unpack(torch.where(believed[:, None], estimate, rows)))

        method = f"the inverse estimate of {type(solver).__name__}"
        chosen = None if inverse is None else adjoint
        return attach_approximate(state, hidden.step(state), record, method, 0, chosen), outcome
