"""What can be said where the signs of MOptEq's diversity jump, so that there may be no fixed point to find.

Here ``hidden`` is a :class:`~opteq.problems.branches.mopteq.BoundMOptEq`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opteq.couplings import Features, products, products_derivative
from opteq.states import any_row, blocks, inner, map_state, per_row

Tensors = tuple[Tensor, ...]

SETTLE = 12
"""Plain steps before a cycle is looked for. The best state of a solve is close to it already."""

LONGEST = 8
"""Longest cycle that is looked for. Of some 400 that random networks ran into, all had period 2, but for a dozen of
4 and one of 6."""

LASTING = 0.5
"""Share of its first length that a jump must still have when signs come back: where iterates converge, jumps shrink."""


def signs_change(hidden: Any, y: Tensors) -> Tensor:
    """Which samples have other signs at ``y`` than at its image, ``(B,)``."""
    return _differ(_signs(hidden, y), _signs(hidden, blocks(hidden.step(y))))


def is_periodic(hidden: Any, y: Tensors, doubtful: Tensor) -> Tensor:
    """Which samples jump for ever: along plain steps from ``y`` signs change and come back, ``(B,)``.

    Signs come back long before the iterates do, which may still drift while they jump. They tell a cycle from slow
    convergence that swings around its limit, where signs do not change. The search ends when all ``doubtful`` samples
    were seen to return.
    """
    for _ in range(SETTLE):
        y = blocks(hidden.step(y))
    first = _signs(hidden, y)
    here = blocks(hidden.step(y))
    jump = _distance(here, y)
    switched = back = torch.zeros_like(doubtful)
    for _ in range(LONGEST):
        other = _differ(_signs(hidden, here), first)
        there = blocks(hidden.step(here))
        back = back | (switched & ~other & (jump > 0) & (_distance(there, here) >= LASTING * jump))
        switched = switched | other
        here = there
        if not any_row(doubtful & ~back):
            break
    return doubtful & back


def inclusion_residual(hidden: Any, y: Tensors, zero: float, steps: int) -> Tensor:
    """The relative residual of ``y`` with the best choice of signs where a product is zero, ``(B,)``.

    With signs S the pre-activation ``p(S)`` is affine, and the gap ``sum sigma~(p) - <p, y>`` is a convex function of S
    whose gradient in p is ``sigma(p) - y``: it is least, over ``[-1, 1]`` for the free signs, exactly where ``y =
    sigma(p)`` if it can be so at all. It is minimised by accelerated projected gradients that begin anew when
    they overshoot. Products below the share ``zero`` of the two branches' norms count as zero.
    """
    coupling = hidden.coupling
    signs: Tensors | None = None
    if coupling.diversity and not coupling.smoothing:
        z = hidden.features(y)
        matrices = products(z)
        sizes = torch.stack([_norm(part) for part in z]).amax(dim=0)
        gain = max(float(branch.W.norm()) for branch in hidden.problem.branch_list())
        lipschitz = hidden.penalty.lipschitz * (gain * coupling.diversity * sizes).square()
        first = tuple(coupling.signs(matrix) for matrix in matrices)
        signs = _best_signs(hidden, y, first, _free(z, matrices, zero), lipschitz, steps)
    image = _image(hidden, y, signs)
    floor = torch.finfo(torch.float32).tiny
    return _distance(image, y) / inner(image, image).sqrt().clamp(min=floor)


def _best_signs(hidden: Any, y: Tensors, signs: Tensors, free: Tensors, lipschitz: Tensor, steps: int) -> Tensors:
    z = hidden.features(y)
    rate = 1 / lipschitz.clamp(min=torch.finfo(torch.float32).tiny)
    ahead, momentum = signs, torch.ones_like(rate)
    for _ in range(steps):
        gap = map_state(torch.sub, _image(hidden, y, ahead), y)
        # p(S) = W (... - lambda/2 (S N + S' A)), so the gradient in S is -lambda/2 times the change of M along W' gap.
        slopes = products_derivative(z, hidden.features(gap))
        descended = tuple(
            torch.where(kind, (at + per_row(rate, slope) * slope * hidden.coupling.diversity / 2).clamp(-1, 1), sign)
            for kind, at, slope, sign in zip(free, ahead, slopes, signs, strict=True)
        )
        moved = map_state(torch.sub, descended, signs)
        overshoot = inner(map_state(torch.sub, ahead, descended), moved) > 0
        later = torch.where(overshoot, 1.0, (1 + (1 + 4 * momentum.square()).sqrt()) / 2)
        push = torch.where(overshoot, 0.0, (momentum - 1) / later)
        ahead = tuple(new + per_row(push, new) * (new - old) for new, old in zip(descended, signs, strict=True))
        signs, momentum = descended, later
    return signs


def _free(z: Features, matrices: Tensors, zero: float) -> Tensors:
    """Where a product off the diagonal is zero to the tolerance."""
    sizes = [_norm(part) for part in z]
    masks = []
    for index, matrix in enumerate(matrices):
        scale = sizes[index] * sizes[(index + 1) % len(sizes)]
        small = matrix.abs() <= zero * per_row(scale, matrix)
        eye = torch.eye(matrix.shape[-1], dtype=torch.bool, device=matrix.device)
        masks.append(small & ~eye)
    return tuple(masks)


def _image(hidden: Any, y: Tensors, signs: Tensors | None) -> Tensors:
    return tuple(hidden.penalty.prox(part) for part in hidden.preactivation(y, signs))


def _signs(hidden: Any, y: Tensors) -> Tensors:
    return tuple(hidden.coupling.signs(matrix) for matrix in products(hidden.features(y)))


def _differ(a: Tensors, b: Tensors) -> Tensor:
    return torch.stack([(u != v).flatten(1).any(dim=1) for u, v in zip(a, b, strict=True)]).any(dim=0)


def _distance(a: Tensors, b: Tensors) -> Tensor:
    apart = map_state(torch.sub, a, b)
    return inner(apart, apart).sqrt()


def _norm(part: Tensor) -> Tensor:
    return inner(part, part).sqrt()
