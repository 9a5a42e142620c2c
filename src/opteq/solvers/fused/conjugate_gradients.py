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
# Directions that are kept, by their bytes: all that most solves take where a direction has 16 bits, and else two, which
# with the sum of those before them move no more memory than an answer that is written down at every step.
_KEPT, _KEPT_IN_16_BITS = 2, 6


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
        device = self.rhs[0].device
        self.scale = torch.empty(layout.rows, dtype=torch.float64, device=device)
        self.narrow = any(part.dtype != wide for part in self.rhs)
        self.kept = _KEPT_IN_16_BITS if all(part.itemsize == 2 for part in self.rhs) else _KEPT
        self.residual = layout.new(wide)
        # In the precision of products: a direction is what is multiplied, so that the answer and its residual agree.
        self.directions = layout.new(copies=self.kept)
        self.paces = torch.empty(self.kept, layout.rows, dtype=wide, device=device)
        self.answer = layout.new()
        self.folded = 0  # steps
        self.point: list[Tensor] = []

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
                self.rhs[i], lengths, self.directions[i][0], self.scale, book.flags, book.numbers, book.trace,
                layout.rows, width, layout.parts, book.tol, NON_FINITE=NON_FINITE, FIRST=i == 0,
                SQUARED=self.lengths is None, P=book.width_of_sums, WIDE=book.wide_type, BLOCK=layout.piece,
                num_warps=WARPS,
            )  # fmt: skip

    def advance(self) -> None:
        """One product and one step."""
        book = self.book
        layout, rows = book.blocks, book.blocks.rows
        place, following = book.step % self.kept, (book.step + 1) % self.kept
        book.step += 1
        direction = [part[place] for part in self.directions]
        images = layout.arranged(blocks(self.product(like(self.form, tuple(direction)))))
        for i, width in enumerate(layout.widths):
            kernels.cg_curvature[book.grid(i)](
                direction[i], images[i], book.flags, book.sums, rows, width, layout.firsts[i], layout.parts,
                WIDE=book.wide_type, BLOCK=layout.piece, num_warps=WARPS,
            )  # fmt: skip
        for i, width in enumerate(layout.widths):
            kernels.cg_update[book.grid(i)](
                self.rhs[i], direction[i], images[i], self.residual[i], self.scale, self.paces[place], book.flags,
                book.numbers, book.sums, rows, width, layout.firsts[i], layout.parts, START=book.step == 1,
                NARROW=self.narrow, SQUARED=self.lengths is None, FIRST=i == 0, P=book.width_of_sums,
                WIDE=book.wide_type, BLOCK=layout.piece, num_warps=WARPS,
            )  # fmt: skip
        kernels.cg_judge[(rows,)](
            book.sums, layout.parts, book.flags, book.numbers, book.trace, book.step, rows, book.tol, self.eps,
            P=book.width_of_sums, num_warps=book.judges, **_ENDS,
        )  # fmt: skip
        again, fold = self.folded > 0, following == 0
        if fold:
            self.folded = book.step
            if not again:
                self.point, book.best = layout.new(book.wide), layout.new(book.wide)
        point, best = (self.point, book.best) if fold else (self.residual, self.residual)
        for i, width in enumerate(layout.widths):
            kernels.cg_direction[book.grid(i)](
                self.residual[i], direction[i], self.directions[i][following], self.directions[i], self.paces, point[i],
                best[i], book.flags, book.numbers, layout.like[i].numel(), book.step if fold else 0, rows, width,
                FOLD=fold, AGAIN=again, KEPT=self.kept, WIDE=book.wide_type, BLOCK=layout.piece, num_warps=WARPS,
            )  # fmt: skip

    def unfinished(self) -> Tensor:
        """Rows that go on."""
        return self.book.unfinished()

    def finish(self) -> Finish:
        """The best answers, and how they were reached."""
        book = self.book
        point, best = (self.point, book.best) if self.folded else (self.residual, self.residual)
        added = self.answer if self.added is None else self.added
        for i, width in enumerate(book.blocks.widths):
            kernels.cg_settle[book.grid(i)](
                self.directions[i], self.paces, point[i], best[i], added[i], self.answer[i], self.scale, book.flags,
                book.blocks.like[i].numel(), book.blocks.rows, width, ADDED=self.added is not None,
                FOLDED=self.folded > 0, KEPT=self.kept, WIDE=book.wide_type, BLOCK=book.blocks.piece, num_warps=WARPS,
            )  # fmt: skip
        return book.summary(self.answer)
