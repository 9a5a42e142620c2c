"""The input perturbations that MOptEq passes from branch to branch in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from opteq.common.derivatives import pullback
from opteq.problems.base import inject
from opteq.problems.branches.branch import Branch
from opteq.problems.branches.chattering import Tensors


class PerturbationChain:
    """Branch i + 1 sees its input moved by ``delta_i = size * sign(U_i' y_i)``, the worst move for branch i.

    Among all moves of at most ``size`` in every entry it is the one that raises the objective of branch i most, with
    ``y_i`` held. The chain begins at the first branch, which sees the input as it is, and does not close.

    A delta goes to the next branch's size by average pooling or by repeating pixels: the adjoint of pooling, right
    elsewhere, would shrink it. ``U'`` is the adjoint of U's linear part, at the branch's input where U is not affine.
    """

    def __init__(self, branches: Sequence[Branch], inputs: Sequence[Tensor], size: float) -> None:
        if len({x.shape[1:2] for x in inputs}) > 1:
            raise ValueError(
                "perturbations pass from branch to branch, so the inputs of all branches should have the same "
                f"number of channels; got shapes {[tuple(x.shape) for x in inputs]}"
            )
        self.branches = branches
        self.inputs = inputs
        self.size = size
        with torch.no_grad():
            self._vjps = [_adjoint(branch, x.detach()) for branch, x in zip(branches[:-1], inputs[:-1], strict=True)]

    @torch.no_grad()
    def directions(self, y: Tensors) -> Tensors:
        """``sign(U_i' y_i)`` for every branch but the last, at the branch's own size."""
        return tuple(torch.sign(vjp(part)) for vjp, part in zip(self._vjps, y[:-1], strict=True))

    def perturbed_inputs(self, directions: Tensors) -> Tensors:
        """The branches' inputs, all but the first moved by the delta of the branch before."""
        first, *rest = self.inputs
        moves = [x - self.size * _fitted(direction, x) for direction, x in zip(directions, rest, strict=True)]
        return (first, *moves)

    def injections(self, directions: Tensors) -> Tensors:
        """``U_i (x_i - delta_{i-1}) + b_i``."""
        moved = self.perturbed_inputs(directions)
        return tuple(inject(branch.U, x) for branch, x in zip(self.branches, moved, strict=True))


def _adjoint(branch: Branch, x: Tensor) -> Callable[[Tensor], Tensor]:
    if branch.U is None:
        return lambda y: y
    try:
        value, vjp = pullback(branch.U, x)
    except RuntimeError as error:
        raise ValueError(
            f"perturbations need the adjoint of U, and {type(branch.U).__name__} has none that torch.func.vjp could "
            f"take (a layer that changes its own buffers, such as batch normalisation, does not): {error}"
        ) from error
    return lambda y: vjp(y.to(value.dtype))


def _fitted(direction: Tensor, x: Tensor) -> Tensor:
    """A direction at the size of ``x``, with entries still in [-1, 1]."""
    if direction.shape == x.shape:
        return direction
    size = (x.shape[2], x.shape[3])
    if direction.shape[2] > x.shape[2]:
        return F.adaptive_avg_pool2d(direction, size)
    return F.interpolate(direction, size=size, mode="nearest")
