"""Blocks in memory, row states and the end of a solve, for all fused solvers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from opteq.engine.trace import in_layout
from opteq.engine.triton import row_state_kernels as kernels
from opteq.solvers.loop import Finish, Rule
from opteq.solvers.status import Status

BLOCK = 2048
MOST_PARTS = 1024
WARPS = 4
NON_FINITE = int(Status.NON_FINITE)
_SUMMARISED = 128


@dataclass(frozen=True)
class InPlace(Finish):
    """A finish whose tensors are at the same address after every step; ``trace_memory`` is all memory of the trace."""

    trace_memory: Tensor


def power_of_two(number: int) -> int:
    """The least power of two that is not below ``number``."""
    return 1 << max(number - 1, 0).bit_length()


def aligned(number: int) -> int:
    """The least multiple of 16 that is not below ``number``: what begins there is read as fast as can be."""
    return -(-number // 16) * 16


def float32_below(number: float) -> float:
    """The largest float32 number that is not above ``number``: kernels take Python's numbers as float32."""
    near = torch.tensor(number, dtype=torch.float32, device="cpu")
    return float(near if float(near) <= number else torch.nextafter(near, torch.zeros_like(near)))


class Blocks:
    """How the parts of a state lie in memory: each as ``rows`` runs of ``width`` entries, one program a piece of a run.

    Every buffer of a solve has the strides of the first image, so that no kernel sees anything but runs of memory.

    Args:
        parts: of the first image.
        rows: samples, or one where they are coupled.
        many: a number of programs below which pieces are halved, for kernels that are busy for a while with theirs.
    """

    def __init__(self, parts: Sequence[Tensor], rows: int, many: int = 0) -> None:
        self.like = [part if _dense(part) else part.contiguous() for part in parts]
        self.rows = rows
        self.widths = [part.numel() // rows for part in self.like]
        programs = sum(-(-width // BLOCK) for width in self.widths)
        self.piece = BLOCK // 2 if rows * programs < many and 2 * programs <= MOST_PARTS else BLOCK
        self.counts = [-(-width // self.piece) for width in self.widths]
        self.firsts = [sum(self.counts[:i]) for i in range(len(self.counts))]
        self.parts = sum(self.counts)

    @property
    def fits(self) -> bool:
        """Whether one program can add up a row's sums."""
        return self.parts <= MOST_PARTS

    def new(self, dtype: torch.dtype | None = None, copies: int | None = None) -> list[Tensor]:
        """Buffers, one a part; ``copies`` of each follow one another, aligned, the first dimension counting them."""
        shape = () if copies is None else (copies,)
        made = []
        for part in self.like:
            strides = part.stride() if copies is None else (aligned(part.numel()), *part.stride())
            made.append(
                torch.empty_strided((*shape, *part.shape), strides, dtype=dtype or part.dtype, device=part.device)
            )
        return made

    def arranged(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The same values, in the strides of this layout; nothing is copied where they are so already."""
        return [in_layout(like.stride(), part) for part, like in zip(parts, self.like, strict=True)]


def _dense(part: Tensor) -> bool:
    """Whether every sample is one run of memory, and the samples follow each other."""
    order = sorted(range(1, part.ndim), key=part.stride, reverse=True)
    expected = 1
    for dimension in reversed(order):
        if part.shape[dimension] != 1 and part.stride(dimension) != expected:
            return False
        expected *= part.shape[dimension]
    return part.shape[0] == 1 or part.stride(0) == expected


class RowState:
    """Flags and numbers of every row on the device, as :mod:`opteq.engine.triton.row_state_kernels` lays them out."""

    def __init__(self, blocks: Blocks, sums: int, rule: Rule, wide: torch.dtype) -> None:
        device = blocks.like[0].device
        self.blocks = blocks
        self.rule = rule
        self.tol = float32_below(rule.tol)  # the kernels and the status of a row agree on it to the last digit
        self.wide = wide
        # The decision of the start writes all of these that a later step reads: a launch each would be most of it.
        self.flags = torch.empty(7, blocks.rows, dtype=torch.int32, device=device)
        self.numbers = torch.empty(7, blocks.rows, dtype=torch.float64, device=device)
        self.sums = torch.empty(blocks.rows, sums, blocks.parts, dtype=wide, device=device)
        self.trace = torch.empty(rule.max_steps + 1, blocks.rows, dtype=torch.float64, device=device)
        self.residual = torch.empty(blocks.rows, dtype=torch.float64, device=device)
        self.steps, self.codes = (torch.empty(blocks.rows, dtype=torch.int64, device=device) for _ in range(2))
        self.step = 0
        self.wide_type = tl.float64 if wide == torch.float64 else tl.float32
        self.width_of_sums = power_of_two(blocks.parts)
        # A single warp adds up without a barrier; long rows have too many sums for one.
        self.acceptance_warps = 1 if self.width_of_sums <= 128 else 4
        self.best: list[Tensor] = []

    def unfinished(self) -> Tensor:
        """Rows that go on: 1 there, else 0."""
        return self.flags[kernels.ACTIVE.value]

    def grid(self, index: int) -> tuple[int, int]:
        """Programs over part ``index``: pieces of a row, rows."""
        return self.blocks.counts[index], self.blocks.rows

    def settle(self, newest: Sequence[Tensor]) -> list[Tensor]:
        """The best points, once the newest ones that are among them are copied."""
        for i, width in enumerate(self.blocks.widths):
            kernels.keep[self.grid(i)](
                newest[i], self.best[i], self.flags, self.blocks.rows, width, BLOCK=self.blocks.piece, num_warps=WARPS
            )
        return self.best

    def summary(self, best: Sequence[Tensor]) -> Finish:
        """The end of a solve with these points."""
        rows = self.blocks.rows
        kernels.summarise[(-(-rows // _SUMMARISED),)](
            self.flags, self.numbers, self.residual, self.steps, self.codes, rows, self.tol,
            CONVERGED=int(Status.CONVERGED), MAX_STEPS=int(Status.MAX_STEPS), BLOCK=_SUMMARISED, num_warps=1,
        )  # fmt: skip
        trace = self.trace[: self.step + 1]
        return InPlace(tuple(best), self.residual, self.steps, self.codes, trace, self.trace)
