"""A solve as one CUDA graph that goes on until the device sees its end: nobody waits for it, and nothing is guessed.

Stages up to where a solve is expected to end follow each other; from there on the device looks after every stage
whether a row is left, and goes on or reads the answer out. So the host launches a solve as it launches a convolution,
and is free for what comes after it: the loss, the backward pass, the next layer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opteq.solvers.branching import BranchingGraph, GraphRefusedError, Way
from opteq.solvers.buffers import fill
from opteq.solvers.expectation import Expectation
from opteq.solvers.loop import Run
from opteq.solvers.sent import Sent
from opteq.solvers.stages import OpenSolve, Solve, Stages
from opteq.solvers.trace import LateTrace

# Every so many solves the host notes how long one took, when the device has got there.
_SEEN_EVERY = 8
# Plans that are kept, each for another end.
_MOST_PLANS = 2


class ContinuedSolve(Stages[Solve]):
    """One form of solve, its stages put together to one graph whose end the device finds."""

    keeps = True
    misjudged = False  # stages of several steps would only save launches, of which there is one

    def _set_up(self, inputs: Sequence[Tensor]) -> None:  # noqa: ARG002
        self.flags: list[Tensor] = []  # of every stage: which rows go on
        self.plans: OrderedDict[int, BranchingGraph] = OrderedDict()
        self.expectation = Expectation()
        self.calls = 0
        self.sent: Sent | None = None  # how many steps the samples of an earlier solve took

    def _complete(self) -> None:
        self._plan(self._place())

    def __call__(
        self,
        inputs: Sequence[Tensor],
        open_solve: OpenSolve[Solve],  # noqa: ARG002
        lend: bool = False,
    ) -> list[Any]:
        """The answer for ``inputs``, lent or as tensors of its own; the history may be a :class:`LateTrace`."""
        fill(self.inputs, inputs)
        self._learn()
        plan = self._plan(self._place())
        assert self.answer is not None
        self._about_to_run()
        plan.replay()
        *fixed, history = self.answer.copies(lend)
        if not self.looks:
            return [*fixed, history]
        steps = fixed[-2]
        if self.sent is None and (self.expectation.length is None or self.calls % _SEEN_EVERY == 0):
            self.sent = Sent(steps)
        self.calls += 1
        return [*fixed, LateTrace(history, steps)]

    def _learn(self) -> None:
        """Take notice of an earlier solve; the first one is waited for."""
        if self.sent is not None and (self.expectation.length is None or self.sent.arrived()):
            self.expectation.saw(max(self.sent.read(), default=0))
            self.sent = None

    def _place(self) -> int:
        """The stage with which a solve is likely to end."""
        last = len(self.stages) - 1
        if not self.looks:
            return last
        likely = self.expectation.length or 0
        return next((place for place, stage in enumerate(self.stages) if stage.history > likely), last)

    def _plan(self, place: int) -> BranchingGraph:
        if place not in self.plans:
            try:
                self.plans[place] = self._planned(place)
            except GraphRefusedError:  # there may be no memory for it; any other plan finds the same end
                if not self.plans:
                    raise
                self.plans[place] = next(reversed(self.plans.values()))
            if len(self.plans) > _MOST_PLANS:
                self.plans.popitem(last=False)
        self.plans.move_to_end(place)
        return self.plans[place]

    def _planned(self, place: int) -> BranchingGraph:
        graph = BranchingGraph(self.device)
        self._put(graph.start, 0, ends(place, len(self.stages) - 1))
        graph.start.then(self.conclusion)
        return graph.finished()

    def _put(self, way: Way, begin: int, places: Sequence[int]) -> None:
        """Stages from ``begin`` to the first of ``places``, and on to the next one where a row is left."""
        end, *further = places
        for stage in self.stages[begin : end + 1]:
            way.then(stage.steps)
        if further:
            onward, way = way.fork(self.flags[end])
            self._put(onward, end + 1, further)
        way.then(self.stages[end].settle)

    def _note(self, run: Run, place: int) -> None:
        assert place == len(self.flags)
        self.flags.append(run.unfinished().to(torch.int32))


def ends(place: int, last: int) -> list[int]:
    """Stages after which the device looks whether to go on: the expected one, then ever more of them at a time."""
    found, distance = [min(place, last)], 1
    while found[-1] < last:
        found.append(min(place + distance, last))
        distance *= 2
    return found
