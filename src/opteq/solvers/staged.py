"""A solve as a few CUDA graphs, launched by a host that looks whether more are needed.

A GPU computes a solver step faster than Python can launch it. Here the steps between two looks of the host are captured
as one graph each, and replayed afterwards; a solve that has ended at the same step for a while is captured once more,
as one graph from its start to its answer.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opteq._fast import has_triton, settings
from opteq.solvers.buffers import fill
from opteq.solvers.capture import HostSlots
from opteq.solvers.loop import Run
from opteq.solvers.stages import OpenSolve, Solve, Stages

# Steps from which a solve counts as long.
_LONG = 12
# After so many solves that ended where they were expected to, the next one's end is read before it is certain.
_TRUSTED = 3
# After so many, it is worth a graph of its own.
_SETTLED = 6
# Ends that have one, for a form of solve.
_MOST_WHOLE = 3
# After so many solves to the last step the host waits for one, to see whether that was needed. Where it was, it is
# twice as patient from then on.
_PATIENCE, _MOST_PATIENCE = 8, 1024
# What the host writes where it waits for the device to write which rows are left, 1 or 0 each.
_UNKNOWN = -1


class StagedSolve(Stages[Solve]):
    """One form of solve, its stages launched by the host.

    Every stage ends by writing which rows are left into memory of the host. Batches are much alike, so all stages up to
    the last batch's end are launched before the host looks there for the first time, and where that end has been the
    same for a while, so is the reading of the answer: the device then works on while the host finds out.
    """

    def _set_up(self, inputs: Sequence[Tensor]) -> None:
        self.whole: OrderedDict[int, Any] = OrderedDict()  # by the place of its end: all of a solve in one graph
        self.left: list[Tensor] = []  # of every stage: which rows go on, in memory of the host
        self.written: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.unread = 0  # solves to the last step since the host has looked
        self.patience = _PATIENCE
        self.alone = False  # whether nothing is under way that could write to memory of the host
        self.noted = 0  # how many of the stages before the last one that ran have written which rows were left
        self.expected = self.trusted = self.steps = 0
        # As many bytes as any number of rows may take that these inputs can stand for.
        largest = max(max(tensor.shape, default=1) for tensor in inputs)
        self.slots = HostSlots(8 * largest, torch.cuda.current_stream(self.device).cuda_stream)
        self.tell = _teller(self.device) if settings.fused and has_triton() else None

    def __call__(self, inputs: Sequence[Tensor], open_solve: OpenSolve[Solve], lend: bool = False) -> list[Tensor]:
        """The answer for ``inputs``, lent or as tensors of its own."""
        fill(self.inputs, inputs)
        last = len(self.stages) - 1
        if self.unread and (self.written.query() or self.unread >= self.patience):
            self.written.synchronize()
            end = self._end(last)
            self.patience = min(2 * self.patience, _MOST_PATIENCE) if end == last else _PATIENCE
            self._expect(end)
            self.unread, self.alone = 0, True
        place = self.expected if self.looks else last
        whole = self._in_one(place, open_solve)
        # Until the flags of a launch were seen, it may still write some: also where an exception ends this call.
        quiet, self.alone = self.alone, False
        self._launch(0, place, whole, quiet)
        answer: list[Tensor] = []
        while True:
            self.written.record(torch.cuda.current_stream(self.device))
            sure = place == last
            if sure or whole is not None or self.trusted >= _TRUSTED:
                answer = self._read_out(place, whole, lend)
            if sure or not self._goes_on(place, quiet):
                break
            # What a whole solve has left is elsewhere in memory, and where an answer was read out its making may have
            # overwritten what steps leave for each other: neither can be continued.
            begin, quiet = (place + 1 if whole is None and not answer else 0), True
            place, whole, self.trusted, answer = place + 1, None, -1, []
            self._launch(begin, place, whole, quiet)
        answer = answer or self._read_out(place, whole, lend)
        self.alone = not sure
        # Whether the last stage was needed is not worth waiting for: the next solve finds out.
        self.unread = self.unread + 1 if sure and self.looks else 0
        end = place if sure else self._end(place)
        self.trusted += 1
        self._expect(end)
        self.steps = self.stages[end].history - 1
        *fixed, history = answer
        return [*fixed, history[: self.stages[end].history]]

    @property
    def misjudged(self) -> bool:
        """Whether the stages have the wrong length.

        A short solve is not to go on for several steps after its end, a long one not to be launched step by step.
        """
        return self.looks and (self.steps < _LONG // 2 if self.coarse else self.steps > _LONG)

    def _expect(self, end: int) -> None:
        if end != self.expected:
            self.expected, self.trusted = end, 0

    def _launch(self, begin: int, place: int, whole: Any, quiet: bool) -> None:
        """Replay stages, or the whole solve; ``quiet`` where nothing else is under way that could write flags."""
        if self.looks and quiet:
            self.left[place].fill_(_UNKNOWN)
        if begin == 0:
            self._about_to_run()
        if whole is None:
            for stage in self.stages[begin : place + 1]:
                stage.steps.replay()
            self.noted = place
        else:
            whole.replay()
            self.noted = min(place, 1)

    def _read_out(self, place: int, whole: Any, lend: bool) -> list[Tensor]:
        assert self.answer is not None
        if whole is None:
            self.answer.forget()  # it may have been read out already, too early
            self.stages[place].settle.replay()
            self.conclusion.replay()
        return self.answer.copies(lend)

    def _goes_on(self, place: int, quiet: bool) -> bool:
        """Whether a row is left after this stage: known before its answer is, which the device works on meanwhile."""
        left = self.left[place]
        if quiet:
            while not self.written.query() and bool((left == _UNKNOWN).any()):
                pass
        else:
            self.written.synchronize()
        return bool(left.any())

    def _end(self, place: int) -> int:
        """The first stage known to have left no row, or else the last one that ran, which is ``place``."""
        least = place - self.noted
        while place > least and not self.left[place - 1].any():
            place -= 1
        return place

    def _in_one(self, place: int, open_solve: OpenSolve[Solve]) -> Any:
        """A graph of the whole solve up to this end, where it is worth one; else None."""
        if self.trusted < _TRUSTED:
            return None
        if place not in self.whole and self.trusted >= _SETTLED:
            try:
                with self.workshop.entered():
                    self.whole[place], _ = self.workshop.record(partial(self._all_of_it, place, open_solve))
            except Exception:  # there may be no memory for it; the stages are there
                self.whole[place] = None
            if len(self.whole) > _MOST_WHOLE:
                self.whole.popitem(last=False)
        return self.whole.get(place)

    def _all_of_it(self, place: int, open_solve: OpenSolve[Solve]) -> None:
        solve = self._begun(open_solve)
        for number, chunk in enumerate(self.chunks[:place]):
            if self.looks and number == place - 1:  # so that a solve that might have ended earlier is noticed
                self._note(solve.run, number)
            self._advance(solve.run, chunk)
        if self.looks:
            self._note(solve.run, place)
        self._conclude(solve, self._settle(solve.run, None).finish)

    def _prepare(self) -> None:
        self.slots.prepare()

    def _note(self, run: Run, place: int) -> None:
        """Write down, where the host can read it, which rows go on after this stage."""
        rows = run.unfinished()
        rows = rows.view(torch.int8) if rows.dtype == torch.bool else rows  # which can be unknown, too
        if place == len(self.left):
            self.left.append(self.slots.next(rows))
        if self.tell is not None and rows.dtype == torch.int32:
            self.tell(rows, self.left[place])
        else:
            self.left[place].copy_(rows, non_blocking=True)


@functools.cache
def _teller(device: torch.device) -> Callable[[Tensor, Tensor], None] | None:
    """What writes int32 flags into memory of the host, ready to be captured; None where a copy has to do."""
    from opteq.solvers.fused.telling import tell

    # Kernels are compiled and loaded at their first launch, which a capture may forbid.
    told = torch.ones(1, dtype=torch.int32, device="cpu", pin_memory=True)
    with torch.cuda.device(device):
        tell(torch.zeros(1, dtype=torch.int32, device=device), told)
        torch.cuda.current_stream(device).synchronize()
    return tell if told.item() == 0 else None
