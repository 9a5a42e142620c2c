"""Conjugate gradients on a CPU, which can look at every number: Python decides, tensors are left what is large."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opteq._room import Room
from opteq.solvers.judged import JudgedRows
from opteq.solvers.linear.base import Product
from opteq.solvers.loop import Finish, Rule
from opteq.solvers.status import Status
from opteq.states import row_norms

# Right sides whose lengths can be divided by at once.
_LEAST, _MOST = 1e-15, 1e15


def usable_lengths(rhs: Tensor) -> Tensor | None:
    """What right sides are divided by, ``(R, 1)``: their lengths, or 1 for zeros; None where that takes more care."""
    if rhs.device.type != "cpu" or torch._C._are_functorch_transforms_active() or not rhs.numel():
        return None
    lengths: list[float] = row_norms(rhs).tolist()
    if not all(_LEAST < length < _MOST or length == 0 for length in lengths):
        return None
    return rhs.new_tensor([length or 1.0 for length in lengths])[:, None]


class LookingConjugateGradients(JudgedRows):
    """A :class:`~opteq.solvers.loop.Run` with the steps, decisions and answers of conjugate gradients as they are
    everywhere: see :class:`~opteq.solvers.linear.cg.CG`.

    There, everything that is decided a sample is an operation on tensors; here it is a few lines of Python, and vectors
    are read and written less often.

    Args:
        product: applies ``S``; the system is ``(I - S) x = rhs``.
        rhs: right sides.
        lengths: what they are divided by, ``(R, 1)``.
        rule: when to stop.
        room: where to work; answers are never there.
    """

    def __init__(self, product: Product, rhs: Tensor, lengths: Tensor, rule: Rule, room: Room) -> None:
        self.product = product
        self.rule = rule
        self.point = torch.zeros_like(rhs)
        # Where Anderson's differences were on the way forward, so that less is kept.
        work = room.take("turns", 4, *rhs.shape, dtype=rhs.dtype)
        self.residual, self.direction, self.image, self.products = work
        torch.div(rhs, lengths, out=self.residual)
        self.direction.copy_(self.residual)
        self.eps = torch.finfo(rhs.dtype).eps

    def begin(self) -> None:
        """The start is the best so far."""
        residual: list[float] = row_norms(self.residual).tolist()
        self.square = [length * length for length in residual]
        self.size = [0.0] * len(residual)  # of A, from below
        self.reach = [0.0] * len(residual)  # the length of the point, from above
        self.stride = list(residual)  # that of the direction
        self._open(residual, self.point)

    def advance(self) -> None:
        """One more direction."""
        active = self._active()
        image = torch.sub(self.direction, self.product(self.direction), out=self.image)
        curvature: list[float] = torch.mul(self.direction, image, out=self.products).sum(dim=1).tolist()
        length = []
        for row, bend in enumerate(curvature):
            square = self.square[row]
            length.append(square / bend if bend > 0 else 0.0)
            self.size[row] = max(self.size[row], bend / square if square else 0.0)
            self.reach[row] += abs(length[row]) * self.stride[row]
        column = image.new_tensor(length)[:, None]
        self.point = torch.addcmul(self.point, column, self.direction)
        torch.addcmul(self.residual, column, image, value=-1, out=self.residual)
        residual: list[float] = row_norms(self.residual).tolist()
        hidden = self._lost()
        ratios, chosen = [], []
        for row, on in enumerate(active):
            square = residual[row] * residual[row]
            ratios.append(square / self.square[row] if self.square[row] else 0.0)
            self.square[row] = square
            self.stride[row] = residual[row] + ratios[row] * self.stride[row]
            if not on:
                continue
            if self._taken(row, math.inf if hidden[row] else residual[row]):
                chosen.append(row)
            if not self.done[row]:
                self.dead[row] = self._code(curvature[row], hidden[row])
        told = [math.inf if hidden[row] else r for row, r in enumerate(residual)]
        self._entered(active, told, self.point, chosen)
        column = image.new_tensor(ratios)[:, None]
        torch.addcmul(self.residual, column, self.direction, out=self.direction)

    def finish(self) -> Finish:
        """The best points, and how they were reached."""
        return self._finished()

    def _code(self, curvature: float, hidden: bool) -> int:
        if not math.isfinite(curvature):
            return int(Status.NON_FINITE)
        if curvature <= 0:
            return int(Status.INDEFINITE)
        return int(Status.SINGULAR) if hidden else 0

    def _lost(self) -> list[bool]:
        """Rows whose answer is so long that rounding hides what A makes of it; lengths are bounded, before they are
        computed.
        """

        def far(lengths: list[float]) -> list[bool]:
            return [not self.eps * size * length <= 1e-3 for size, length in zip(self.size, lengths, strict=True)]

        near = far(self.reach)
        if True not in near:
            return near
        self.reach = row_norms(self.point).tolist()
        return [self.eps * size * length > 1e-3 for size, length in zip(self.size, self.reach, strict=True)]
