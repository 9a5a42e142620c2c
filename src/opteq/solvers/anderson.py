"""Anderson acceleration: the combination of recent steps whose residuals cancel best."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.common.validate import whole
from opteq.solvers.base import DampedSolver
from opteq.solvers.loop import Method, RowTask
from opteq.states import choose_rows, is_tracked, row_norms, widest_dtype, zeros_per_row


@dataclass(frozen=True, kw_only=True)
class Anderson(DampedSolver):
    """Anderson acceleration (type II) with a memory of a few steps.

    With ``g = T(y) - y`` and the last differences ``dY``, ``dG``, the weights ``w`` minimise ``|g - dG w|`` and
    ``y <- y - dY w + damping (g - dG w)``. Differences are stored divided by ``|dG|``, so the Gram matrix holds cosines
    at every scale of the problem. The system is solved in float64 with a ridge at its rounding level. A row whose
    columns have become dependent keeps only the newest one. No singular-matrix error is possible.

    Args:
        memory: number of differences. Five give most of the gain; more cost memory and conditioning.
        damping: share of the residual that is added; None takes the problem's recommendation, else 1.

    >>> import torch
    >>> outcome = Anderson(tol=1e-6).solve(lambda y: 0.5 * y + 1, torch.zeros(1, 1))
    >>> round(float(outcome.state), 4), int(outcome.steps)
    (2.0, 2)
    """

    memory: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self, "memory")

    def _method(self, task: RowTask) -> Method:
        return _AndersonMixing(task.start, self.memory, self._damping(task), ridge(task.start.dtype, task.eps))


def ridge(dtype: torch.dtype, eps: float) -> float:
    """The ridge of a Gram matrix of cosines: inner products carry ``dtype``'s rounding, differences the map's."""
    return max(50 * torch.finfo(dtype).eps, 0.1 * eps)


class MemoryMethod(Method):
    """A method that keeps a column per step: those that are ``used``, and ``fresh`` rows, which learn none yet."""

    def __init__(self, start: Tensor, memory: int, damping: float | Tensor) -> None:
        self.damping = damping
        self.used = zeros_per_row(start, memory, dtype=torch.bool)
        self.fresh = ~zeros_per_row(start, dtype=torch.bool)
        self.last: tuple[Tensor, Tensor] | None = None

    def plain(self) -> Tensor:
        return ~self.used.any(dim=1)

    def restart(self, rows: Tensor) -> None:
        self.used = self.used & ~rows[:, None]
        self.fresh = self.fresh | rows


class _AndersonMixing(MemoryMethod):
    shortens = True

    def __init__(self, start: Tensor, memory: int, damping: float | Tensor, ridge: float) -> None:
        super().__init__(start, memory, damping)
        self.residuals = History(start, memory)  # dG / |dG|
        self.moves = History(start, memory)  # (dY + damping dG) / |dG|
        small = widest_dtype(start)
        self.gram = zeros_per_row(start, memory, memory, dtype=small)
        self.eye = torch.eye(memory, dtype=small, device=start.device)
        self.ridge = ridge

    def propose(self, point: Tensor, image: Tensor, change: Tensor, active: Tensor) -> Tensor:
        undamped = isinstance(self.damping, float | int) and self.damping == 1
        plain_step = image if undamped else point + self.damping * change
        if self.last is not None:
            self._learn(plain_step - self.last[0], change - self.last[1], active)
        self.last = (plain_step, change)
        self.fresh = self.fresh & ~active
        # Columns have length one, so products with the change itself neither overflow nor vanish before it does.
        target = self.residuals.products(change).to(self.gram.dtype)
        return self.moves.subtract(plain_step, self._solve(target))

    def shorten(self, rows: Tensor) -> None:
        assert self.last is not None
        factor = torch.where(rows[:, None], 0.5, torch.ones_like(self.last[0][:, :1]))
        self.damping = self.damping * factor

    def inverse_adjoint(self, rows: Tensor) -> Tensor:
        """``damping I - residuals (Gram)^-1 moves'``: what the last proposal used, transposed."""
        shares = self.moves.products(rows).to(self.gram.dtype)
        return self.damping * rows - self.residuals.combine(self._solve(shares))

    def _learn(self, move: Tensor, change: Tensor, active: Tensor) -> None:
        """Keep how the last move changed the plain step, and the residual ``T(y) - y``."""
        length = row_norms(change)
        scale = torch.where(length > 0, length, 1.0)
        # A difference of zero teaches nothing, and one that overflows would stay in the ring as infinity times zero.
        usable = torch.isfinite(length) & (length > 0) & torch.isfinite((row_norms(move) / scale).to(move.dtype))
        known = active & ~self.fresh & usable
        column = scale.to(change.dtype)[:, None]
        self.residuals.push(change, column, known)
        self.moves.push(move, column, known)
        slot = self.residuals.slot
        self.used = with_column(self.used, slot, torch.where(active, known, self.used[:, slot]))
        cosines = self.residuals.products(self.residuals.newest).to(self.gram.dtype)
        line = torch.where(active[:, None], cosines, self.gram[:, slot])
        self.gram = with_column(with_column(self.gram, slot, line).mT, slot, line)

    def _solve(self, target: Tensor) -> Tensor:
        """Weights with ``(Gram + ridge I) w = target`` over the columns in use; dependent columns go out of use."""
        eye = self.eye
        pairs = self.used[:, :, None] & self.used[:, None, :]
        system = torch.where(pairs & torch.isfinite(self.gram), self.gram, 0.0)
        # A column outside use has an empty line: one on its diagonal makes its weight zero.
        system = system + torch.where(self.used, self.ridge, 1.0)[:, :, None] * eye
        target = torch.where(self.used & torch.isfinite(target), target, 0.0)
        factor, failure = torch.linalg.cholesky_ex(system)
        pivots = factor.diagonal(dim1=-2, dim2=-1).square()
        sound = (failure == 0) & (pivots.amin(dim=1) > 3 * self.ridge)
        # Rows with dependent columns fall back on the newest one, whose system is a single number.
        newest = torch.zeros_like(self.used)
        newest[:, self.residuals.slot] = True
        self.used = self.used & (sound[:, None] | newest)
        single = torch.where(self.used, target, 0.0) / (1 + self.ridge)
        factor = torch.where(sound[:, None, None], factor, eye)
        # Not by cholesky_solve: on a GPU that allocates by itself, which a graph can't capture.
        half = torch.linalg.solve_triangular(factor, target[:, :, None], upper=False)
        joint = torch.linalg.solve_triangular(factor.mT, half, upper=True)
        return torch.where(sound[:, None], joint[:, :, 0], single)


class History:
    """At most ``memory`` vectors per row, in a ring buffer.

    Only finite columns are written, so the weight zero is enough to leave one out. The place for a column is taken when
    there is one: the first steps of a solve, which on a CPU are most of them, read and clear no empty ones.
    """

    def __init__(self, like: Tensor, memory: int) -> None:
        self.memory = memory
        self.slot = -1
        self.filled = 0
        plain = not torch._C._are_functorch_transforms_active()
        shape = (memory, like.shape[1])
        self._ring = like.new_empty(like.shape[0], *shape) if plain else zeros_per_row(like, *shape)

    @property
    def columns(self) -> Tensor:
        """The vectors that were written, ``(R, filled, N)``."""
        return self._ring[:, : self.filled]

    @property
    def newest(self) -> Tensor:
        """The newest column, ``(R, N)``."""
        return self._ring[:, self.slot]

    @property
    def following(self) -> int:
        """The slot that is written next, which holds the oldest column."""
        return (self.slot + 1) % self.memory

    def push(self, vector: Tensor, scale: Tensor, rows: Tensor) -> None:
        """Write ``vector / scale`` over the oldest column in ``rows``; others keep theirs, or zeros."""
        slot = self.slot = self.following
        new = slot == self.filled
        self.filled += new
        taped = torch.is_grad_enabled() and (is_tracked(vector) or is_tracked(self._ring))
        column = choose_rows(rows, vector / scale, 0.0 if new else self._ring[:, slot])
        if taped:  # the old columns are still needed as they were
            self._ring = torch.cat([self._ring[:, :slot], column[:, None], self._ring[:, slot + 1 :]], dim=1)
        else:
            self._ring[:, slot] = column

    def products(self, vector: Tensor) -> Tensor:
        """Inner products of every column with a vector ``(R, N)``: ``(R, memory)``, zeros where there is none yet."""
        # With the vector on the left: a CPU takes less than half the time that it takes the other way round.
        found = (vector[:, None] @ self.columns.mT)[:, 0]
        return torch.nn.functional.pad(found, (0, self.memory - self.filled))

    def combine(self, weights: Tensor) -> Tensor:
        """The sum of the columns with ``weights`` ``(R, memory)``: ``(R, N)``."""
        return (self._weights(weights) @ self.columns)[:, 0]

    def subtract(self, vector: Tensor, weights: Tensor) -> Tensor:
        """``vector`` without the sum of the columns with ``weights``, in one pass."""
        return torch.baddbmm(vector[:, None], self._weights(weights), self.columns, alpha=-1)[:, 0]

    def _weights(self, weights: Tensor) -> Tensor:
        return weights[:, None, : self.filled].to(self._ring.dtype)


def with_column(matrix: Tensor, slot: int, values: Tensor) -> Tensor:
    """A copy with ``[:, slot]`` replaced; the copy is small, and a tape may still need the original."""
    matrix = matrix.clone()
    matrix[:, slot] = values
    return matrix
