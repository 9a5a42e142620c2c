"""Conjugate gradients for ``(I - S) v = rhs`` with fused steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opteq.solvers.fused import kernels
from opteq.solvers.fused.ledger import NON_FINITE, WARPS, Blocks, Ledger
from opteq.solvers.loop import Finish, Rule
from opteq.solvers.status import Status
from opteq.states import State, blocks, like

_ENDS = {"INDEFINITE": int(Status.INDEFINITE), "SINGULAR": int(Status.SINGULAR), "NON_FINITE": NON_FINITE}


class FusedConjugateGradients:
    """The method of :class:`~opteq.solvers.linear.cg.CG` in three passes over memory beside the product with S.

    Args:
        product: applies S to states of the right side's form in the dtype ``wide``, and gives any precision.
        rhs: the right sides, in any precision.
        lengths: their lengths in float64, one a row. The answer is that for right sides of length one (or zero).
        layout: how they lie in memory.
        wide: dtype of the answer and of sums.
    """

    def __init__(
        self,
        product: Callable[[State], State],
        rhs: State,
        lengths: Tensor,
        layout: Blocks,
        rule: Rule,
        wide: torch.dtype,
    ) -> None:
        self.product = product
        self.form = rhs
        self.lengths = lengths
        self.rule = rule
        self.eps = torch.finfo(wide).eps
        self.book = Ledger(layout, 3, rule, wide)
        self.residual, self.direction, self.book.best = (layout.new(wide) for _ in range(3))
        self.ring = [layout.new(wide) for _ in range(2)]

    def begin(self) -> None:
        """The answer zero, whose residual is the right side."""
        book = self.book
        parts = book.blocks.arranged(blocks(self.form))
        for i, width in enumerate(book.blocks.widths):
            kernels.cg_begin[book.grid(i)](
                parts[i], self.lengths, self.residual[i], self.direction[i], self.ring[0][i], book.flags, book.numbers,
                book.trace, book.blocks.rows, width, book.tol, NON_FINITE=NON_FINITE, FIRST=i == 0,
                WIDE=book.wide_type, BLOCK=book.blocks.piece, num_warps=WARPS,
            )  # fmt: skip

    def advance(self) -> None:
        """One product and one step."""
        book = self.book
        layout, rows = book.blocks, book.blocks.rows
        book.step += 1
        point, following = self.ring[(book.step - 1) % 2], self.ring[book.step % 2]
        images = layout.arranged(blocks(self.product(like(self.form, tuple(self.direction)))))
        for i, width in enumerate(layout.widths):
            kernels.cg_curvature[book.grid(i)](
                self.direction[i], images[i], book.flags, book.sums, rows, width, layout.firsts[i], layout.parts,
                WIDE=book.wide_type, BLOCK=book.blocks.piece, num_warps=WARPS,
            )  # fmt: skip
        for i, width in enumerate(layout.widths):
            # `following` still holds the point before `point`: its copy, if one is due, is made before it is written.
            kernels.cg_update[book.grid(i)](
                self.direction[i], images[i], self.residual[i], point[i], following[i], following[i], book.best[i],
                book.flags, book.numbers, book.sums, rows, width, layout.firsts[i], layout.parts,
                P=book.width_of_sums, WIDE=book.wide_type, BLOCK=book.blocks.piece, num_warps=WARPS,
            )  # fmt: skip
        kernels.cg_judge[(rows,)](
            book.sums, layout.parts, book.flags, book.numbers, book.trace, book.step, rows, book.tol, self.eps,
            P=book.width_of_sums, num_warps=book.judges, **_ENDS,
        )  # fmt: skip
        for i, width in enumerate(layout.widths):
            kernels.cg_direction[book.grid(i)](
                self.residual[i], self.direction[i], book.flags, book.numbers, rows, width,
                WIDE=book.wide_type, BLOCK=book.blocks.piece, num_warps=WARPS,
            )  # fmt: skip

    def unfinished(self) -> Tensor:
        """Rows that go on."""
        return self.book.unfinished()

    def finish(self) -> Finish:
        """The best answers, and how they were reached."""
        step = self.book.step
        best = self.book.settle(self.ring[step % 2], self.ring[(step - 1) % 2])
        return Finish(tuple(best), *self.book.summary())
