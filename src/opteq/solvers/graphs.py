"""A solve as a few CUDA graphs: its start, chunks of steps, its end.

A GPU computes a solver step faster than Python can launch it. Here the steps between two looks of the host are captured
as one graph each, and replayed afterwards. The graphs run one after the other and share one pool of memory, so what a
chunk leaves is where the next one expects it. Inputs are copied in and answers copied out: nothing outside ever sees
the memory of a graph.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from opteq._fast import settings
from opteq.solvers.loop import Run

_MOST_SOLVES = 32
# Steps from which a solve counts as long.
_LONG = 12
# After so many solves that ended where they were expected to, the next one's end is read before it is certain.
_TRUSTED = 3
# After so many solves to the last step the host waits for one, to see whether that was needed.
_PATIENCE = 8


class Capturable(Protocol):
    """A solve under way whose answer is a list of tensors with fixed shapes, but for the first dimension of the last.

    That last one is the history of residuals, which grows with the steps.
    """

    @property
    def run(self) -> Run:
        """What advances."""
        ...

    @property
    def facts(self) -> object:
        """What is known before the first step: it goes with every answer."""
        ...

    def tensors(self) -> list[Tensor]:
        """The answer as it stands."""
        ...


Solve = TypeVar("Solve", bound=Capturable)


@dataclass(frozen=True)
class _Stage:
    """Some steps, what reads the answer after them, and how long the history is by then."""

    steps: Any
    finish: Any
    history: int


class StagedSolve(Generic[Solve]):
    """One form of solve, captured stage by stage to its last step: single steps, or several where ``coarse``.

    All solves of a stream share one pool of memory. Each one initialises what it reads and hands out copies, so what
    another one leaves in the pool, or overwrites there, does no harm; and nothing is held between two solves but the
    inputs' copies and the answer.

    Every stage ends by writing which rows are left into memory of the host. Batches are much alike, so all stages up to
    the last batch's end are launched before the host looks there for the first time, and where that end has been the
    same for a while, so is the reading of the answer: the device then works on while the host finds out.
    """

    def __init__(
        self, inputs: Sequence[Tensor], open_solve: Callable[[list[Tensor]], Solve], coarse: bool = False
    ) -> None:
        self.coarse = coarse
        self.device = inputs[0].device
        self.inputs = [torch.empty_like(tensor) for tensor in inputs]
        torch._foreach_copy_(self.inputs, list(inputs))
        self.stages: list[_Stage] = []
        self.answer: list[Tensor] = []
        self.left: list[Tensor] = []  # of every stage: which rows go on, in memory of the host
        self.written: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.unread = 0  # solves to the last step since the host has looked
        self.expected = self.trusted = self.steps = 0
        # As many bytes as any number of rows may take that these inputs can stand for.
        largest = max(max(tensor.shape, default=1) for tensor in inputs)
        self.slots = _Slots(8 * largest, torch.cuda.current_stream(self.device).cuda_stream)
        pool, stream = _workshop(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.facts = self._capture(open_solve, pool)
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The answer for ``inputs``, as tensors of its own."""
        torch._foreach_copy_(self.inputs, list(inputs))
        last = len(self.stages) - 1
        if self.unread and (self.written.query() or self.unread >= _PATIENCE):
            self.written.synchronize()
            self.expected, self.unread = self._end(last), 0
        place = self.expected if self.looks else last
        for stage in self.stages[: place + 1]:
            stage.steps.replay()
        answer: list[Tensor] = []
        while True:
            self.written.record(torch.cuda.current_stream(self.device))
            sure = place == last
            if sure or self.trusted >= _TRUSTED:
                answer = self._read_out(place)
            if sure or not self._goes_on(place):
                break
            place, self.trusted, answer = place + 1, -1, []
            self.stages[place].steps.replay()
        answer = answer or self._read_out(place)
        # Whether the last stage was needed is not worth waiting for: the next solve finds out.
        self.unread = self.unread + 1 if sure and self.looks else 0
        end = place if sure else self._end(place)
        self.trusted = self.trusted + 1 if end == self.expected else 0
        self.expected = end
        self.steps = self.stages[end].history - 1
        *fixed, history = answer
        return [*fixed, history[: self.stages[end].history]]

    def _read_out(self, place: int) -> list[Tensor]:
        self.stages[place].finish.replay()
        return [tensor.clone() for tensor in self.answer]

    def _goes_on(self, place: int) -> bool:
        self.written.synchronize()
        return bool(self.left[place].any())

    def _end(self, place: int) -> int:
        """The stage after which no row was left, or else the last one that ran, which is ``place``."""
        while place > 0 and not self.left[place - 1].any():
            place -= 1
        return place

    @property
    def misjudged(self) -> bool:
        """Whether the stages have the wrong length.

        A short solve is not to go on for several steps after its end, a long one not to be launched step by step.
        """
        return self.looks and (self.steps < _LONG // 2 if self.coarse else self.steps > _LONG)

    def _capture(self, open_solve: Callable[[list[Tensor]], Solve], pool: Any) -> object:
        solve: Solve | None = None

        def begin() -> None:
            nonlocal solve
            solve = open_solve(self.inputs)
            solve.run.begin()
            self.looks = solve.run.rule.check_every <= solve.run.rule.max_steps
            self._note(solve.run)

        self.slots.prepare()
        steps, _ = _record(pool, begin)
        assert solve is not None
        run, taken = solve.run, 0
        while True:
            finish, _ = _record(pool, partial(self._read, solve, taken))
            self.stages.append(_Stage(steps, finish, taken + 1))
            # Stages grow with the distance, so that there are few of them however many steps are allowed.
            least = run.rule.check_every if self.coarse or not self.looks else 1
            chunk = min(max(least, taken // 8), run.rule.max_steps - taken)
            if chunk == 0:
                return solve.facts
            self.slots.prepare()
            steps, _ = _record(pool, partial(self._advance, run, chunk))
            taken += chunk

    def _advance(self, run: Run, steps: int) -> None:
        for _ in range(steps):
            run.advance()
        self._note(run)

    def _note(self, run: Run) -> None:
        """Write down, where the host can read it, which rows go on."""
        if self.looks:
            rows = run.unfinished()
            self.left.append(self.slots.next(rows))
            self.left[-1].copy_(rows, non_blocking=True)

    def _read(self, solve: Solve | None, taken: int) -> Tensor:
        assert solve is not None
        answer = solve.tensors()
        if not self.answer:
            longest = solve.run.rule.max_steps + 1
            self.answer = [torch.empty_like(tensor) for tensor in answer[:-1]]
            self.answer.append(answer[-1].new_zeros(longest, *answer[-1].shape[1:]))
        for own, tensor in zip(self.answer[:-1], answer[:-1], strict=True):
            own.copy_(tensor)
        return self.answer[-1][: taken + 1].copy_(answer[-1])


class _Slots:
    """Page-locked memory of the host that the stages of a solve write to, one slot each.

    None is ever handed back to the system, or to anybody but another solve of the same stream: a graph that is dropped
    while it still runs would write into what is somebody else's by then.
    """

    _free: ClassVar[dict[tuple[int, int], list[Tensor]]] = {}

    def __init__(self, size: int, stream: int) -> None:
        self.size = size
        self.free = self._free.setdefault((size, stream), [])
        self.own: list[Tensor] = []
        weakref.finalize(self, self.free.extend, self.own)

    def prepare(self) -> None:
        """Make room for one stage; no memory can be had while a graph is captured."""
        room = torch.empty(self.size, dtype=torch.uint8, pin_memory=True) if not self.free else self.free.pop()
        self.own.append(room)

    def next(self, like: Tensor) -> Tensor:
        """What was prepared last, as a place for ``like``."""
        size = like.numel() * like.element_size()
        if size > self.size:
            raise RuntimeError(f"a solve of {like.numel()} rows, more than any dimension of its inputs")
        return self.own[-1][:size].view(like.dtype).view(like.shape)


Result = TypeVar("Result")


def _record(pool: Any, work: Callable[[], Result]) -> tuple[Any, Result]:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        result = work()
    except BaseException:
        _abandon(graph)
        raise
    graph.capture_end()
    return graph, result


def _abandon(graph: Any) -> None:
    """End a capture that failed, and let random numbers be drawn again."""
    try:
        graph.capture_end()
    except RuntimeError:
        # The generator was told of the capture's beginning, and of no end: a copy of its state knows of neither.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())


class CapturedCall:
    """One function of tensors, captured as one graph.

    Its answer is a list of tensors, and what is known about them without looking at a number.
    """

    misjudged = coarse = False

    def __init__(self, inputs: Sequence[Tensor], work: Callable[[list[Tensor]], tuple[list[Tensor], object]]) -> None:
        self.inputs = [torch.empty_like(tensor) for tensor in inputs]
        torch._foreach_copy_(self.inputs, list(inputs))
        device = inputs[0].device
        pool, stream = _workshop(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            # What leaves is copied out of the pool before another solve writes there: within the stream's order.
            self.graph, (self.answer, self.facts) = _record(pool, partial(work, self.inputs))
        torch.cuda.current_stream(device).wait_stream(stream)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The answer for ``inputs``, as tensors of its own."""
        torch._foreach_copy_(self.inputs, list(inputs))
        self.graph.replay()
        return [tensor.clone() for tensor in self.answer]


_solves: OrderedDict[Hashable, StagedSolve[Any] | CapturedCall | None] = OrderedDict()
_seen: OrderedDict[Hashable, None] = OrderedDict()
_workshops: dict[tuple[torch.device, int], tuple[Any, Any]] = {}


def staged(
    key: Hashable, inputs: Sequence[Tensor], open_solve: Callable[[list[Tensor]], Solve]
) -> tuple[list[Tensor], object] | None:
    """The answer of a solve by graphs, and the facts about it; None where it should be run as it is.

    The first solve of a form is: libraries set themselves up then, and a batch that is seen once is not worth a
    capture. A capture that fails is not tried again, and warns.

    Args:
        key: what distinguishes this form of solve; shapes, strides and dtypes of the inputs are added to it.
        inputs: every tensor that the solve depends on.
        open_solve: begins a solve that reads the given copies of the inputs.
    """
    return _by_graph(key, inputs, lambda coarse: StagedSolve(inputs, open_solve, coarse))


def called(
    key: Hashable, inputs: Sequence[Tensor], work: Callable[[list[Tensor]], tuple[list[Tensor], object]]
) -> tuple[list[Tensor], object] | None:
    """The answer of a function by one graph, as with :func:`staged`."""
    return _by_graph(key, inputs, lambda coarse: CapturedCall(inputs, work))  # noqa: ARG005


def _by_graph(
    key: Hashable, inputs: Sequence[Tensor], capture: Callable[[bool], StagedSolve[Any] | CapturedCall]
) -> tuple[list[Tensor], object] | None:
    if not usable(inputs):
        return None
    device = inputs[0].device
    stream = torch.cuda.current_stream(device).cuda_stream
    form = (key, device, stream, _climate(), tuple((i.shape, i.dtype, i.stride()) for i in inputs))
    if form not in _solves:
        if form not in _seen:
            _remember(_seen, form, None)
            return None
        # The solve that ran as it is has left its memory with the allocator, where a graph's pool can't have it.
        torch.cuda.empty_cache()
        _remember(_solves, form, _captured(capture, coarse=False))
    _solves.move_to_end(form)
    solve = _solves[form]
    if solve is not None and solve.misjudged:
        solve = _solves[form] = _captured(capture, not solve.coarse)
    return None if solve is None else (solve(inputs), solve.facts)


def _climate() -> Hashable:
    """Settings of the process that decide which kernels a capture records: a replay would not notice a change."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    convolutions: Any = getattr(cudnn, "conv", None)
    if hasattr(convolutions, "fp32_precision"):  # torch 2.9, where reading the older flags may raise
        precision: Hashable = (cuda.fp32_precision, convolutions.fp32_precision)
    else:
        precision = (cuda.allow_tf32, cudnn.allow_tf32)
    return settings.fused, precision, cudnn.enabled, torch.are_deterministic_algorithms_enabled()


def _captured(
    capture: Callable[[bool], StagedSolve[Any] | CapturedCall], coarse: bool
) -> StagedSolve[Any] | CapturedCall | None:
    try:
        # Tensors of inference mode could not be written to outside of it, and the next batch may come from there.
        with torch.inference_mode(False), torch.no_grad():
            return capture(coarse)
    except RuntimeError as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(f"a solve could not be captured as a CUDA graph and runs step by step: {message}", stacklevel=2)
        return None


def _workshop(device: torch.device) -> tuple[Any, Any]:
    """The pool and the stream that captures for the stream in force use.

    Solves hand memory on within the order of a stream only; those of another stream have a pool of their own.
    """
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _workshops:
        _workshops[key] = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _workshops[key]


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
    _workshops.clear()


def _remember(store: OrderedDict[Hashable, Any], form: Hashable, value: Any) -> None:
    store[form] = value
    if len(store) > _MOST_SOLVES:
        store.popitem(last=False)
