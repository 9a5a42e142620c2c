"""Independent ways to compute what the library computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lazy import lazily
from opteq.problems.base import Problem
from opteq.problems.opteq import BoundOptEq
from opteq.states import State, blocks, like, map_state

cp = lazily("cvxpy")
SHARP = {"solver": "CLARABEL", "tol_gap_abs": 1e-12, "tol_gap_rel": 1e-12, "tol_feas": 1e-12}
"""Options of an interior-point solver that ends close to machine precision."""


def unrolled_features(problem: Problem, x: Tensor, least: int = 50, most: int = 400) -> State:
    """Plain iteration on autograd's tape until it stands still, damped where the problem needs it."""
    hidden = problem(x)
    y = hidden.start()

    def towards(old: Tensor, new: Tensor) -> Tensor:
        share = torch.as_tensor(hidden.damping, dtype=old.dtype)
        return old + share.reshape(-1, *[1] * (old.ndim - 1)) * (new - old)

    for step in range(most):
        before, y = y, map_state(towards, y, hidden.step(y))
        # Derivatives arrive a few steps after values; the least number of steps is for states that do not move at all.
        moved = max(float((new - old).detach().abs().max()) for new, old in zip(blocks(y), blocks(before), strict=True))
        if step >= least and moved < 1e-14:
            break
    return hidden.features(y)


def probe_loss(features: State) -> Tensor:
    """A loss with no symmetry."""
    return sum(
        (part * torch.linspace(-1, 2, part.numel(), dtype=part.dtype).cos().view_as(part)).sum()
        for part in blocks(features)
    )


def gradients(features: State, inputs: Sequence[Tensor], scale: float = 1.0, keep: bool = False) -> list[Tensor]:
    """Gradients of the probe loss; with ``keep`` the graph serves another backward pass."""
    found = torch.autograd.grad(scale * probe_loss(features), list(inputs), allow_unused=True, retain_graph=keep)
    return [torch.zeros_like(i) if g is None else g for g, i in zip(found, inputs, strict=True)]


def assert_slopes(
    function: Callable[..., State], inputs: Sequence[Tensor], near: float = 1e-5, length: float = 1e-5
) -> None:
    """Gradients against central differences, along random directions: of each input, or of every fourth together."""
    generator = torch.Generator().manual_seed(0)
    start = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    found = torch.autograd.grad(probe_loss(function(*start)), start)
    assert all(bool(gradient.any()) for gradient in found)
    for first in range(min(4, len(start))):
        ways = [torch.zeros_like(tensor) for tensor in start]
        for index in range(first, len(start), 4):
            ways[index].normal_(generator=generator)
        with torch.no_grad():
            high, low = (
                probe_loss(function(*(at + side * length * way for at, way in zip(start, ways, strict=True))))
                for side in (1, -1)
            )
        slope = sum((gradient * way).sum() for gradient, way in zip(found, ways, strict=True))
        torch.testing.assert_close(slope, (high - low) / (2 * length), rtol=near, atol=near)


def feature_objective(hidden: BoundOptEq, y: Tensor) -> Tensor:
    """``phi(z) + gamma R(z)`` at ``z = W'y / mu``: the objective in the paper's variable, with no inverse of W.

    It is ``(G(y) - k n) / mu`` for n units where y is the least state with these features, as an equilibrium is.
    """
    units = hidden.block.c[0].numel()
    return (hidden.objective(y) - hidden.penalty.offset * units) / hidden.mu


def difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Relative distance of two lists of tensors, as vectors."""
    gap = sum(float((u - v).square().sum()) for u, v in zip(a, b, strict=True))
    size = sum(float(v.square().sum()) for v in b)
    return (gap / size) ** 0.5


def flatten(state: State) -> Tensor:
    return torch.cat([part.reshape(-1) for part in blocks(state)])


def unflatten(vector: Tensor, template: State) -> State:
    pieces = torch.split(vector, [part.numel() for part in blocks(template)])
    return like(template, tuple(p.view_as(t) for p, t in zip(pieces, blocks(template), strict=True)))


def dense_jacobian(function, state: State, vectorize: bool = False) -> Tensor:
    """The Jacobian of a map on states as a matrix, by autograd, sample couplings included; all rows at once or not."""
    return torch.autograd.functional.jacobian(
        lambda v: flatten(function(unflatten(v, state))), flatten(state), vectorize=vectorize
    )


def relu_programme(W: Tensor, c: Tensor) -> tuple[np.ndarray, float]:
    """``min_{y >= 0} 1/2 y'(I - WW')y - <c, y>`` for one sample, by an interior-point solver."""
    n = W.shape[0]
    quadratic = np.eye(n) - (W @ W.T).detach().numpy()
    y = cp.Variable(n)
    objective = 0.5 * cp.quad_form(y, cp.psd_wrap(quadratic)) - c.detach().numpy() @ y
    programme = cp.Problem(cp.Minimize(objective), [y >= 0])
    value = programme.solve(**SHARP)
    return y.value, float(value)
