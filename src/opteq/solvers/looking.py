"""Anderson acceleration on a CPU, which can look at every number: Python decides, tensors are left what is large."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opteq._room import Room
from opteq.solvers.judged import JudgedRows, numbers_of
from opteq.solvers.loop import Finish, Rule
from opteq.solvers.method import Method, Task
from opteq.solvers.refined import Known, Refinable
from opteq.solvers.status import Status
from opteq.states import row_norms, single, with_rows

# Inner products of float32 vectors with such lengths are exact to rounding, and so are those of what a solve makes of
# them on its way to any tolerance that float32 can reach.
_LEAST, _MOST = 1e-6, 1e9


class LookingAnderson(JudgedRows):
    """A run with the steps, decisions and answers of
    :class:`~opteq.solvers.refined.RefinedRun` for a map without rough images.

    There, everything that is decided a sample is an operation on tensors, a hundred a step: they also serve GPUs,
    tapes and vmap. With states of a megabyte those take as long as a convolution. Here they are a few lines of Python,
    and states are read and written less often: differences are written where they stay, and left as they are, since the
    Gram matrix can be scaled as well; and lengths that are known are not computed again.

    Args:
        task: the problem.
        refinable: the map, for all rows or some of them.
        known: its evaluation at the start.
        rule: when to stop.
        floor: norm below which a state counts as zero.
        memory: number of differences.
        damping: share of the residual that is added: a number, or a column with one a row.
        ridge: what is added to the Gram matrix of cosines.
        room: where to work; answers are never there.
    """

    def __init__(
        self,
        task: Task,
        refinable: Refinable,
        known: Known,
        rule: Rule,
        floor: float,
        memory: int,
        damping: float | Tensor,
        ridge: float,
        room: Room,
    ) -> None:
        self.rule = rule
        self.known = known
        self.layout = task.layout
        self.refinable = refinable
        self.floor = floor
        self.memory = memory
        self.damping = damping
        self.ridge = ridge
        self.point, self.image = task.start, task.known[0]
        rows, width = self.point.shape
        # Two more than are remembered: the change at the present point, and at the one before it.
        self.turns = room.take("turns", rows, memory + 2, width, dtype=self.point.dtype)
        self.moves = room.take("moves", rows, memory, width, dtype=self.point.dtype)
        self.gram = torch.zeros(rows, memory, memory, dtype=torch.float64, device="cpu")
        self.change = memory
        self.slot, self.filled = -1, 0
        self.used = [[False] * memory for _ in range(rows)]
        self.fresh = [True] * rows
        self.last: Tensor | None = None

    @staticmethod
    def suits(task: Task) -> bool:
        """Whether lengths at the start are such that nothing can overflow or vanish on the way."""
        image = task.known[0]
        if not len(image) or image.device.type != "cpu" or torch._C._are_functorch_transforms_active():
            return False
        # Rows that are not finite end before a step is taken.
        return all(_LEAST < size < _MOST or not math.isfinite(size) for size in row_norms(image).tolist())

    def begin(self) -> None:
        """The start is measured, and the best so far."""
        self.least, residual = self._seen(self.point, self.image)
        self._open(residual, self.point)
        self.settled = [True] * len(residual)

    def advance(self) -> None:
        """One proposal, judged as :class:`~opteq.solvers.guarded.GuardedIteration` does it."""
        active = self._active()
        proposal = self._proposal(active)
        going = [row for row, on in enumerate(active) if on]
        image = self._evaluated(proposal, going)
        before = self.change
        self.change = self.memory + (before == self.memory)
        gap, residual = self._seen(proposal, image)
        refused, chosen = [], []
        for row in going:
            finite, plain = math.isfinite(residual[row]), not any(self.used[row])
            if not finite or not (plain or gap[row] <= Method.growth * self.least[row]):
                refused.append(row)
            self.settled[row] = self._taken(row, residual[row])
            if self.settled[row]:
                chosen.append(row)
            if not self.done[row]:
                self.dead[row] = 0 if finite or not plain else int(Status.NON_FINITE)
            if gap[row] < self.least[row]:
                self.least[row] = gap[row]
        self._entered(active, residual, proposal, chosen)
        if refused:
            rows = numbers_of(refused)
            proposal = proposal.index_copy(0, rows, self.point[rows])
            image = image.index_copy(0, rows, self.image[rows])
            self.turns[rows, self.change] = self.turns[rows, before]
            for row in refused:
                self.used[row] = [False] * self.memory
                self.fresh[row] = True
        self.point, self.image = proposal, image

    def finish(self) -> Finish:
        """The best points, evaluated again where another one was evaluated after them: no step can follow."""
        rows = [row for row, settled in enumerate(self.settled) if not settled]
        if rows:
            image = self._evaluated(self.best, rows)
            _, residual = self._seen(self.best, image)
            for row in rows:
                self.best_residual[row] = residual[row]
                self.done[row] = residual[row] <= self.rule.tol
                self.settled[row] = True
        return self._finished()

    def _seen(self, point: Tensor, image: Tensor) -> tuple[list[float], list[float]]:
        """Length of the change and relative residual of every row; the change is kept."""
        change = torch.sub(image, point, out=self.turns[:, self.change])
        gap: list[float] = row_norms(change).tolist()
        size = row_norms(image).tolist()
        return gap, [g / max(s, self.floor) if s == s else s for g, s in zip(gap, size, strict=True)]

    def _evaluated(self, points: Tensor, rows: list[int]) -> Tensor:
        """Images with those of the given rows put right; what is known moves there."""
        if len(rows) == len(points):
            self.known = self.refinable.exact(single(self.layout.unpack(points)))
            return self.layout.pack(self.known[-1])
        some, chosen = self.layout.of_batch(len(rows)), numbers_of(rows)
        fresh = self.refinable.exact(single(some.unpack(points[chosen])), chosen)
        self.known = tuple(with_rows(old, chosen, new) for old, new in zip(self.known, fresh, strict=True))
        return self.layout.pack(self.known[-1])

    def _proposal(self, active: list[bool]) -> Tensor:
        undamped = isinstance(self.damping, float | int) and self.damping == 1
        change = self.turns[:, self.change]
        step = self.image if undamped else self.point + self.damping * change
        last, self.last = self.last, step
        fresh, self.fresh = self.fresh, [old and not on for old, on in zip(self.fresh, active, strict=True)]
        if last is None:
            return step
        slot = self.slot = (self.slot + 1) % self.memory
        self.filled = max(self.filled, slot + 1)
        turns, moves = self.turns[:, : self.filled], self.moves[:, : self.filled]
        torch.sub(step, last, out=self.moves[:, slot])
        torch.sub(change, self.turns[:, 2 * self.memory + 1 - self.change], out=self.turns[:, slot])
        # Of the newest difference and of the change, in one pass.
        pair = self.turns[:, slot : self.change + 1 : self.change - slot]
        products = (pair @ turns.mT).to(torch.float64)
        line = products[:, 0]
        self.gram[:, slot, : self.filled] = line
        self.gram[:, : self.filled, slot] = line
        squares = line[:, slot].tolist()
        for row, on in enumerate(active):
            # A difference of zero teaches nothing.
            usable = not fresh[row] and 0 < squares[row] < math.inf
            if on:
                self.used[row][slot] = usable
                if not usable:  # a weight of zero would not make a zero of what is not finite
                    self.turns[row, slot] = 0
                    self.moves[row, slot] = 0
        weights = self._weights(products[:, 1], active).to(step.dtype)
        return torch.baddbmm(step[:, None], weights[:, None], moves, alpha=-1)[:, 0]

    def _weights(self, target: Tensor, active: list[bool]) -> Tensor:
        """``(Gram + ridge I) w = target`` over the columns in use, all of them scaled to length one."""
        slot, filled = self.slot, self.filled
        used = torch.tensor([columns[:filled] for columns in self.used], dtype=torch.float64, device="cpu")
        gram = self.gram[:, :filled, :filled]
        scale = used / gram.diagonal(dim1=1, dim2=2).clamp(min=torch.finfo(torch.float64).tiny).sqrt()
        system = gram * (scale[:, :, None] * scale[:, None, :])
        # A column outside use has an empty line: one on its diagonal makes its weight zero.
        system.diagonal(dim1=1, dim2=2).add_(1 - (1 - self.ridge) * used)
        target = target * scale
        factor, _ = torch.linalg.cholesky_ex(system)
        weights = torch.cholesky_solve(target[:, :, None], factor)[:, :, 0] * scale
        least = factor.diagonal(dim1=1, dim2=2).amin(dim=1).tolist()
        bound = math.sqrt(3 * self.ridge)
        for row, on in enumerate(active):
            if on and not least[row] > bound:
                # Its columns have become dependent: the newest one remains, whose system is a single number.
                self.used[row] = [column == slot and self.used[row][slot] for column in range(self.memory)]
                weights[row] = 0
                if self.used[row][slot]:
                    weights[row, slot] = target[row, slot] * scale[row, slot] / (1 + self.ridge)
        return weights
