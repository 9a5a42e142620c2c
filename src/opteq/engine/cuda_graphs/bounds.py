"""The bounds of many weights, with their gradients, in one captured graph.

The bound of a weight is a scalar function of it, made of fifty to three hundred small operations. A GPU computes each
of them faster than Python can launch it, and those of several weights at once faster than one after the other. The
gradient of a scalar is known once its value is, whatever will be asked of it later: values and gradients are computed
together, on parallel branches of one graph, and copied out.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opteq.engine.cuda_graphs.buffers import copy_all
from opteq.engine.cuda_graphs.cache import environment
from opteq.engine.cuda_graphs.capture import capture_lock, no_garbage_collection, on, raw_stream, reset_generator
from opteq.operators.spectral.bound import scale_for
from opteq.states import Autocast

Job = tuple[float, tuple[Tensor, ...]]
"""A bound, and the tensors whose product it is for: the weight first."""

# A captured graph holds device memory for its intermediate results; old ones go when there are many.
_MOST_GRAPHS = 64
_graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()
_pools: dict[tuple[torch.device, int], Any] = {}


def scales_by_graph(jobs: Sequence[Job]) -> list[Tensor] | None:
    """The scale that brings every weight within its bound, differentiable; None where no graph can be used."""
    inputs = [tensor for _, tensors in jobs for tensor in tensors]
    if (
        any(not tensor.is_cuda or tensor.device != inputs[0].device for tensor in inputs)
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.cuda.is_current_stream_capturing()
    ):
        return None
    with capture_lock() as mine, on(inputs[0].device):
        if not mine:
            return None
        graph = _graph(jobs, torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs))
        if graph is None:
            return None
        scales: tuple[Tensor, ...] = _Scales.apply(graph, [(bound, len(own)) for bound, own in jobs], *inputs)  # type: ignore[no-untyped-call]
    return list(scales)


def forget() -> None:
    """Drop every captured graph and the memory that they hold."""
    with capture_lock() as mine:
        if mine:
            _graphs.clear()
            _pools.clear()


class _Scales(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: _Graph, jobs: list[tuple[float, int]], *inputs: Tensor) -> tuple[Tensor, ...]:
        values, slopes = graph(inputs)
        ctx.jobs = jobs
        ctx.save_for_backward(*inputs, *slopes)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        half = len(ctx.saved_tensors) // 2
        inputs, slopes = ctx.saved_tensors[:half], list(ctx.saved_tensors[half:])
        spread: list[Tensor] = []
        start = 0
        for (bound, count), gradient in zip(ctx.jobs, gradients, strict=True):
            own = inputs[start : start + count]
            if torch.is_grad_enabled():  # a second derivative may follow: give it the operations themselves
                slopes[start : start + count] = _slopes(scale_for(bound, *own), own, again=True)
            spread += [gradient] * count
            start += count
        return None, None, *[gradient * slope for gradient, slope in zip(spread, slopes, strict=True)]


class _Graph:
    """Captured evaluations of jobs with their own copies of the inputs."""

    def __init__(self, jobs: Sequence[Job], wanted: bool) -> None:
        device = jobs[0][1][0].device
        home = raw_stream(device)
        with torch.inference_mode(False):
            # Leaves of their own: a tie to the parameters would draw other streams into the capture.
            copies = [[tensor.detach().clone().requires_grad_() for tensor in tensors] for _, tensors in jobs]
            self.inputs = [copy for own in copies for copy in own]
            works = [partial(_evaluate, bound, own, wanted) for (bound, _), own in zip(jobs, copies, strict=True)]
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):  # libraries set themselves up on first use, which cannot be captured
                    for work in works:
                        work()
            torch.cuda.current_stream().wait_stream(stream)
            if (device, home) not in _pools:
                _pools[device, home] = torch.cuda.graph_pool_handle()
            self.graph = torch.cuda.CUDAGraph()
            try:
                # What other threads do meanwhile, one that loads data for instance, is no concern of this capture.
                with (
                    no_garbage_collection(),
                    torch.cuda.graph(self.graph, pool=_pools[device, home], capture_error_mode="thread_local"),
                ):
                    found = _in_parallel(works)
            except BaseException:
                # The allocator may take the pool for one that is still recorded to: the next capture has another one.
                _pools.pop((device, home), None)
                reset_generator()
                raise
            self.values = [value for value, _ in found]
            self.slopes = [slope for _, own in found for slope in own]

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Values at ``inputs`` and gradients by them, as copies."""
        with torch.no_grad():
            copy_all(self.inputs, [given.detach() for given in inputs])
            self.graph.replay()
            inside = [*self.values, *self.slopes]
            outside = [torch.empty_like(tensor) for tensor in inside]
            copy_all(outside, inside)
        return outside[: len(self.values)], outside[len(self.values) :]


def _in_parallel(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """All works, each on a stream of its own: in a graph a GPU may then run them at the same time."""
    main, found = torch.cuda.current_stream(), []
    streams: list[Any] = [torch.cuda.Stream() for _ in works]  # type: ignore[no-untyped-call]
    for stream in streams:  # all of them leave before the first one returns, or each would wait for the last
        stream.wait_stream(main)
    for stream, work in zip(streams, works, strict=True):
        with torch.cuda.stream(stream):
            found.append(work())
    for stream in streams:
        main.wait_stream(stream)
    return found


def _evaluate(bound: float, inputs: list[Tensor], wanted: bool) -> tuple[Tensor, list[Tensor]]:
    with torch.set_grad_enabled(wanted):
        value = scale_for(bound, *inputs)
        slopes = _slopes(value, inputs) if wanted else [torch.zeros_like(tensor) for tensor in inputs]
    return value.detach(), slopes


def _slopes(value: Tensor, inputs: Sequence[Tensor], again: bool = False) -> list[Tensor]:
    """Gradients in full precision, whatever the caller asks of his own products; ``again`` for their gradients."""
    with Autocast.current(value.device).off():
        return list(torch.autograd.grad(value, inputs, create_graph=again))


def _graph(jobs: Sequence[Job], wanted: bool) -> _Graph | None:
    device = jobs[0][1][0].device
    forms = tuple((bound, *((t.shape, t.dtype, t.stride()) for t in tensors)) for bound, tensors in jobs)
    # Graphs share buffers within a stream's order only.
    key = (wanted, device, raw_stream(device), environment(), forms)
    if key not in _graphs:
        try:
            _graphs[key] = _Graph(jobs, wanted)
        except RuntimeError as error:
            _graphs[key] = None
            warnings.warn(f"bounds could not be captured as a CUDA graph and take longer: {error}", stacklevel=2)
        if len(_graphs) > _MOST_GRAPHS:
            _graphs.popitem(last=False)
    _graphs.move_to_end(key)
    return _graphs[key]
