"""Conjugate gradients for ``(I - S) v = rhs`` with fused steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from opteq.engine.triton import cg_kernels as kernels
from opteq.engine.triton.launch import is_capturing
from opteq.engine.triton.row_state import NON_FINITE, WARPS, Blocks, RowState, aligned
from opteq.solvers.loop import Finish, Rule
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
        lengths: their lengths in float64, one per row; None where they are to be computed here, by sums of squares.
        layout: how they lie in memory.
        rule: when to stop.
        wide: dtype of the steps and of sums.
    """

    def __init__(
        self, product: Callable[[State], State], rhs: State, lengths: Tensor | None, layout: Blocks, rule: Rule,
        wide: torch.dtype,
    ) -> None:  # fmt: skip
        self.product = product
        self.form = rhs
        self.lengths = lengths
        self.rule = rule
        self.eps = torch.finfo(wide).eps
        self.row_state = RowState(layout, 3, rule, wide)
        self.rhs = layout.arranged(blocks(rhs))
        device = self.rhs[0].device
        self.scale = torch.empty(layout.rows, dtype=torch.float64, device=device)
        # A direction is what is multiplied, in the precision of products, so that answer and residual agree.
        dtypes = [part.dtype for part in self.rhs]
        self.narrow = any(dtype != wide for dtype in dtypes)
        self.kept = _KEPT_IN_16_BITS if all(dtype.itemsize == 2 for dtype in dtypes) else _KEPT
        self.directions = layout.new(copies=self.kept)
        self.paces = torch.empty(self.kept, aligned(layout.rows), dtype=wide, device=device)
        self.residual = layout.new(wide)
        self.answer = layout.new()
        self.folded = 0  # steps
        self.point: list[Tensor] = []

    def begin(self) -> None:
        """The answer zero, whose residual is the right side."""
        row_state, lengths = self.row_state, self.lengths
        layout = row_state.blocks
        if lengths is None:
            lengths = torch.empty(layout.rows, layout.parts, dtype=torch.float64, device=self.scale.device)
            for i, width in enumerate(layout.widths):
                kernels.cg_squares[row_state.grid(i)](
                    self.rhs[i], lengths, width, layout.firsts[i], layout.parts, BLOCK=layout.piece, num_warps=WARPS
                )
        for i, width in enumerate(layout.widths):
            kernels.cg_begin[row_state.grid(i)](
                self.rhs[i], lengths, self.directions[i][0], self.scale, row_state.flags, row_state.numbers,
                row_state.trace, layout.rows, width, layout.parts, row_state.tol, NON_FINITE=NON_FINITE,
                FIRST=i == 0, SQUARED=self.lengths is None, P=row_state.width_of_sums,
                WIDE=row_state.wide_type, BLOCK=layout.piece, num_warps=WARPS,
            )  # fmt: skip

    def advance(self) -> None:
        """One product and one step."""
        row_state = self.row_state
        layout = row_state.blocks
        place = row_state.step % self.kept
        row_state.step += 1
        direction = [part[place] for part in self.directions]
        images = layout.arranged(blocks(self.product(like(self.form, tuple(direction)))))
        self._load(images)
        self._measure(place, images, row_state.flags)
        self._update(place, images, row_state.flags, start=row_state.step == 1)
        self._accept_step(row_state.flags)
        fold, again = place + 1 == self.kept, self.folded > 0
        if fold:
            self.folded = row_state.step
            if not again:
                self.point, row_state.best = layout.new(row_state.wide), layout.new(row_state.wide)
        self._redirect(place, row_state.flags, fold, fold and again)

    def unfinished(self) -> Tensor:
        return self.row_state.unfinished()

    def finish(self) -> Finish:
        self._settle(self.row_state.flags, self.folded > 0)
        return self.row_state.summary(self.answer)

    def _measure(self, place: int, images: Sequence[Tensor], flags: Tensor) -> None:
        row_state = self.row_state
        layout = row_state.blocks
        for i, width in enumerate(layout.widths):
            kernels.cg_curvature[row_state.grid(i)](
                self.directions[i][place], images[i], flags, row_state.sums, layout.rows, width,
                layout.firsts[i], layout.parts, WIDE=row_state.wide_type, BLOCK=layout.piece, num_warps=WARPS,
            )  # fmt: skip

    def _accept_step(self, flags: Tensor) -> None:
        row_state = self.row_state
        kernels.cg_accept[(row_state.blocks.rows,)](
            row_state.sums, row_state.blocks.parts, flags, row_state.numbers, row_state.trace,
            row_state.step, row_state.blocks.rows, row_state.tol, self.eps, P=row_state.width_of_sums,
            num_warps=row_state.acceptance_warps, **_ENDS,
        )  # fmt: skip

    def _update(self, place: int, images: Sequence[Tensor], flags: Tensor, start: bool) -> None:
        row_state = self.row_state
        layout = row_state.blocks
        for i, width in enumerate(layout.widths):
            kernels.cg_update[row_state.grid(i)](
                self.rhs[i], self.directions[i][place], images[i], self.residual[i], self.scale, self.paces[place],
                flags, row_state.numbers, row_state.sums, layout.rows, width, layout.firsts[i], layout.parts,
                START=start, NARROW=self.narrow, SQUARED=self.lengths is None,
                FIRST=i == 0, P=row_state.width_of_sums, WIDE=row_state.wide_type, BLOCK=layout.piece, num_warps=WARPS,
            )  # fmt: skip

    def _redirect(self, place: int, flags: Tensor, fold: bool, again: bool) -> None:
        """The next direction, in the place after this one."""
        row_state = self.row_state
        layout = row_state.blocks
        point, best = self._sums()
        for i, width in enumerate(layout.widths):
            own = self.directions[i]
            kernels.cg_direction[row_state.grid(i)](
                self.residual[i], own[place], own[(place + 1) % self.kept],
                own, self.paces, point[i], best[i], flags, row_state.numbers, own.stride(0), self.paces.stride(0),
                row_state.step, layout.rows, width, FOLD=fold, AGAIN=again, KEPT=self.kept,
                WIDE=row_state.wide_type, BLOCK=layout.piece, num_warps=WARPS,
            )  # fmt: skip

    def _settle(self, flags: Tensor, folded: bool) -> None:
        row_state = self.row_state
        point, best = self._sums()
        for i, width in enumerate(row_state.blocks.widths):
            own = self.directions[i]
            kernels.cg_settle[row_state.grid(i)](
                own, self.paces, point[i], best[i], self.answer[i], self.scale, flags, own.stride(0),
                self.paces.stride(0), row_state.blocks.rows, width, FOLDED=folded,
                KEPT=self.kept, WIDE=row_state.wide_type, BLOCK=row_state.blocks.piece, num_warps=WARPS,
            )  # fmt: skip

    def _sums(self) -> tuple[list[Tensor], list[Tensor]]:
        """Where sums of directions are written to, or what can stand there as long as there are none."""
        return (self.point, self.row_state.best) if self.folded else (self.residual, self.residual)

    def _load(self, images: Sequence[Tensor]) -> None:
        """Launch all variants of kernels once, for no rows at all, before a capture needs them.

        A solve of few steps does not come to most of them, and a kernel may not be loaded while a graph is captured.
        """
        parts = [*self.rhs, *images]
        if is_capturing(parts[0]) or not parts[0].is_cuda:
            return
        sizes = tuple((part.dtype, part.numel(), part.data_ptr() % 16) for part in parts)
        form = (parts[0].device, self.row_state.wide, self.row_state.blocks.rows, self.lengths is None, sizes)
        if form not in _loaded:
            _loaded.add(form)
            self._launch_all(images)

    def _launch_all(self, images: Sequence[Tensor]) -> None:
        """All kernels of a step and of its end."""
        no_flags = torch.zeros_like(self.row_state.flags)
        self._measure(0, images, no_flags)
        self._accept_step(no_flags)
        for start in (False, True):
            self._update(0, images, no_flags, start)
        for fold, again in ((False, False), (True, False), (True, True)):
            self._redirect(0, no_flags, fold, again)
        for folded in (False, True):
            self._settle(no_flags, folded)
