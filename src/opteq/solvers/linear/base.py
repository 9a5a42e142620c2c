"""The base class of linear solvers: frozen options, and one entry point, on matrices with one row per sample."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opteq.common.options import NamedOptions
from opteq.common.validate import positive, whole
from opteq.solvers.loop import Finish, Iteration, Loop, Process, Rule, iterate
from opteq.states import Layout, State, row_norms, widest_dtype

RowProduct = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class LinearSolver(metaclass=NamedOptions):
    """Solves ``A_b v_b = rhs_b`` for every sample b at once; A is only ever applied.

    Args:
        tol: residual relative to the right side, so that scaling a loss changes no gradient's direction.
        max_steps: applications of A at most.
        check_every: as for :class:`~opteq.solvers.base.Solver`.
    """

    tol: float = 1e-6
    max_steps: int = 100
    check_every: int | None = None

    def __post_init__(self) -> None:
        positive(self, "tol")
        whole(self, "max_steps")
        if self.check_every is not None:
            whole(self, "check_every")

    def solve(self, product: RowProduct, rhs: Tensor, eps: float = 0.0) -> Finish:
        """Solve from zero for right sides ``(R, N)``; ``product`` applies A to every row, with rounding ``eps``."""
        return self.open(product, rhs, eps).run()

    def open(self, product: RowProduct, rhs: Tensor, eps: float = 0.0) -> LinearSolve:
        """A solve that has not begun; arguments as for :meth:`solve`."""
        unit, scale = unit_rows(rhs)
        return LinearSolve(Loop(self._process(product, unit), self.rule(rhs.dtype, rhs.device, eps)), scale)

    def open_states(self, product: Callable[[State], State], rhs: State, layout: Layout, eps: float) -> LinearSolve:
        """A solve of ``(I - S) v = rhs`` on states of ``layout``, where ``product`` applies S with rounding ``eps``."""
        return self.open(lambda rows: rows - layout.pack(product(layout.unpack(rows))), layout.pack(rhs), eps)

    def rule(self, dtype: torch.dtype, device: torch.device, eps: float) -> Rule:
        """When to stop, for steps in ``dtype`` on ``device`` and products that are rounded to ``eps``."""
        every = self.check_every or (1 if device.type == "cpu" else 4)
        return Rule(max(self.tol, eps, torch.finfo(dtype).eps), self.max_steps, every)

    @abstractmethod
    def _process(self, product: RowProduct, rhs: Tensor) -> Process:
        """The iteration for right sides of length one or zero."""


@dataclass(frozen=True)
class LinearSolve:
    """A linear solve under way: its iteration, and what right sides ``(R, 1)`` were divided by, if they were."""

    iteration: Iteration
    scale: Tensor | None

    def run(self) -> Finish:
        """Iterate to the end."""
        iterate(self.iteration)
        return self.finish()

    def finish(self, finish: Finish | None = None) -> Finish:
        """Where the solve stands; or stood, at a ``finish`` of its iteration."""
        finish = self.iteration.finish() if finish is None else finish
        if self.scale is None:
            return finish
        assert isinstance(finish.point, Tensor)
        return replace(finish, point=finish.point * self.scale)


def unit_rows(rhs: Tensor) -> tuple[Tensor, Tensor]:
    """Right sides of length one or zero, and their lengths ``(R, 1)``: NaN for rows that are not finite.

    By way of their largest entry: then neither norms nor recurrences overflow or vanish. A row that is not finite ends
    at its first point, zero; multiplied by its length that is NaN.
    """
    peak = rhs.abs().amax(dim=1, keepdim=True) if rhs.shape[1] else rhs.new_ones(rhs.shape[0], 1)
    largest = usable_scale(peak)
    divided = rhs / largest
    length = usable_scale(row_norms(divided).to(rhs.dtype)[:, None])
    return divided / length, torch.where(torch.isfinite(peak), length * largest, torch.nan)


def usable_scale(scale: Tensor) -> Tensor:
    """Scales that can be divided by; 1 where a row is zero or not finite."""
    return torch.where((scale > 0) & torch.isfinite(scale), scale, 1.0)


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Inner product of each pair of rows, in float64 where the device has it."""
    # Added up in pairs, in the dtype that products are rounded to: float64 sums would be a copy of all of them.
    return (a * b).sum(dim=1).to(widest_dtype(a))


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, and zero where the denominator is zero."""
    return (numerator / denominator).masked_fill(denominator == 0, 0.0)


def is_noise(point: Tensor, size: Tensor) -> Tensor:
    """Rows whose answer is so long that rounding hides what A, of norm ``size``, makes of it.

    Right sides have length one, so the rounding of ``A x`` beside them is ``eps size |x|``. Where A is singular, a
    Krylov method goes on to multiply noise, and reports a residual that has nothing to do with its answer.
    """
    return size * row_norms(point) > 1e-3 / torch.finfo(point.dtype).eps
