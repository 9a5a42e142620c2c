"""Whether a state on a kink of the activation is a minimum: it has no Hessian there, and one side may go down."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.diagnostics.extremes import extreme_eigenvalues
from opteq.penalties import ElementwisePenalty, Penalty
from opteq.penalties.scaled import ScaledPenalty
from opteq.problems.hidden import Hidden
from opteq.solvers.linear.base import RowProduct
from opteq.states import (
    Layout,
    State,
    any_row,
    autocast_rounding,
    blocks,
    like,
    per_row,
    row_norms,
    sample_rows,
    widest_dtype,
)

_REFINEMENTS = 15
_FEW = 64
"""Units in the last place of the terms by which their sum may be off."""


def descends_beside_kink(hidden: Hidden, state: State, asked: Tensor, steps: int, floor: float) -> Tensor:
    """Which samples of those asked for lie on a kink from which the objective descends, ``(B,)``.

    A kink is where the slope of sigma changes by a move as large as the residual: the pre-activation of a ReLU at 0,
    for instance. There the curvature is different from side to side. It is bounded below by that with the larger
    slopes. Where that bound is negative, its most negative directions are turned to the side of larger slopes by
    projected power steps, and the objective itself is evaluated a little way along them, within its domain: a value
    that is lower by more than rounding proves that this is no minimum. The converse is hard (copositivity), so that a
    saddle may be missed. A minimum is taken for a saddle only where there is a lower point at a relative distance of
    ``eps^(1/4)``.

    A state whose norm is below ``floor`` counts as zero: solvers stop there, as close to a kink at zero as that.
    """
    penalties = hidden.penalties(state)
    if not all(penalty.has_total for penalty in penalties):
        return torch.zeros_like(asked)
    layout = Layout.of(state, hidden.coupled)
    inside = hidden.preactivation(state)
    zero = row_norms(layout.pack(state)) <= floor
    # What sigma is applied to at zero; elsewhere no other than at the state.
    origin = hidden.preactivation(layout.unpack(torch.where(zero[:, None], 0.0, layout.pack(state))))
    sides = _sides(penalties, inside, origin, hidden.step(state), state)
    if sides is None:
        return torch.zeros_like(asked)
    slopes, rising = map(layout.pack, sides)
    if not any_row(asked & layout.per_sample(rising.ne(0).any(dim=1)), of_all=True):
        return torch.zeros_like(asked)
    negative_hessian, root = hidden.negative_hessian_at(state), slopes.sqrt()

    def bent(rows: Tensor) -> Tensor:  # F'MF with the larger slopes
        return root * layout.pack(negative_hessian(layout.unpack(root * rows)))

    extremes = extreme_eigenvalues(lambda rows: rows - bent(rows), layout.pack(state), steps, direction=True)
    assert extremes.direction is not None
    shift = (extremes.largest - 1).clamp_min(0).to(root.dtype)[:, None]  # makes F'MF positive
    eps = max(torch.finfo(dtype).eps for dtype in layout.dtypes)
    size = torch.maximum(row_norms(layout.pack(state)), row_norms(layout.pack(inside)))
    size = torch.where(size > floor, size, 1.0).to(root.dtype)[:, None] * eps**0.25
    values, rounding = objective_and_rounding(hidden, state)
    lower = torch.zeros_like(extremes.smallest, dtype=torch.bool)
    for sign in (1, -1):
        direction = sign * extremes.direction
        for turned in (direction, _power_steps(direction, rising, bent, shift)):
            move = root * turned
            there = hidden.project(layout.unpack(layout.pack(state) + size * unit(move)))
            there_values, there_rounding = objective_and_rounding(hidden, there)
            lower = lower | (there_values < values - rounding - there_rounding)
    return asked & layout.per_sample(lower & (extremes.smallest < 0))


def _sides(
    penalties: list[Penalty], inside: State, origin: State, image: State, state: State
) -> tuple[State, State] | None:
    """The larger slopes of sigma, and to which side they are: 1, -1, or 0 away from kinks; None where it has none."""
    slopes, rising = [], []
    parts = (blocks(part) for part in (inside, origin, image, state))
    for penalty, at, first, new, old in zip(penalties, *parts, strict=True):
        # What sigma is applied to is known as well as the state is.
        limits = torch.finfo(at.dtype)
        largest = per_row(sample_rows(at.abs()).amax(dim=1), at)
        margin = (new - old).abs() + 2 * (at - first).abs() + 8 * limits.eps * largest + limits.tiny
        written = penalty.penalty if isinstance(penalty, ScaledPenalty) else penalty
        if not isinstance(written, ElementwisePenalty):  # others mix entries, and have no slopes
            return None
        left, right = penalty.derivative(at - margin), penalty.derivative(at + margin)
        slopes.append(torch.maximum(left, right))
        kink = (right - left).abs() > 0.01
        rising.append(torch.where(kink, (right - left).sign(), 0.0))
    return like(state, tuple(slopes)), like(state, tuple(rising))


def _power_steps(direction: Tensor, rising: Tensor, bent: RowProduct, shift: Tensor) -> Tensor:
    """Projected power steps: towards the most negative curvature among moves to the side of larger slopes."""

    def admissible(rows: Tensor) -> Tensor:
        return torch.where(rising * rows < 0, 0.0, rows)

    rows = admissible(direction)
    for _ in range(_REFINEMENTS):
        rows = unit(admissible(bent(rows) + shift * rows))
    return rows


def unit(rows: Tensor) -> Tensor:
    """Rows of length 1; zero stays zero."""
    return rows / row_norms(rows).to(rows.dtype).clamp_min(torch.finfo(rows.dtype).tiny)[:, None]


def objective_and_rounding(hidden: Hidden, state: State) -> tuple[Tensor, Tensor]:
    """The objective of each row, and by how much it may be off.

    That is relative to the magnitudes of its terms, and what penalties lose by themselves: ``(1 + y) ln(1 + y) - y`` of
    a small y, for instance, is the rounding of y.
    """
    terms = torch.stack(list(hidden.terms(state).values()))
    layout = Layout.of(state)
    eps = max(torch.finfo(dtype).eps for dtype in layout.dtypes)
    parts = blocks(state)
    pairs = zip(hidden.penalties(state), parts, strict=True)
    lost = [(penalty.total(part) - penalty.total(part.to(widest_dtype(part)))).abs() for penalty, part in pairs]
    relative = max(_FEW * eps, autocast_rounding(layout, lambda: hidden.terms(state)))
    rounding = relative * terms.abs().sum(dim=0) + torch.stack(lost).sum(dim=0)
    if hidden.coupled:
        return terms.sum(dim=(0, 1))[None], rounding.sum(dim=0, keepdim=True)
    return terms.sum(dim=0), rounding
