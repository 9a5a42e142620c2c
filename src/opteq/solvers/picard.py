"""Plain iteration, with damping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from opteq.solvers.base import DampedSolver
from opteq.solvers.loop import Method, RowTask


@dataclass(frozen=True, kw_only=True)
class Picard(DampedSolver):
    """``y <- (1 - damping) y + damping T(y)``: slow, without memory, and guaranteed to converge where T contracts.

    ``Picard(tol=0, max_steps=K, damping=1)`` is T applied K times, as a paper prints it. Without ``damping=1`` the K
    steps are those that converge: GEQ, and MOptEq with diversity, recommend less than 1.

    Args:
        damping: share of the new value; None takes the problem's recommendation, else 1.

    >>> import torch
    >>> outcome = Picard(tol=1e-6).solve(lambda y: 0.5 * y + 1, torch.zeros(1, 1))
    >>> round(float(outcome.state), 4), int(outcome.steps)
    (2.0, 19)
    """

    takes_every_step: ClassVar[bool] = True

    def _method(self, task: RowTask) -> Method:
        return _PlainStep(self._damping(task))


class _PlainStep(Method):
    def __init__(self, damping: float | Tensor) -> None:
        self.damping = damping

    def propose(self, point: Tensor, image: Tensor, change: Tensor, active: Tensor) -> Tensor:  # noqa: ARG002
        if isinstance(self.damping, float | int) and self.damping == 1:
            return image
        return torch.lerp(point, image, self.damping)
