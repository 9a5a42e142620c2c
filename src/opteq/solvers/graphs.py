"""Solves and functions by CUDA graphs: those that were captured, by what they depend on."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from opteq._fast import settings
from opteq._precision import products
from opteq.solvers.branching import GraphRefusedError, available
from opteq.solvers.buffers import fill
from opteq.solvers.capture import Workshop, on, raw_stream
from opteq.solvers.continued import ContinuedSolve
from opteq.solvers.staged import StagedSolve
from opteq.solvers.stages import OpenSolve, Solve

_MOST_SOLVES = 32

Work = Callable[[list[Tensor]], tuple[list[Tensor], object]]
Captured = TypeVar("Captured")


class CapturedCall:
    """One function of tensors, captured as one graph.

    Its answer is a list of tensors, and what is known about them without looking at a number.
    """

    misjudged = coarse = False

    def __init__(
        self,
        inputs: Sequence[Tensor],
        work: Work,
        coarse: bool = False,  # noqa: ARG002
        forms: Sequence[Tensor] | None = None,
    ) -> None:
        workshop = Workshop.here(inputs[0].device)
        lot = workshop.buffers.lot()
        self.inputs = lot.filled(inputs, forms)
        self.buffers, self.age = workshop.buffers, workshop.buffers.next_age()
        with workshop.entered():
            # What leaves is copied out of the pool before another solve writes there: within the stream's order.
            given = [buffer.tensor for buffer in self.inputs]
            self.graph, (self.answer, self.facts) = workshop.record(partial(work, given))

    def __call__(self, inputs: Sequence[Tensor], work: Work, lend: bool = False) -> list[Tensor]:  # noqa: ARG002
        """The answer for ``inputs``, as tensors of its own."""
        fill(self.inputs, inputs)
        self.buffers.overwritten_by(self.age)
        self.graph.replay()
        return [tensor.clone() for tensor in self.answer]


_ByGraph = StagedSolve[Any] | ContinuedSolve[Any] | CapturedCall
_solves: OrderedDict[Hashable, _ByGraph | None] = OrderedDict()
_seen: OrderedDict[Hashable, None] = OrderedDict()
_one_at_a_time = threading.RLock()


def staged(
    key: Hashable,
    inputs: Sequence[Tensor],
    open_solve: OpenSolve[Solve],
    lend: bool = False,
    forms: Sequence[Tensor] | None = None,
) -> tuple[list[Any], object] | None:
    """The answer of a solve by graphs, and the facts about it; None where it should be run as it is.

    The answer is a list of tensors, and last a history of residuals, which may be a late one.

    The first solve of a form is: libraries set themselves up then, and a batch that is seen once is not worth a
    capture. A capture that fails is not tried again, and warns.

    Args:
        key: what distinguishes this form of solve; shapes, strides and dtypes of the inputs are added to it.
        inputs: every tensor that the solve depends on.
        open_solve: begins a solve that reads the given copies of the inputs.
        lend: whether tensors of the answer may be :meth:`~opteq.solvers.buffers.Buffer.lend` ones.
        forms: tensors of the same shapes and dtypes whose strides the copies have; None for those of the inputs.
    """
    return _by_graph(key, inputs, _captured_solve, open_solve, lend, forms)


def _captured_solve(
    inputs: Sequence[Tensor],
    open_solve: OpenSolve[Any],
    coarse: bool = False,
    forms: Sequence[Tensor] | None = None,
) -> _ByGraph:
    if settings.forks and available(inputs[0].device):
        solve = _continued(inputs, open_solve, forms)
        if solve is not None:
            return solve
        Workshop.retire(inputs[0].device)  # what was captured is gone by now, and its pool with it
    return StagedSolve(inputs, open_solve, coarse, forms)


def _continued(
    inputs: Sequence[Tensor], open_solve: OpenSolve[Any], forms: Sequence[Tensor] | None
) -> ContinuedSolve[Any] | None:
    try:
        return ContinuedSolve(inputs, open_solve, forms=forms)
    except GraphRefusedError:
        return None


def called(key: Hashable, inputs: Sequence[Tensor], work: Work) -> tuple[list[Tensor], object] | None:
    """The answer of a function by one graph, as with :func:`staged`."""
    return _by_graph(key, inputs, CapturedCall, work)


def _by_graph(
    key: Hashable,
    inputs: Sequence[Tensor],
    kind: Callable[..., _ByGraph],
    work: Any,
    lend: bool = False,
    forms: Sequence[Tensor] | None = None,
) -> tuple[list[Any], object] | None:
    if not usable(inputs):
        return None
    # Solves share buffers, and are made of several launches: one thread at a time. A backward pass does not wait for
    # its turn: whoever has it may be capturing a map that needs autograd's thread, which is the one that would wait.
    if not _one_at_a_time.acquire(blocking=torch._C._current_graph_task_id() == -1):
        return None
    try:
        with on(inputs[0].device):
            return _launched(key, inputs, kind, work, lend, inputs if forms is None else forms)
    finally:
        _one_at_a_time.release()


def _launched(
    key: Hashable,
    inputs: Sequence[Tensor],
    kind: Callable[..., _ByGraph],
    work: Any,
    lend: bool,
    forms: Sequence[Tensor],
) -> tuple[list[Any], object] | None:
    device = inputs[0].device
    stream = raw_stream(device)
    form = (key, device, stream, _climate(), tuple((i.shape, i.dtype, i.stride()) for i in forms))
    if form not in _solves:
        if form not in _seen:
            _remember(_seen, form, None)
            return None
        # The solve that ran as it is has left its memory with the allocator, where a graph's pool can't have it.
        torch.cuda.empty_cache()
        _remember(_solves, form, _tried(lambda: kind(inputs, work, forms=forms)))
    _solves.move_to_end(form)
    solve = _solves[form]
    if solve is not None and solve.misjudged:
        coarse = not solve.coarse
        solve = _solves[form] = _tried(lambda: kind(inputs, work, coarse, forms))
    return None if solve is None else (solve(inputs, work, lend), solve.facts)


def _climate() -> Hashable:
    """Settings of the process that decide which kernels a capture records: a replay would not notice a change."""
    cudnn = torch.backends.cudnn.enabled
    return settings.fused, settings.forks, products(), cudnn, torch.are_deterministic_algorithms_enabled()


def _tried(capture: Callable[[], Captured]) -> Captured | None:
    try:
        return capture()
    except Exception as error:  # kernels that are compiled on the way may raise what they like
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
    Workshop.close_all()


def _remember(store: OrderedDict[Hashable, Any], form: Hashable, value: Any) -> None:
    store[form] = value
    if len(store) > _MOST_SOLVES:
        store.popitem(last=False)
