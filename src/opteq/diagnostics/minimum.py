"""Whether a stationary point is a minimum: the curvature of the objective at a solution, per sample."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.diagnostics.extremes import Extremes, extreme_eigenvalues, missing_share
from opteq.diagnostics.kinks import descends_beside_kink, objective_and_rounding, unit
from opteq.problems.branches.parallel import BoundParallel
from opteq.problems.hidden import BoundMap, Hidden, SymmetricLinearisation
from opteq.solvers.linear.base import RowProduct
from opteq.solvers.linear.lanczos import Lanczos
from opteq.solvers.status import Status
from opteq.states import Layout, State, any_row, autocast_rounding, map_state, row_norms

STEPS = 30
"""Lanczos steps of a check. In n dimensions a negative eigenvalue of relative size e is missed with a probability of at
most ``1.648 sqrt(n) exp(-59 sqrt(e))``."""

_MORE = (60, 120, 300)
"""How many steps follow, in turn, where such an eigenvalue may have been missed; then ``exp(-599 sqrt(e))``."""

_FAR = (0.01, 0.1, 1.0)
"""Moves relative to the norm of a state: an objective that falls all the way has no minimum near there."""


def curvature_at_solution(
    hidden: BoundMap, state: State, steps: int = STEPS, failure: float = 1e-3, direction: bool = False
) -> Extremes | None:
    """The ends of the spectrum of ``I - S`` at a state, ``S = F' M F``; None where J has no symmetric form.

    The state is a strict minimum where all of it is positive. For an :class:`~opteq.Objective` without a penalty it is
    the Hessian times the step length.
    """
    product = curvature_product(hidden, state)
    rows = Layout.of(state, hidden.coupled).pack(map_state(Tensor.detach, state))
    return None if product is None else extreme_eigenvalues(product, rows, steps, failure, direction)


@torch.no_grad()
def mark_non_minima(hidden: BoundMap, state: State, codes: Tensor, floor: float) -> Tensor:
    """The codes, with :attr:`Status.NOT_A_MINIMUM` in place of CONVERGED where the curvature is negative.

    On a kink of the activation, where there are several, the objective beside it decides. ``floor`` is the solver's
    norm below which a state counts as zero. An objective that is not finite, or has no lower bound along the last
    change, has no minimum there either.
    """
    if isinstance(hidden, BoundParallel):
        for part, piece in hidden.pairs(state):
            codes = mark_non_minima(part, piece, codes, floor) if part.seeks_minimum else codes
        return codes
    state = map_state(Tensor.detach, state)
    layout = Layout.of(state, hidden.coupled)
    rows = layout.pack(state)
    product = curvature_product(hidden, state)
    if product is None or not rows.numel():
        return codes
    extremes = extreme_eigenvalues(product, rows, STEPS)
    eps = max(torch.finfo(dtype).eps for dtype in layout.dtypes)
    relative = max(min(1e3 * eps, eps**0.5), autocast_rounding(layout, lambda: product(rows)))
    tolerance = relative * torch.maximum(extremes.largest.abs(), extremes.smallest.abs()).clamp_min(1.0)
    negative = extremes.smallest < -tolerance
    converged = codes == int(Status.CONVERGED)
    doubtful = (extremes.lower < 0) & ~negative
    # Without a basis that is kept orthogonal, eigenvalues stay within the spectrum, and memory does not grow.
    lanczos = Lanczos(rows)
    for steps in _MORE if rows.shape[1] > STEPS else ():
        if not any_row(converged & layout.per_sample(doubtful), of_all=True):
            break
        found = lanczos.run(product, steps)
        negative = negative | below(*found, -tolerance)
        share = missing_share(rows.shape[1], steps, extremes.failure / 2)
        doubtful = doubtful & ~negative & below(*found, share * (extremes.largest - extremes.smallest))
    failed = layout.per_sample(negative)
    if isinstance(hidden, Hidden):
        failed = failed | descends_beside_kink(hidden, state, converged & ~failed, STEPS, floor)
        if all(penalty.has_total for penalty in hidden.penalties(state)):
            finite, falls = _finite_and_falling(hidden, state, layout, floor)
            codes = torch.where(converged & ~finite, int(Status.NON_FINITE), codes)
            failed = (failed | falls) & finite
    return torch.where(converged & failed, int(Status.NOT_A_MINIMUM), codes)


def curvature_product(hidden: BoundMap, state: State) -> RowProduct | None:
    """``v -> (I - S) v`` on rows."""
    local = hidden.linearise(map_state(Tensor.detach, state))
    layout = Layout.of(state, hidden.coupled)
    if not isinstance(local, SymmetricLinearisation):
        return None
    return lambda rows: rows - layout.pack(local.scaled(layout.unpack(rows)))


def _finite_and_falling(hidden: Hidden, state: State, layout: Layout, floor: float) -> tuple[Tensor, Tensor]:
    """Whether the objective is finite, and whether it falls by more than rounding as far as states are large."""
    rows = layout.pack(state)
    # A change that is lost in rounding is replaced by the state itself: on its way to infinity it points there.
    change = layout.pack(hidden.step(state)) - rows + torch.finfo(rows.dtype).eps * rows
    change = unit(change) * row_norms(rows).to(rows.dtype)[:, None]
    values, rounding = objective_and_rounding(hidden, hidden.project(state))
    finite, falls = torch.isfinite(values), row_norms(rows) > floor
    for far in _FAR:
        there, rounding_there = objective_and_rounding(hidden, hidden.project(layout.unpack(rows + far * change)))
        falls = falls & (there < values - rounding - rounding_there)
        values, rounding = there, rounding_there
    return layout.per_sample(finite), layout.per_sample(falls)


def below(diagonal: Tensor, beside: Tensor, level: Tensor) -> Tensor:
    """Which tridiagonal matrices have an eigenvalue below ``level``, ``(R,)``: a pivot is negative (Sturm)."""
    pivot = torch.ones_like(level)
    found = torch.zeros_like(level, dtype=torch.bool)
    for step, entry in enumerate(diagonal.unbind(dim=1)):
        off = beside[:, step - 1] if step else torch.zeros_like(level)
        pivot = entry - level - off.square() / torch.where(pivot == 0, torch.finfo(pivot.dtype).tiny, pivot)
        found = found | (pivot < 0)
    return found
