"""Conjugate gradients for ``(I - S) v = rhs`` with fused steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from opteq._triton import is_capturing
from opteq.solvers.fused import kernels
from opteq.solvers.fused.ledger import NON_FINITE, WARPS, Blocks, Ledger, aligned
from opteq.solvers.loop import Finish, Rule
from opteq.solvers.scaled import ScaledProduct
from opteq.solvers.status import Status
from opteq.states import State, blocks, like

_ENDS = {"INDEFINITE": int(Status.INDEFINITE), "SINGULAR": int(Status.SINGULAR), "NON_FINITE": NON_FINITE}
# Directions that are kept, by their bytes: all that most solves take where a direction has 16 bits, and else two, which
# with the sum of those before them move no more memory than an answer that is written down at every step.
_KEPT, _KEPT_IN_16_BITS = 2, 6
# Forms of solves whose kernels have been launched, and so compiled and loaded, all of them.
_loaded: set[Hashable] = set()


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
        scaled: the product for directions that are kept as halves, where there is such a one.
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
        scaled: ScaledProduct | None = None,
    ) -> None:
        self.product = product
        self.scaled = scaled if scaled is not None and scaled.in_use else None
        # What this solve does not use yet, a captured one may.
        self.expects_scaled = scaled is not None and self.scaled is None
        self.form = rhs
        self.lengths = lengths
        self.rule = rule
        self.eps = torch.finfo(wide).eps
        self.book = Ledger(layout, 3, rule, wide)
        self.rhs = layout.arranged(blocks(rhs))
        self.added = None if added is None else layout.arranged(blocks(added))
        device = self.rhs[0].device
        self.scale = torch.empty(layout.rows, dtype=torch.float64, device=device)
        self._keep_directions(None if self.scaled is None else self.scaled.gain)
        self.residual = layout.new(wide)
        self.answer = layout.new()
        self.folded = 0  # steps
        self.point: list[Tensor] = []

    def _keep_directions(self, gain: Tensor | None) -> None:
        """Make room for them, in the precision of products; as scaled halves where there is a ``gain``.

        A direction is what is multiplied, so that the answer and its residual agree.
        """
        layout, wide = self.book.blocks, self.book.wide
        dtypes = [torch.float16 if gain is not None else part.dtype for part in self.rhs]
        self.gain = gain
        self.narrow = any(dtype != wide for dtype in dtypes)
        self.kept = _KEPT_IN_16_BITS if all(dtype.itemsize == 2 for dtype in dtypes) else _KEPT
        self.directions = layout.new(None if gain is None else torch.float16, copies=self.kept)
        device = self.rhs[0].device
        self.tops = None if gain is None else torch.empty(self.kept, aligned(2 * layout.rows), device=device)
        self.paces = torch.empty(self.kept, aligned(layout.rows), dtype=wide, device=device)

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
                self.rhs[i], lengths, self.directions[i][0], self._tops(0), self._gain(), self.scale, book.flags,
                book.numbers, book.trace, layout.rows, width, layout.parts, book.tol, NON_FINITE=NON_FINITE,
                FIRST=i == 0, SQUARED=self.lengths is None, SCALED=self.tops is not None, P=book.width_of_sums,
                WIDE=book.wide_type, BLOCK=layout.piece, num_warps=WARPS,
            )  # fmt: skip

    def advance(self) -> None:
        """One product and one step."""
        book = self.book
        layout, rows = book.blocks, book.blocks.rows
        place = book.step % self.kept
        book.step += 1
        direction = [part[place] for part in self.directions]
        if self.scaled is None:
            image = self.product(like(self.form, tuple(direction)))
        else:
            image = self.scaled(direction[0], self._tops(place)[: 2 * rows])
        images = layout.arranged(blocks(image))
        self._load(images)
        self._measure(place, images, book.flags)
        self._update(place, images, book.flags, start=book.step == 1)
        self._judge(place, book.flags)
        fold, again = place + 1 == self.kept, self.folded > 0
        if fold:
            self.folded = book.step
            if not again:
                self.point, book.best = layout.new(book.wide), layout.new(book.wide)
        self._redirect(place, book.flags, fold, fold and again)

    def unfinished(self) -> Tensor:
        """Rows that go on."""
        return self.book.unfinished()

    def finish(self) -> Finish:
        """The best answers, and how they were reached."""
        self._settle(self.book.flags, self.folded > 0)
        return self.book.summary(self.answer)

    def _tops(self, place: int) -> Tensor:
        """Bounds of a direction's entries, or what can stand there where it has no scales."""
        return self.paces if self.tops is None else self.tops[place % self.kept]

    def _gain(self) -> Tensor:
        return self.paces if self.gain is None else self.gain

    def _measure(self, place: int, images: Sequence[Tensor], flags: Tensor) -> None:
        book = self.book
        layout = book.blocks
        for i, width in enumerate(layout.widths):
            kernels.cg_curvature[book.grid(i)](
                self.directions[i][place], self._tops(place), images[i], flags, book.sums, layout.rows, width,
                layout.firsts[i], layout.parts, SCALED=self.tops is not None, WIDE=book.wide_type, BLOCK=layout.piece,
                num_warps=WARPS,
            )  # fmt: skip

    def _judge(self, place: int, flags: Tensor) -> None:
        book = self.book
        kernels.cg_judge[(book.blocks.rows,)](
            book.sums, self._tops(place + 1), self._gain(), book.blocks.parts, flags, book.numbers, book.trace,
            book.step, book.blocks.rows, book.tol, self.eps, SCALED=self.tops is not None, P=book.width_of_sums,
            num_warps=book.judges, **_ENDS,
        )  # fmt: skip

    def _update(self, place: int, images: Sequence[Tensor], flags: Tensor, start: bool) -> None:
        book = self.book
        layout = book.blocks
        for i, width in enumerate(layout.widths):
            kernels.cg_update[book.grid(i)](
                self.rhs[i], self.directions[i][place], self._tops(place), images[i], self.residual[i], self.scale,
                self.paces[place], flags, book.numbers, book.sums, layout.rows, width, layout.firsts[i], layout.parts,
                START=start, NARROW=self.narrow, SQUARED=self.lengths is None, SCALED=self.tops is not None,
                FIRST=i == 0, P=book.width_of_sums, WIDE=book.wide_type, BLOCK=layout.piece, num_warps=WARPS,
            )  # fmt: skip

    def _redirect(self, place: int, flags: Tensor, fold: bool, again: bool) -> None:
        """The next direction, in the place after this one."""
        book = self.book
        layout = book.blocks
        point, best = self._sums()
        for i, width in enumerate(layout.widths):
            own = self.directions[i]
            kernels.cg_direction[book.grid(i)](
                self.residual[i], own[place], own[(place + 1) % self.kept], self._tops(place), self._tops(place + 1),
                own, self.paces, point[i], best[i], flags, book.numbers, own.stride(0), self.paces.stride(0),
                book.step, layout.rows, width, FOLD=fold, AGAIN=again, KEPT=self.kept, SCALED=self.tops is not None,
                WIDE=book.wide_type, BLOCK=layout.piece, num_warps=WARPS,
            )  # fmt: skip

    def _settle(self, flags: Tensor, folded: bool) -> None:
        book = self.book
        point, best = self._sums()
        added = self.answer if self.added is None else self.added
        for i, width in enumerate(book.blocks.widths):
            own = self.directions[i]
            kernels.cg_settle[book.grid(i)](
                own, self.paces, point[i], best[i], added[i], self.answer[i], self.scale, flags, own.stride(0),
                self.paces.stride(0), book.blocks.rows, width, ADDED=self.added is not None, FOLDED=folded,
                KEPT=self.kept, WIDE=book.wide_type, BLOCK=book.blocks.piece, num_warps=WARPS,
            )  # fmt: skip

    def _sums(self) -> tuple[list[Tensor], list[Tensor]]:
        """Where sums of directions are written to, or what can stand there as long as there are none."""
        return (self.point, self.book.best) if self.folded else (self.residual, self.residual)

    def _load(self, images: Sequence[Tensor]) -> None:
        """Launch all variants of kernels once, for no rows at all, before a capture needs them.

        A solve of few steps does not come to most of them, and a kernel may not be loaded while a graph is captured.
        """
        parts = [*self.rhs, *images, *(self.added or ())]
        if is_capturing(parts[0]) or not parts[0].is_cuda:
            return
        sizes = tuple((part.dtype, part.numel(), part.data_ptr() % 16) for part in parts)
        form = (
            parts[0].device,
            self.book.wide,
            self.book.blocks.rows,
            self.lengths is None,
            self.added is None,
            sizes,
            self.tops is None,
            self.expects_scaled,
        )
        if form in _loaded:
            return
        _loaded.add(form)
        self._launch_all(images)
        if self.expects_scaled:
            # Another one like it, with a gain that stands for that of products.
            layout = self.book.blocks
            twin = FusedConjugateGradients(
                self.product, self.form, self.lengths, None, layout, self.rule, self.book.wide
            )
            twin.added = self.added
            twin._keep_directions(torch.ones(layout.rows, device=parts[0].device))
            twin.begin()
            twin._launch_all(images)

    def _launch_all(self, images: Sequence[Tensor]) -> None:
        """All kernels of a step and of its end."""
        nobody = torch.zeros_like(self.book.flags)
        self._measure(0, images, nobody)
        self._judge(0, nobody)
        for start in (False, True):
            self._update(0, images, nobody, start)
        for fold, again in ((False, False), (True, False), (True, True)):
            self._redirect(0, nobody, fold, again)
        for folded in (False, True):
            self._settle(nobody, folded)
