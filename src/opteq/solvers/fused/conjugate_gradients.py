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
        product: applies S to states of the right side's form and precision, and gives any precision.
        rhs: the right sides, in any precision, which is that of the answer.
        lengths: their lengths in float64, one a row; None where they are to be found here, by sums of squares.
        added: to the answer; None where nothing is.
        layout: how they lie in memory.
        rule: when to stop.
        wide: dtype of the steps and of sums.
    """

    def __init__(
        self,
        product: Callable[[State], State],
        rhs: State,
        lengths: Tensor | None,
        added: State | None,
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
        self.rhs = layout.arranged(blocks(rhs))
        self.added = None if added is None else layout.arranged(blocks(added))
        self.scale = torch.empty(layout.rows, dtype=wide, device=self.rhs[0].device)
        self.residual, self.direction, self.book.best = (layout.new(wide) for _ in range(3))
        self.low = [
            wider if own.dtype == wide else torch.empty_like(wider, dtype=own.dtype)
            for own, wider in zip(self.rhs, self.direction, strict=True)
        ]
        self.answer = [
            torch.empty_like(wider, dtype=own.dtype) for own, wider in zip(self.rhs, self.direction, strict=True)
        ]
        self.ring = [layout.new(wide) for _ in range(2)]

    def begin(self) -> None:
        """The answer zero, whose residual is the right side."""
        book, lengths = self.book, self.lengths
        layout = book.blocks
        if lengths is None:
            lengths = torch.empty(layout.rows, layout.parts, dtype=torch.float64, device=self.scale.device)
            for i, width in enumerate(layout.widths):
                kernels.cg_squares[book.grid(i)](
                    self.rhs[i], lengths, width, layout.firsts[i], layout.parts, BLOCK=layout.piece, num_warps=WARPS
                )
        for i, width in enumerate(layout.widths):
            kernels.cg_begin[book.grid(i)](
                self.rhs[i], lengths, self.direction[i], self.low[i], self.scale, book.flags, book.numbers, book.trace,
                layout.rows, width, layout.parts, book.tol, NON_FINITE=NON_FINITE, FIRST=i == 0,
                SQUARED=self.lengths is None, NARROW=self._is_narrow(i), P=book.width_of_sums, WIDE=book.wide_type,
                BLOCK=layout.piece, num_warps=WARPS,
            )  # fmt: skip

    def advance(self) -> None:
        """One product and one step."""
        book = self.book
        layout, rows = book.blocks, book.blocks.rows
        book.step += 1
        point, following = self.ring[(book.step - 1) % 2], self.ring[book.step % 2]
        images = layout.arranged(blocks(self.product(like(self.form, tuple(self.low)))))
        for i, width in enumerate(layout.widths):
            kernels.cg_curvature[book.grid(i)](
                self.direction[i], images[i], book.flags, book.sums, rows, width, layout.firsts[i], layout.parts,
                WIDE=book.wide_type, BLOCK=layout.piece, num_warps=WARPS,
            )  # fmt: skip
        for i, width in enumerate(layout.widths):
            kernels.cg_update[book.grid(i)](
                self.direction[i], images[i], self.residual[i], point[i], following[i], book.best[i], book.flags,
                book.numbers, book.sums, book.step, rows, width, layout.firsts[i], layout.parts,
                P=book.width_of_sums, WIDE=book.wide_type, BLOCK=layout.piece, num_warps=WARPS,
            )  # fmt: skip
        kernels.cg_judge[(rows,)](
            book.sums, layout.parts, book.flags, book.numbers, book.trace, book.step, rows, book.tol, self.eps,
            P=book.width_of_sums, num_warps=book.judges, **_ENDS,
        )  # fmt: skip
        for i, width in enumerate(layout.widths):
            kernels.cg_direction[book.grid(i)](
                self.residual[i], self.direction[i], self.low[i], book.flags, book.numbers, rows, width,
                NARROW=self._is_narrow(i), WIDE=book.wide_type, BLOCK=layout.piece, num_warps=WARPS,
            )  # fmt: skip

    def unfinished(self) -> Tensor:
        """Rows that go on."""
        return self.book.unfinished()

    def finish(self) -> Finish:
        """The best answers, and how they were reached."""
        book = self.book
        point, before = self.ring[book.step % 2], self.ring[(book.step - 1) % 2]
        added = self.answer if self.added is None else self.added
        for i, width in enumerate(book.blocks.widths):
            kernels.cg_settle[book.grid(i)](
                point[i], before[i], book.best[i], added[i], self.answer[i], self.scale, book.flags, book.step,
                book.blocks.rows, width, ADDED=self.added is not None, WIDE=book.wide_type, BLOCK=book.blocks.piece,
                num_warps=WARPS,
            )  # fmt: skip
        return book.summary(self.answer)

    def _is_narrow(self, part: int) -> bool:
        """Whether products have less precision than steps."""
        return self.low[part] is not self.direction[part]
