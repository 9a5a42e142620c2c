"""Anderson-accelerated iteration with fused steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opteq.engine.triton.anderson_kernels import anderson_mix, anderson_observe, measure_start
from opteq.engine.triton.row_state import NON_FINITE, WARPS, Blocks, RowState, float32_below, power_of_two
from opteq.engine.triton.step_acceptance import accept_start, accept_step
from opteq.solvers.anderson import Anderson, ridge
from opteq.solvers.base import Evaluation, FixedPointTask
from opteq.solvers.loop import Finish, Method
from opteq.states import Layout, State, blocks, like

# A program of Anderson's first pass is one warp, which adds up without a barrier. Where there are too few of them to
# fill a GPU, each has a smaller piece, and more of it under way at a time.
MANY_PROGRAMS = 2048

# Below this a sum of squares in float32 is zero, and so would be a floor.
_LEAST_FLOOR = torch.finfo(torch.float32).tiny

# Entries a program of the second pass and its warps, for states of many entries and of few.
_MIXED, _MIXERS = (1024, 2048), (2, 4)
_FEW_ENTRIES = 2**22


class FusedAnderson:
    """Anderson acceleration in two passes over memory beside the map, and one small program a row between them.

    The first reads the new point and its image, those before, and every stored change of the residual; it writes the
    new differences and leaves the inner products. The second reads the image and the stored moves, and writes the next
    point. With a memory of m that is 6 vectors of states and ``2 m + 2`` columns read or written a step.

    It is the method of :class:`~opteq.solvers.anderson.Anderson` with its guard
    (:class:`~opteq.solvers.loop.GuardedIteration`), for maps whose plain steps decrease the merit: columns are kept at
    their own scale and the Gram matrix is scaled instead, which is the same up to rounding.

    Args:
        solver: its options.
        task: read in place, on states.
        evaluate: its map.
        known: the map at the start.
        interval: to which the task's projection clamps every entry, where it does that and no more.
        layout: how states lie in memory.
    """

    def __init__(
        self, solver: Anderson, task: FixedPointTask, evaluate: Evaluation, known: tuple[State, Tensor | None],
        interval: tuple[float, float] | None, layout: Blocks,
    ) -> None:  # fmt: skip
        wide, eps, memory = evaluate.layout.dtype, evaluate.eps, solver.memory  # sums and differences are in wide
        self.task = task
        self.evaluate = evaluate
        self.rule = rule = solver.rule(evaluate.layout.device, eps)
        self.floor = max(solver.floor, _LEAST_FLOOR)
        self.memory = memory
        self.padded = power_of_two(memory)
        self.ridge = ridge(wide, eps)
        self.damping = _damping_by_row(task.damping if solver.damping is None else solver.damping, evaluate.layout)
        self.row_state = RowState(layout, 4 + 2 * memory, rule, wide)
        self.point = self.before = layout.arranged(blocks(task.start))
        image, self.merit = known
        self.image = self.image_before = self.older_image = layout.arranged(blocks(image))
        self.row_state.best = [torch.empty_like(part) for part in self.point]
        # Points in turn: a refused proposal leaves the point before it in force while the next one is tried. Rows that
        # have finished leave them as they are; what the map makes of those is not looked at.
        self.ring = [[torch.empty_like(part) for part in self.point] for _ in range(3)]
        rows, device = layout.rows, layout.like[0].device
        # Kernels take numbers as float32. An end that is none would let states of float64 out of the domain.
        ends = interval or ()
        exact = wide == torch.float32 or all(abs(end) == float32_below(abs(end)) for end in ends)
        self.interval = interval if exact else None
        self.used = torch.empty(rows, self.padded, dtype=torch.int32, device=device)
        self.gram = torch.empty(rows, self.padded, self.padded, dtype=torch.float64, device=device)
        self.scale = torch.empty(rows, self.padded, dtype=torch.float64, device=device)
        self.weights = torch.empty_like(self.scale)
        self.residuals = layout.new(wide, memory)
        self.moves = layout.new(wide, memory)

    def unfinished(self) -> Tensor:
        return self.row_state.unfinished()

    def finish(self) -> Finish:
        # The second pass of a step has made all copies that its decision asked for.
        return self.row_state.summary(self.row_state.settle(self.point))

    def begin(self) -> None:
        """Measure the start, and propose the first step, which is plain."""
        row_state, merit = self.row_state, self.merit
        for i, width in enumerate(row_state.blocks.widths):
            measure_start[row_state.grid(i)](
                self.point[i], self.image[i], row_state.sums, width, row_state.blocks.firsts[i], row_state.blocks.parts,
                K=4 + 2 * self.memory, WIDE=row_state.wide_type, BLOCK=row_state.blocks.piece, num_warps=WARPS,
            )  # fmt: skip
        accept_start[(row_state.blocks.rows,)](
            row_state.sums, row_state.blocks.parts, row_state.flags if merit is None else merit.contiguous(),
            row_state.flags, row_state.numbers, *self._columns(), row_state.trace, row_state.blocks.rows, row_state.tol,
            self.floor, NON_FINITE=NON_FINITE, MERITED=merit is not None, MP=self.padded, K=4 + 2 * self.memory,
            P=row_state.width_of_sums, num_warps=row_state.acceptance_warps,
        )  # fmt: skip
        self._mix(self.ring[1])
        self._project(self.ring[1])

    def advance(self) -> None:
        """Evaluate the proposal, accept or refuse it, make the next one."""
        row_state = self.row_state
        row_state.step += 1
        older, self.before, self.point = self.before, self.point, self.ring[row_state.step % 3]
        self.older_image, self.image_before = self.image_before, self.image
        image, merit = self.evaluate.state(like(self.task.start, tuple(self.point)))
        self.image = row_state.blocks.arranged(blocks(image))
        self._compare(older)
        self._accept_step(merit)
        following = self.ring[(row_state.step + 1) % 3]
        self._mix(following)
        self._project(following)

    def _columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the columns of every row: which of them count, their cosines, their lengths, their weights."""
        return self.used, self.gram, self.scale, self.weights

    def _damping(self) -> Tensor:
        return self.row_state.numbers if self.damping is None else self.damping

    def _slot(self) -> int:
        """Where the newest difference is."""
        return (self.row_state.step - 1) % self.memory

    def _compare(self, older: Sequence[Tensor]) -> None:
        row_state, layout = self.row_state, self.row_state.blocks
        at_a_time = min(layout.piece, 256 if layout.parts * layout.rows >= MANY_PROGRAMS else 512)
        for i, width in enumerate(row_state.blocks.widths):
            anderson_observe[row_state.grid(i)](
                self.point[i], self.image[i], self.before[i], self.image_before[i], older[i], self.older_image[i],
                self.residuals[i], self.moves[i], self._damping(), row_state.flags, self.used, row_state.sums,
                row_state.blocks.rows, width, self._slot(), row_state.blocks.firsts[i], row_state.blocks.parts,
                self.moves[i].stride(0), M=self.memory, MP=self.padded, DAMPED=self.damping is not None,
                WIDE=row_state.wide_type, PIECE=row_state.blocks.piece, BLOCK=at_a_time, num_warps=1,
            )  # fmt: skip

    def _accept_step(self, merit: Tensor | None) -> None:
        row_state = self.row_state
        accept_step[(row_state.blocks.rows,)](
            row_state.sums, row_state.blocks.parts, row_state.flags if merit is None else merit.contiguous(),
            row_state.flags, row_state.numbers, *self._columns(), row_state.trace, row_state.step,
            row_state.blocks.rows, self._slot(), row_state.tol, self.floor, Method.growth, 64 * self.evaluate.eps,
            self.ridge, NON_FINITE=NON_FINITE, MERITED=merit is not None, M=self.memory, MP=self.padded,
            P=row_state.width_of_sums, num_warps=row_state.acceptance_warps,
        )  # fmt: skip

    def _mix(self, following: Sequence[Tensor]) -> None:
        row_state = self.row_state
        few = sum(row_state.blocks.widths) * row_state.blocks.rows < _FEW_ENTRIES
        mixed = _MIXED[few]
        for i, width in enumerate(row_state.blocks.widths):
            anderson_mix[(-(-width // mixed), row_state.blocks.rows)](
                self.point[i], self.image[i], self.before[i], self.image_before[i], following[i], self.moves[i],
                self.weights, self._damping(), row_state.best[i], row_state.flags, row_state.blocks.rows, width,
                self.moves[i].stride(0), *(self.interval or (0.0, 0.0)), M=self.memory, MP=self.padded,
                DAMPED=self.damping is not None, CLAMPED=self.interval is not None,
                WIDE=row_state.wide_type, BLOCK=mixed, num_warps=_MIXERS[few],
            )  # fmt: skip

    def _project(self, following: Sequence[Tensor]) -> None:
        if self.task.project is not None and self.interval is None:
            projected = self.task.project(like(self.task.start, tuple(following)))
            for own, new in zip(following, blocks(projected), strict=True):
                own.copy_(new)


def _damping_by_row(damping: float | Tensor, layout: Layout) -> Tensor | None:
    """The damping of every row; None where it is 1."""
    if isinstance(damping, Tensor):
        return (damping.amin().reshape(1) if layout.coupled else damping).contiguous()
    if damping == 1:
        return None
    return torch.full((layout.rows,), float(damping), dtype=layout.dtype, device=layout.device)
