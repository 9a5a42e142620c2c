"""What every linear solver is: a frozen set of options and one entry, on matrices with a row a sample."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from opteq._options import NamedOptions
from opteq._room import Room
from opteq._validate import positive, whole
from opteq.solvers.loop import Finish, PlainRun, Process, Rule, Run, drive
from opteq.solvers.scaled import ScaledProduct
from opteq.states import Layout, State, blocks, row_norms

Product = Callable[[Tensor], Tensor]
PartialProduct = Callable[[Tensor, Tensor | None], Tensor]


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

    capturable: ClassVar[bool] = True
    """Whether steps can be captured as CUDA graphs: they wait for nothing."""

    def __post_init__(self) -> None:
        positive(self, "tol")
        whole(self, "max_steps")
        if self.check_every is not None:
            whole(self, "check_every")

    def solve(self, product: Product, rhs: Tensor, eps: float = 0.0) -> Finish:
        """Solve from zero.

        Args:
            product: applies A to ``(R, N)``, every row by itself.
            rhs: right sides ``(R, N)`` in float32 or float64.
            eps: rounding of ``product``, below which no residual is asked for.
        """
        session = self.open(product, rhs, eps)
        drive(session.run)
        return session.finish()

    def open(self, product: Product, rhs: Tensor, eps: float = 0.0) -> LinearSession:
        """A solve that has not begun; arguments as for :meth:`solve`."""
        unit, scale = unit_rows(rhs)
        return LinearSession(PlainRun(self._process(product, unit), self.rule(rhs.dtype, rhs.device, eps)), scale)

    def open_states(
        self,
        product: Callable[[State], State],
        rhs: State,
        layout: Layout,
        eps: float,
        added: State | None = None,
        scaled: ScaledProduct | None = None,  # noqa: ARG002
    ) -> LinearSession:
        """A solve of ``(I - S) v = rhs`` on states.

        Args:
            product: applies S to states of ``layout``'s dtypes.
            rhs: the right side, of ``layout``.
            layout: how states are matrices.
            eps: rounding of ``product``.
            added: a state that the answer is given together with, as their sum; None for the answer alone.
            scaled: the same product for states of halves with scales, for those who keep them so.
        """
        session = self.open(lambda rows: rows - layout.pack(product(layout.unpack(rows))), layout.pack(rhs), eps)
        return session if added is None else replace(session, added=layout.pack(added))

    def open_refined(
        self,
        product: PartialProduct,
        coarse: Product | None,
        error: float,
        rhs: Tensor,
        eps: float,
        room: Room | None = None,
    ) -> LinearSession:
        """A solve of ``(I - S) v = rhs`` with products by S that may be rough, on a CPU.

        Args:
            product: applies S to all rows, or to those with the given numbers.
            coarse: applies S to all rows, up to ``error``; None where there is no cheaper way.
            error: relative error of ``coarse``.
            rhs: right sides ``(R, N)``.
            eps: rounding of ``product``.
            room: where the solve may work, if anywhere.
        """
        del coarse, error, room  # most methods can't tell how far their recurrences have drifted from the truth
        return self.open(lambda rows: rows - product(rows, None), rhs, eps)

    def rule(self, dtype: torch.dtype, device: torch.device, eps: float) -> Rule:
        """When to stop, for steps in ``dtype`` on ``device`` and products that are rounded to ``eps``."""
        every = self.check_every or (1 if device.type == "cpu" else 4)
        return Rule(max(self.tol, eps, torch.finfo(dtype).eps), self.max_steps, every)

    @abstractmethod
    def _process(self, product: Product, rhs: Tensor) -> Process:
        """The iteration for right sides of length one or zero."""


@dataclass(frozen=True)
class LinearSession:
    """A linear solve under way.

    Attributes:
        run: what advances.
        scale: what right sides were divided by; None where the run's answers are those that are asked for.
        added: what is added to them then.
    """

    run: Run
    scale: Tensor | None
    added: Tensor | None = None

    def finish(self, finish: Finish | None = None) -> Finish:
        """Where the solve stands; or stood, at a ``finish`` of its run."""
        finish = self.run.finish() if finish is None else finish
        if self.scale is None:
            return finish
        assert isinstance(finish.point, Tensor)
        point = finish.point * self.scale
        return replace(finish, point=point if self.added is None else point + self.added)


def unit_rows(rhs: Tensor) -> tuple[Tensor, Tensor]:
    """Right sides of length one or zero, and their lengths ``(R, 1)``: NaN for rows that are not finite.

    By way of their largest entry: then neither norms nor recurrences overflow or vanish. A row that is not finite ends
    at its first point, zero; its length makes NaN of that, which is the only honest answer.
    """
    largest = usable_scale(rhs.abs().amax(dim=1, keepdim=True) if rhs.shape[1] else rhs.new_ones(rhs.shape[0], 1))
    length = usable_scale(row_norms(rhs / largest).to(rhs.dtype)[:, None])
    finite = torch.isfinite(rhs).all(dim=1, keepdim=True)
    return rhs / largest / length, torch.where(finite, length * largest, torch.nan)


def sample_norms(state: State, coupled: bool) -> Tensor:
    """The norm of every sample, or of the whole batch ``(1,)``, in float64."""
    norms = []
    for part in blocks(state):
        dims = tuple(range(0 if coupled else 1, part.ndim))
        if not dims:
            norms.append(part.abs().to(torch.float64))
        elif part.dtype != torch.float64:  # whose squares are within the range of float64
            norms.append(torch.linalg.vector_norm(part, dim=dims, dtype=torch.float64))
        else:
            largest = usable_scale(part.abs().amax(dim=dims, keepdim=True))
            norm = torch.linalg.vector_norm(part / largest, dim=dims)
            norms.append(norm * largest.reshape(norm.shape))
    return reduce(torch.hypot, norms).reshape(-1)


def usable_scale(scale: Tensor) -> Tensor:
    """Scales that can be divided by; 1 where a row is zero or not finite."""
    return torch.where((scale > 0) & torch.isfinite(scale), scale, 1.0)


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Inner product of each pair of rows, accumulated in float64 where the device has it.

    A CPU would copy the products to float64 first, which takes longer than all the rest; its own sums of float32 go by
    pairs, and lose no digit that vectors of length one or less would need.
    """
    if a.device.type == "cpu" and a.dtype == torch.float32:
        return (a * b).sum(dim=1).to(torch.float64)
    dtype = torch.float32 if a.device.type == "mps" else torch.float64
    return (a * b).sum(dim=1, dtype=dtype)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, and zero where the denominator is zero."""
    safe = torch.where(denominator == 0, 1.0, denominator)
    return torch.where(denominator == 0, 0.0, numerator / safe)


def lost(point: Tensor, size: Tensor) -> Tensor:
    """Rows whose answer is so long that rounding hides what A, of norm ``size``, makes of it.

    Right sides have length one, so the rounding of ``A x`` beside them is ``eps size |x|``. Where A is singular, a
    Krylov method goes on to multiply noise, and reports a residual that has nothing to do with its answer.
    """
    return torch.finfo(point.dtype).eps * size * row_norms(point) > 1e-3


def columns(scalars: Tensor, like: Tensor) -> Tensor:
    """Numbers a row ``(R,)`` shaped to multiply rows ``(R, N)``, in their dtype."""
    return scalars.to(like.dtype)[:, None]
