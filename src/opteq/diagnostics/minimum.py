"""Whether a stationary point is a minimum: the curvature of the objective at a solution, per sample."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.diagnostics.kinks import descends_beside_kink
from opteq.problems.hidden import BoundMap, Hidden, SymmetricLinearisation
from opteq.solvers.linear.lanczos import Extremes, extreme_eigenvalues
from opteq.solvers.status import Status
from opteq.states import Layout, State, map_state

STEPS = 30
"""Lanczos steps of a check. In n dimensions a negative eigenvalue of relative size e is missed with a probability of at
most ``1.648 sqrt(n) exp(-59 sqrt(e))``."""


def curvature_at_solution(hidden: BoundMap, state: State, steps: int = STEPS, failure: float = 1e-3) -> Extremes | None:
    """The ends of the spectrum of ``I - S`` at a state, ``S = F' M F``; None where J has no symmetric form.

    The state is a strict minimum where all of it is positive. For an :class:`~opteq.Objective` without a penalty it is
    the Hessian times the step length.
    """
    state = map_state(Tensor.detach, state)
    local = hidden.linearise(state)
    if not isinstance(local, SymmetricLinearisation):
        return None
    layout = Layout.of(state, hidden.coupled)

    def product(rows: Tensor) -> Tensor:
        return rows - layout.pack(local.scaled(layout.unpack(rows)))

    return extreme_eigenvalues(product, layout.pack(state), steps, failure)


@torch.no_grad()
def mark_non_minima(hidden: BoundMap, state: State, codes: Tensor, floor: float) -> Tensor:
    """The codes, with :attr:`Status.NOT_A_MINIMUM` in place of CONVERGED where the curvature is negative.

    On a kink of the activation, where there are several, the objective beside it decides. ``floor`` is the solver's
    norm below which a state counts as zero.
    """
    extremes = curvature_at_solution(hidden, state)
    if extremes is None:
        return codes
    layout = Layout.of(state, hidden.coupled)
    eps = max(torch.finfo(dtype).eps for dtype in layout.dtypes)
    spread = torch.maximum(extremes.largest.abs(), extremes.smallest.abs()).clamp_min(1.0)
    negative = layout.per_sample(extremes.smallest < -1e3 * eps * spread)
    converged = codes == int(Status.CONVERGED)
    if isinstance(hidden, Hidden):
        negative = negative | descends_beside_kink(
            hidden, map_state(Tensor.detach, state), converged & ~negative, STEPS, floor
        )
    return torch.where(converged & negative, int(Status.NOT_A_MINIMUM), codes)
