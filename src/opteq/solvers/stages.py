"""A solve captured in parts as CUDA graphs: its start, chunks of steps, what brings their results to one place, and
what makes the answer of these.

The graphs run one after the other and share one pool of memory, so what a chunk leaves is where the next one expects
it. Inputs are copied in and answers copied out, or lent and copied before they are overwritten: nobody outside of this
library ever sees the memory of a graph. All solves of a stream share the pool and one set of buffers. Each one
initialises what it reads, so what another one leaves there, or overwrites, does no harm; and nothing is held between
two solves but buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from opteq._fast import settings
from opteq.solvers.answers import Answers
from opteq.solvers.capture import Workshop
from opteq.solvers.loop import Finish, Rule, Run


class Capturable(Protocol):
    """A solve under way whose answer is a list of tensors.

    The last one is the history of residuals. The three before it are the residuals, steps and status codes of the
    samples.
    """

    @property
    def run(self) -> Run:
        """What advances."""
        ...

    @property
    def facts(self) -> object:
        """What is known before the first step: it goes with every answer."""
        ...

    def tensors(self, finish: Finish) -> list[Tensor]:
        """The answer, given where the run stands."""
        ...

    @property
    def lasting(self) -> Sequence[Tensor]:
        """Tensors of the answer that the run writes at the same place in memory, whenever it ends."""
        ...


Solve = TypeVar("Solve", bound=Capturable)
Result = TypeVar("Result")
OpenSolve = Callable[[list[Tensor]], Solve]


@dataclass(frozen=True)
class Stage:
    """Some steps, what brings their results to where they are read, and how long the history is by then."""

    steps: Any
    settle: Any
    history: int


class _Settled:
    """Where a run stands, at the same place in memory whatever the number of its steps."""

    def __init__(self, finish: Finish, longest: int) -> None:
        if finish.room is not None:  # it is so by itself
            self.finish = replace(finish, trace=finish.room)
            return
        room = finish.trace.new_empty(longest, *finish.trace.shape[1:])
        # Copies, for all of it may be tensors that something else is read from.
        parts = [torch.empty_like(part) for part in self._parts(finish)]
        point = parts[0] if isinstance(finish.point, Tensor) else tuple(parts[:-3])
        residual, steps, codes = parts[-3:]
        self.finish = Finish(point, residual, steps, codes, room, room)

    def take(self, finish: Finish) -> None:
        """Bring a finish there."""
        if finish.room is None:
            own = self.finish.trace[: len(finish.trace)]
            for mine, part in zip([*self._parts(self.finish), own], [*self._parts(finish), finish.trace], strict=True):
                mine.copy_(part)

    @staticmethod
    def _parts(finish: Finish) -> list[Tensor]:
        point = (finish.point,) if isinstance(finish.point, Tensor) else finish.point
        return [*point, finish.residual, finish.steps, finish.codes]


class Stages(Generic[Solve]):
    """One form of solve, captured stage by stage to its last step: single steps, or several where ``coarse``.

    Who derives from it sets up what it needs (:meth:`_set_up`), says how it is known which rows go on after a stage
    (:meth:`_note`), runs the stages, and ``keeps`` their graphs where they become part of others.

    Args:
        inputs: of the first solve, for their form.
        open_solve: begins a solve that reads the given copies of the inputs. It is not kept.
        coarse: whether a stage has several steps.
        forms: tensors whose strides the copies have; None for those of the inputs.
    """

    keeps = False

    def __init__(
        self,
        inputs: Sequence[Tensor],
        open_solve: OpenSolve[Solve],
        coarse: bool = False,
        forms: Sequence[Tensor] | None = None,
    ) -> None:
        self.coarse = coarse
        self.device = inputs[0].device
        self.workshop = Workshop.here(self.device)
        self.lot = self.workshop.buffers.lot()
        self.stages: list[Stage] = []
        self.conclusion: Any = None
        self.answer: Answers | None = None
        self.inputs = self.lot.filled(inputs, forms)
        self.age = self.workshop.buffers.next_age()
        self._set_up(inputs)
        with self.workshop.entered():
            self.facts = self._capture(open_solve)
        self._complete()

    def _set_up(self, inputs: Sequence[Tensor]) -> None:
        """Make what is needed while stages are captured, and after."""

    def _complete(self) -> None:
        """Make what is needed beside the stages, once they are captured."""

    def _about_to_run(self) -> None:
        """Forget what is in memory that the graphs write to."""
        assert self.answer is not None
        self.answer.forget()
        self.workshop.buffers.overwritten_by(self.age)

    def _prepare(self) -> None:
        """Get ready for a stage before it is captured."""

    def _note(self, run: Run, place: int) -> None:
        """Capture what tells which rows go on after a stage."""
        raise NotImplementedError

    def _capture(self, open_solve: OpenSolve[Solve]) -> object:
        self._prepare()
        steps, solve = self._record(partial(self._first, open_solve))
        self.chunks = chunks(solve.run.rule, self.coarse or not self.looks)
        settled, taken = None, 0
        for chunk in (*self.chunks, None):
            settle, at = self._record(partial(self._settle, solve.run, settled))
            self.stages.append(Stage(steps, settle, taken + 1))
            if settled is None:
                # Before there are any steps: what they keep for the steps after them may not be there when it runs.
                self.conclusion, _ = self._record(partial(self._conclude, solve, at.finish))
            settled = at
            if chunk is not None:
                self._prepare()
                steps, _ = self._record(partial(self._further, solve.run, chunk))
                taken += chunk
        return solve.facts

    def _record(self, work: Callable[[], Result]) -> tuple[Any, Result]:
        return self.workshop.record(work, keep=self.keeps)

    def _begun(self, open_solve: OpenSolve[Solve]) -> Solve:
        solve = open_solve([buffer.tensor for buffer in self.inputs])
        solve.run.begin()
        return solve

    def _first(self, open_solve: OpenSolve[Solve]) -> Solve:
        solve = self._begun(open_solve)
        self.looks = solve.run.rule.check_every <= solve.run.rule.max_steps
        if self.looks:
            self._note(solve.run, 0)
        return solve

    def _further(self, run: Run, steps: int) -> None:
        self._advance(run, steps)
        if self.looks:
            self._note(run, len(self.stages))

    @staticmethod
    def _advance(run: Run, steps: int) -> None:
        for _ in range(steps):
            run.advance()

    @staticmethod
    def _settle(run: Run, settled: _Settled | None) -> _Settled:
        with _nothing_kept():  # steps are replayed after each other, this may never be
            finish = run.finish()
        settled = _Settled(finish, run.rule.max_steps + 1) if settled is None else settled
        settled.take(finish)
        return settled

    def _conclude(self, solve: Solve, finish: Finish) -> None:
        with _nothing_kept():
            tensors = solve.tensors(finish)
        if self.answer is None:
            self.answer = Answers(self.lot, tensors, solve.lasting)
        else:
            self.answer.write(tensors)


@contextmanager
def _nothing_kept() -> Iterator[None]:
    keeping, settings.keeping = settings.keeping, False
    try:
        yield
    finally:
        settings.keeping = keeping


def chunks(rule: Rule, several: bool) -> list[int]:
    """How many steps each stage after the first has.

    Stages grow with the distance, so that there are few of them however many steps are allowed.
    """
    made, taken = [], 0
    while taken < rule.max_steps:
        least = rule.check_every if several else 1
        made.append(min(max(least, taken // 8), rule.max_steps - taken))
        taken += made[-1]
    return made
