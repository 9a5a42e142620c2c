"""A solve as a few CUDA graphs: its start, chunks of steps, its end.

A GPU computes a solver step faster than Python can launch it. Here the steps between two looks of the host are captured
as one graph each, the first time that a solve of this form gets so far, and replayed afterwards. The graphs run one
after the other and share one pool of memory, so what a chunk leaves is where the next one expects it. Inputs are
copied in and answers copied out: nothing outside ever sees the memory of a graph.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from opteq._fast import settings
from opteq.solvers.loop import Run

_MOST_SOLVES = 32


class Capturable(Protocol):
    """A solve under way whose answer is a list of tensors with fixed shapes, but for the first dimension of the last.

    That last one is the history of residuals, which grows with the steps.
    """

    @property
    def run(self) -> Run:
        """What advances."""
        ...

    def tensors(self) -> list[Tensor]:
        """The answer as it stands."""
        ...


Solve = TypeVar("Solve", bound=Capturable)


class _Stage:
    """Some steps, and what is asked after them."""

    def __init__(self, steps: Any, finish: Any, unfinished: Tensor, history: int) -> None:
        self.steps = steps
        self.finish = finish
        self.unfinished = unfinished
        self.history = history


class StagedSolve(Generic[Solve]):
    """One form of solve, captured stage by stage as far as it was ever needed."""

    def __init__(self, inputs: Sequence[Tensor], open_solve: Callable[[list[Tensor]], Solve]) -> None:
        self.device = inputs[0].device
        self.inputs = [torch.empty_like(tensor) for tensor in inputs]
        self.open = open_solve
        self.pool = torch.cuda.graph_pool_handle()
        self.stages: list[_Stage] = []
        self.solve: Solve | None = None
        self.answer: list[Tensor] = []
        self.expected = 0

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Solve]:
        """The answer for ``inputs``, as tensors of its own, and the solve that was captured."""
        torch._foreach_copy_(self.inputs, list(inputs))
        if not self.stages:
            self._capture(self._begin)
        stage = self.stages[0]
        stage.steps.replay()
        place = 0
        # Looking makes the device wait. Batches are much alike, so nobody looks before the last one's end is near.
        while self._more(place) and (place < self.expected - 1 or bool(stage.unfinished)):
            place += 1
            if place == len(self.stages):
                self._capture(self._advance)
            stage = self.stages[place]
            stage.steps.replay()
        stage.finish.replay()
        self.expected = place
        *fixed, history = self.answer
        assert self.solve is not None
        return [*(tensor.clone() for tensor in fixed), history[: stage.history].clone()], self.solve

    def _more(self, place: int) -> bool:
        if place + 1 < len(self.stages):
            return True
        assert self.solve is not None
        return self.stages[place].history <= self.solve.run.rule.max_steps

    def _begin(self) -> int:
        self.solve = self.open(self.inputs)
        self.solve.run.begin()
        return 0

    def _advance(self) -> int:
        assert self.solve is not None
        run, taken = self.solve.run, self.stages[-1].history - 1
        chunk = min(run.rule.check_every, run.rule.max_steps - taken)
        for _ in range(chunk):
            run.advance()
        return taken + chunk

    def _capture(self, work: Callable[[], int]) -> None:
        steps, finish = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream), torch.no_grad():
            taken, unfinished = self._record(steps, work)
            self._record(finish, lambda: self._end(taken))
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.stages.append(_Stage(steps, finish, unfinished, taken + 1))

    def _end(self, taken: int) -> int:
        assert self.solve is not None
        answer = self.solve.tensors()
        if not self.answer:
            longest = self.solve.run.rule.max_steps + 1
            self.answer = [torch.empty_like(tensor) for tensor in answer[:-1]]
            self.answer.append(answer[-1].new_zeros(longest, *answer[-1].shape[1:]))
        for own, tensor in zip(self.answer[:-1], answer[:-1], strict=True):
            own.copy_(tensor)
        self.answer[-1][: taken + 1].copy_(answer[-1])
        return taken

    def _record(self, graph: Any, work: Callable[[], int]) -> tuple[int, Tensor]:
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            taken = work()
            assert self.solve is not None
            unfinished = self.solve.run.unfinished().any()
        finally:
            graph.capture_end()
        return taken, unfinished


_solves: OrderedDict[Hashable, StagedSolve[Any] | None] = OrderedDict()
_seen: OrderedDict[Hashable, None] = OrderedDict()


def staged(
    key: Hashable, inputs: Sequence[Tensor], open_solve: Callable[[list[Tensor]], Solve]
) -> tuple[list[Tensor], Solve] | None:
    """The answer of a solve by graphs, and the captured solve; None where it should be run as it is.

    The first solve of a form is: libraries set themselves up then, and a batch that is seen once is not worth a
    capture. A capture that fails is not tried again, and warns.

    Args:
        key: what distinguishes this form of solve; shapes, strides and dtypes of the inputs are added to it.
        inputs: every tensor that the solve depends on.
        open_solve: begins a solve that reads the given copies of the inputs.
    """
    if not usable(inputs):
        return None
    device = inputs[0].device
    stream = torch.cuda.current_stream(device).cuda_stream
    form = (key, device, stream, tuple((i.shape, i.dtype, i.stride()) for i in inputs))
    if form not in _solves:
        if form not in _seen:
            _remember(_seen, form, None)
            return None
        _remember(_solves, form, StagedSolve(inputs, open_solve))
    _solves.move_to_end(form)
    solve = _solves[form]
    if solve is None:
        return None
    try:
        return solve(inputs)
    except RuntimeError as error:
        _solves[form] = None
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(f"a solve could not be captured as a CUDA graph and runs step by step: {message}", stacklevel=2)
        return None


def usable(inputs: Sequence[Tensor]) -> bool:
    """Whether graphs can be used now, for tensors like these."""
    return (
        settings.graphs
        and len(inputs) > 0
        and all(tensor.is_cuda and tensor.device == inputs[0].device for tensor in inputs)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not torch.cuda.is_current_stream_capturing()
    )


def forget() -> None:
    """Drop every captured solve and the memory that they hold."""
    _solves.clear()
    _seen.clear()


def _remember(store: OrderedDict[Hashable, Any], form: Hashable, value: Any) -> None:
    store[form] = value
    if len(store) > _MOST_SOLVES:
        store.popitem(last=False)
