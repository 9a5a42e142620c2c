"""Anderson acceleration of states of 16 bits with fused steps: residuals and images are kept, not their differences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opteq.solvers.fused import kernels
from opteq.solvers.fused.available import MOST_COLUMNS
from opteq.solvers.fused.fixed_point import FusedAnderson
from opteq.solvers.fused.ledger import NON_FINITE, WARPS, Blocks, power_of_two
from opteq.solvers.method import StateTask
from opteq.states import blocks

_SHORT = (torch.bfloat16, torch.float16)
_MOST_IMAGES = MOST_COLUMNS + 2  # what the kernel has arguments for


def keeps_images(task: StateTask) -> bool:
    """Whether the residuals of a task lose nothing as scaled float16, and its steps are means of images."""
    parts = (*blocks(task.start), *blocks(task.known[0]))
    damped = isinstance(task.damping, Tensor) or task.damping != 1
    return not damped and all(part.dtype in _SHORT for part in parts)


class FusedImageAnderson(FusedAnderson):
    """The same steps as :class:`FusedAnderson` with less traffic: a difference is not read or written as such.

    The first pass reads the new point, its image and the last m residuals, and writes one; the second reads ``m + 1``
    images, which stay where the map has left them, and writes the next point: ``2 m + 5`` vectors a step.
    """

    def begin(self) -> None:
        """Measure the start, and propose the first step, which is plain."""
        self._keep_image()
        super().begin()

    def _remember(self, layout: Blocks) -> None:
        rows, device = layout.rows, layout.like[0].device
        # One more than the differences have: a proposal that was refused leaves a gap in the row of those that count.
        self.places = self.memory + 2
        self.padded_places = power_of_two(self.places)
        self.columns = layout.new(torch.float16, self.places)
        self.images = [self.image] * self.places
        self.targets = torch.empty_like(self.scale)
        self.newer, self.older = torch.empty_like(self.used), torch.empty_like(self.used)
        self.held = torch.empty(rows, self.padded_places, dtype=torch.int32, device=device)
        self.units = torch.empty(rows, self.padded_places, dtype=torch.float64, device=device)
        self.weights = torch.empty_like(self.units)
        self.image_before = self.older_image = self.image

    def _sums(self) -> int:
        return 6 + self.memory

    def _memory(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.used, self.gram, self.scale, self.targets

    def _place(self) -> int:
        """Where the newest residual and the newest image are."""
        return self.book.step % self.places

    def _keep_image(self) -> None:
        # A map may hand back its argument, whose buffer is written again before this image is read for the last time.
        self.image = [
            image.clone() if image.untyped_storage().data_ptr() == point.untyped_storage().data_ptr() else image
            for image, point in zip(self.image, self.point, strict=True)
        ]
        self.images[self._place()] = self.image

    def _open(self, following: Sequence[Tensor]) -> None:
        book = self.book
        for i, width in enumerate(book.blocks.widths):
            kernels.images_begin[book.grid(i)](
                self.point[i], self.image[i], following[i], book.best[i], self._best_image(i), self.columns[i],
                book.flags, book.numbers, self.held, self.units, book.sums, book.blocks.rows, width,
                book.blocks.firsts[i], book.blocks.parts, *self._ends(), R=self.places, RP=self.padded_places,
                CLAMPED=self.interval is not None, IMAGED=self.best_image is not None, FIRST=i == 0,
                WIDE=book.wide_type, BLOCK=book.blocks.piece, num_warps=WARPS,
            )  # fmt: skip

    def _compare(self, older: Sequence[Tensor]) -> None:  # noqa: ARG002 - what counts is in memory
        book = self.book
        self._keep_image()
        for i, width in enumerate(book.blocks.widths):
            kernels.images_observe[book.grid(i)](
                self.point[i], self.image[i], self.columns[i], book.flags, book.numbers, self.held, book.sums,
                book.blocks.rows, width, self._place(), book.blocks.firsts[i], book.blocks.parts,
                self.columns[i].stride(0), R=self.places, RP=self.padded_places, WIDE=book.wide_type,
                # More columns than eight are a tile of twice the height.
                PIECE=book.blocks.piece, BLOCK=self._at_a_time() // max(1, self.padded_places // 8), num_warps=1,
            )  # fmt: skip

    def _judge(self, merit: Tensor | None) -> None:
        book = self.book
        kernels.images_judge[(book.blocks.rows,)](
            book.sums, book.blocks.parts, book.flags if merit is None else merit.contiguous(), book.flags, book.numbers,
            *self._memory(), self.newer, self.older, self.held, self.units, self.weights, book.trace, book.step,
            book.blocks.rows, self._slot(), self._place(), book.tol, self.floor, self.growth, 64 * self.task.eps,
            self.ridge, self.root, NON_FINITE=NON_FINITE, MERITED=merit is not None, M=self.memory, MP=self.padded,
            R=self.places, RP=self.padded_places, P=book.width_of_sums, num_warps=book.judges,
        )  # fmt: skip

    def _mix(self, following: Sequence[Tensor]) -> None:
        book = self.book
        mixed, mixers = self._mixers()
        images = [self.images[k % self.places] for k in range(_MOST_IMAGES)]
        for i, width in enumerate(book.blocks.widths):
            kernels.images_mix[(-(-width // mixed), book.blocks.rows)](
                *[image[i] for image in images], self.point[i], self.before[i], self.image[i], self.image_before[i],
                following[i], self.weights, book.best[i], self._best_image(i), book.flags, book.blocks.rows, width,
                *self._ends(), R=self.places, RP=self.padded_places, CLAMPED=self.interval is not None,
                IMAGED=self.best_image is not None, WIDE=book.wide_type, BLOCK=mixed, num_warps=mixers,
            )  # fmt: skip
