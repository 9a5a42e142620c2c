"""A solve as one CUDA graph that is terminated on the device.

A solve is captured in stages: its start, then one or a few steps each. The stages are put together to one graph. Up to
where a solve is expected to end they follow each other; from there on the device checks after every stage whether a row
is unfinished, and goes on or writes the outputs. So the host launches a solve as it launches a convolution, and waits
for nothing.

All graphs of a stream share one memory pool and one set of buffers. Each initialises what it reads, so what another one
leaves there does no harm, and between two solves nothing is held but buffers.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from opteq.diagnostics.convergence_monitor import AsyncHostCopy
from opteq.engine.cuda_graphs.buffers import BufferSet, dense, fill
from opteq.engine.cuda_graphs.capture import CaptureContext
from opteq.engine.cuda_graphs.conditional_graph import ConditionalGraph, GraphRefusedError, Subgraph
from opteq.engine.cuda_graphs.operations import CaptureCheck, SideEffectCheck
from opteq.engine.cuda_graphs.output_buffers import OutputBuffers
from opteq.solvers.loop import Finish, Iteration, Rule

# Every so many solves the host notes how many steps one took, when the device has got there.
_OBSERVED_EVERY = 8
# Graphs that are kept, each for another expected number of steps.
_MOST_PLANS = 2


class Capturable(Protocol):
    """A solve under way whose output is a list of tensors.

    The last one is the history of residuals. The three before it are residuals, steps and status codes per sample.
    ``facts`` need no value from the device, and accompany every output.
    """

    iteration: Iteration
    facts: object

    def tensors(self, finish: Finish) -> list[Tensor]:
        """The output, given where the iteration stands."""


OpenSolve = Callable[[list[Tensor]], Capturable]


@dataclass(frozen=True)
class _Stage:
    """Some steps, what brings their results to where they are read, and the length of the history by then."""

    steps: Any
    settle: Any
    history: int


class ConditionalSolve:
    """One form of solve: what was captured for inputs of certain shapes, strides and dtypes.

    Args:
        inputs: every tensor that the solve depends on.
        open_solve: begins a solve that reads the given copies of the inputs. It is not kept.
    """

    def __init__(self, inputs: Sequence[Tensor], open_solve: OpenSolve) -> None:
        self.device = inputs[0].device
        self.context = CaptureContext.here(self.device)
        self.buffers = BufferSet(self.context.buffers)
        self.inputs = self.buffers.filled(inputs)
        self.age = self.context.buffers.next_age()
        self.stages: list[_Stage] = []
        self.flags: list[Tensor] = []  # of every stage: which rows go on
        self.outputs: OutputBuffers | None = None
        self.plans: OrderedDict[int, ConditionalGraph] = OrderedDict()
        self.predictor = StepCountPredictor()
        self.calls = 0
        self.observed: AsyncHostCopy | None = None  # how many steps the samples of an earlier solve took
        with self.context.entered():
            self._warm_up(open_solve)
            torch.cuda.empty_cache()  # what ran so far has left its memory with the allocator: the graph's pool gets it
            self.facts = self._capture(open_solve)
        self._plan(self._place())

    def __call__(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The output for ``inputs``, as tensors of its own; the history is a function that waits for it."""
        assert self.outputs is not None
        fill(self.inputs, inputs)
        self._learn()
        plan = self._plan(self._place())
        self.outputs.forget()
        self.context.buffers.overwritten_by(self.age)
        plan.replay()
        *fixed, history = self.outputs.copies()
        steps = fixed[-2]
        if self.observed is None and (self.predictor.steps is None or self.calls % _OBSERVED_EVERY == 0):
            self.observed = AsyncHostCopy(steps)
        self.calls += 1
        return [*fixed, partial(_read_history, history, steps)]

    def _warm_up(self, open_solve: OpenSolve) -> None:
        """Run a few steps, so that libraries set themselves up and kernels are loaded, which a capture forbids."""
        inputs = [buffer.tensor for buffer in self.inputs]
        with CaptureCheck(inputs):
            solve = self._begun(open_solve)
            solve.iteration.advance()
        with SideEffectCheck(inputs):
            solve.tensors(solve.iteration.finish())
        del solve  # two at a time would need twice the memory
        solve = self._begun(open_solve)
        for _ in range(min(3, solve.iteration.rule.max_steps)):
            solve.iteration.advance()
        solve.tensors(solve.iteration.finish())

    def _capture(self, open_solve: OpenSolve) -> object:
        record = self.context.record
        steps, solve = record(partial(self._first, open_solve))
        static, taken = None, 0
        for chunk in (*stage_lengths(solve.iteration.rule), None):
            settle, at = record(partial(_settle, solve.iteration, static))
            self.stages.append(_Stage(steps, settle, taken + 1))
            if static is None:
                # Before there are any steps: what they keep for the steps after them may not be there when it runs.
                self.conclusion, _ = record(partial(self._conclude, solve, at.finish))
            static = at
            if chunk is not None:
                steps, _ = record(partial(self._advance, solve.iteration, chunk))
                taken += chunk
        return solve.facts

    def _begun(self, open_solve: OpenSolve) -> Capturable:
        solve = open_solve([buffer.tensor for buffer in self.inputs])
        solve.iteration.begin()
        return solve

    def _first(self, open_solve: OpenSolve) -> Capturable:
        solve = self._begun(open_solve)
        self._flag(solve.iteration)
        return solve

    def _advance(self, iteration: Iteration, steps: int) -> None:
        for _ in range(steps):
            iteration.advance()
        self._flag(iteration)

    def _flag(self, iteration: Iteration) -> None:
        self.flags.append(iteration.unfinished().to(torch.int32))

    def _conclude(self, solve: Capturable, finish: Finish) -> None:
        self.outputs = OutputBuffers(self.buffers, [dense(tensor) for tensor in solve.tensors(finish)])

    def _learn(self) -> None:
        """Take notice of an earlier solve; the first one is waited for."""
        if self.observed is not None and (self.predictor.steps is None or self.observed.arrived()):
            self.predictor.observe(max(self.observed.read(), default=0))
            self.observed = None

    def _place(self) -> int:
        """The stage with which a solve is likely to end."""
        likely = self.predictor.steps or 0
        return next((i for i, stage in enumerate(self.stages) if stage.history > likely), len(self.stages) - 1)

    def _plan(self, place: int) -> ConditionalGraph:
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

    def _planned(self, place: int) -> ConditionalGraph:
        graph = ConditionalGraph(self.device)
        self._put(graph.start, 0, check_places(place, len(self.stages) - 1))
        graph.start.then(self.conclusion)
        return graph.instantiated()

    def _put(self, part: Subgraph, begin: int, places: Sequence[int]) -> None:
        """Stages from ``begin`` to the first of ``places``, and on to the next one where a row is unfinished."""
        end, *further = places
        for stage in self.stages[begin : end + 1]:
            part.then(stage.steps)
        if further:
            onward, part = part.fork(self.flags[end])
            self._put(onward, end + 1, further)
        part.then(self.stages[end].settle)


class _StaticFinish:
    """The finish of an iteration in static memory, the same for every number of steps."""

    def __init__(self, finish: Finish, longest: int) -> None:
        trace_memory = getattr(finish, "trace_memory", None)
        self.in_place = trace_memory is not None
        if trace_memory is not None:  # its memory is static already
            self.finish = replace(finish, trace=trace_memory)
            return
        trace = finish.trace.new_empty(longest, *finish.trace.shape[1:])
        # Copies, for all of it may be tensors that something else is read from.
        parts = [torch.empty_like(part) for part in _parts(finish)]
        point = parts[0] if isinstance(finish.point, Tensor) else tuple(parts[:-3])
        residual, steps, codes = parts[-3:]
        self.finish = Finish(point, residual, steps, codes, trace)

    def copy_from(self, finish: Finish) -> None:
        if not self.in_place:
            own = [*_parts(self.finish), self.finish.trace[: len(finish.trace)]]
            for mine, part in zip(own, [*_parts(finish), finish.trace], strict=True):
                mine.copy_(part)


def _settle(iteration: Iteration, static: _StaticFinish | None) -> _StaticFinish:
    finish = iteration.finish()
    static = _StaticFinish(finish, iteration.rule.max_steps + 1) if static is None else static
    static.copy_from(finish)
    return static


def _parts(finish: Finish) -> list[Tensor]:
    point = (finish.point,) if isinstance(finish.point, Tensor) else finish.point
    return [*point, finish.residual, finish.steps, finish.codes]


def _read_history(trace_memory: Tensor, steps: Tensor) -> Tensor:
    """The residuals of the steps that were taken, ``(steps + 1, B)``; waits for the device."""
    return trace_memory[: max(steps.tolist(), default=0) + 1]


def stage_lengths(rule: Rule) -> list[int]:
    """How many steps each stage after the first has; they grow, so that there are few however many steps are allowed.

    >>> stage_lengths(Rule(tol=1e-4, max_steps=20))
    [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2]
    """
    made, taken = [], 0
    while taken < rule.max_steps:
        made.append(min(max(1, taken // 8), rule.max_steps - taken))
        taken += made[-1]
    return made


def check_places(place: int, last: int) -> list[int]:
    """Stages after which the device checks whether to go on: the expected one, then ever more of them at a time.

    >>> check_places(3, 9)
    [3, 4, 5, 7, 9]
    """
    found, distance = [min(place, last)], 1
    while found[-1] < last:
        found.append(min(place + distance, last))
        distance *= 2
    return found


class StepCountPredictor:
    """The number of steps that is expected until others have been observed a few times in a row.

    ``steps`` is None until the first solve was observed.
    """

    # So often in a row something else has to be seen before it is expected; twice as often after every change, so
    # that graphs are not put together over and over for batches that keep changing.
    _PATIENCE, _MOST_PATIENCE = 3, 48

    def __init__(self) -> None:
        self.steps: int | None = None
        self._patience = self._PATIENCE
        self._others: deque[int] = deque()

    def observe(self, steps: int) -> None:
        if self.steps is None:
            self.steps = steps
        elif steps == self.steps:
            self._others.clear()
        else:
            self._others.append(steps)
            if len(self._others) >= self._patience:
                # The median: a solve that is planned too short goes on by itself, one too long is never shorter.
                self.steps = sorted(self._others)[(len(self._others) - 1) // 2]
                self._patience = min(2 * self._patience, self._MOST_PATIENCE)
                self._others.clear()
