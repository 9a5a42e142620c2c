"""Numbers and their gradients, computed by a GPU in one launch.

The bound on a weight is a scalar function of a few parameters, made of fifty to three hundred small operations. A GPU
computes each of them faster than Python can launch it, and several such functions at once faster than one after the
other. Captured once as a CUDA graph with a branch for every function, values and gradients together are replayed as
one. The gradient of a scalar is known as soon as its value is, whatever will be asked of it later, so nothing of the
graph has to stay alive for a backward pass: what leaves is copied, and a replay for the next batch harms nobody.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opteq._capturing import mend_generator, no_garbage_collected
from opteq._copying import copy_all
from opteq._fast import settings

Scalar = Callable[..., Tensor]

# A captured graph holds device memory for its intermediate results; old ones go when there are many.
_MOST_GRAPHS = 64
_graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()
_pools: dict[tuple[torch.device, int], Any] = {}


@dataclass(frozen=True)
class Job:
    """A scalar to be computed: a pure function of tensors on one device, without synchronisation.

    ``name`` is what distinguishes the function from others of inputs of the same shapes.
    """

    function: Scalar
    name: Hashable
    inputs: tuple[Tensor, ...]

    @property
    def form(self) -> Hashable:
        """What a captured graph of it depends on."""
        return self.name, tuple((i.shape, i.dtype, i.stride()) for i in self.inputs)


def in_one_launch(*jobs: Job, stream: Any = None) -> list[Tensor]:
    """The value of every job; on a GPU by one graph with their gradients, elsewhere by calling the functions.

    With ``stream`` the graph runs there, and whoever uses a value waits for that stream first.
    """
    flat = tuple(tensor for job in jobs for tensor in job.inputs)
    if not _capturable(flat):
        return [job.function(*job.inputs) for job in jobs]
    values: tuple[Tensor, ...] = _OneLaunch.apply(jobs, stream, *flat)  # type: ignore[no-untyped-call]
    return list(values)


class _OneLaunch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, jobs: Sequence[Job], stream: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        if stream is not None:
            # Only the numbers are made on the other stream: autograd's node, and so its backward, belongs to this one.
            here = torch.cuda.current_stream(inputs[0].device)
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                values: tuple[Tensor, ...] = _OneLaunch.forward(ctx, jobs, None, *inputs)
            for tensor in (*values, *ctx.to_save):
                tensor.record_stream(here)
            return values
        wanted = any(ctx.needs_input_grad)
        graph = _graph(jobs, wanted)
        if graph is None:  # capture is not possible here: the same numbers, one launch after the other
            found = [_evaluate(job.function, [i.detach().requires_grad_() for i in job.inputs], wanted) for job in jobs]
        else:
            found = graph.replay(inputs)
        ctx.jobs = [(job.function, len(job.inputs)) for job in jobs]
        ctx.save_for_backward(*inputs, *(slope for _, slopes in found for slope in slopes))
        return tuple(value for value, _ in found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        half = len(ctx.saved_tensors) // 2
        inputs, slopes = ctx.saved_tensors[:half], list(ctx.saved_tensors[half:])
        spread: list[Tensor] = []
        start = 0
        for (function, count), gradient in zip(ctx.jobs, gradients, strict=True):
            own = inputs[start : start + count]
            if torch.is_grad_enabled():  # a second derivative may follow: give it the operations themselves
                slopes[start : start + count] = torch.autograd.grad(function(*own), own, create_graph=True)
            spread += [gradient] * count
            start += count
        return None, None, *[gradient * slope for gradient, slope in zip(spread, slopes, strict=True)]


class _Graph:
    """Captured evaluations with their own copies of the inputs."""

    def __init__(self, jobs: Sequence[Job], wanted: bool) -> None:
        device = jobs[0].inputs[0].device
        home = torch.cuda.current_stream(device).cuda_stream
        with torch.inference_mode(False), torch.cuda.device(device):
            # Leaves of their own: a tie to the parameters would draw other streams into the capture.
            copies = [[i.detach().clone().requires_grad_() for i in job.inputs] for job in jobs]
            self.inputs = [copy for own in copies for copy in own]
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):  # libraries set themselves up on first use, which cannot be captured
                    for job, own in zip(jobs, copies, strict=True):
                        _evaluate(job.function, own, wanted)
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            # What other threads do meanwhile, one that loads data for instance, is no concern of this capture.
            capture = torch.cuda.graph(self.graph, pool=_pool(device, home), capture_error_mode="thread_local")
            try:
                with no_garbage_collected(), capture:
                    self.found = self._side_by_side(jobs, copies, wanted)
            except BaseException:
                # The allocator may take the pool for one that is still recorded to: the next capture has another one.
                _pools.pop((device, home), None)
                mend_generator()
                raise

    def replay(self, inputs: Sequence[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
        """Values and gradients at ``inputs``, as copies."""
        with torch.no_grad():
            copy_all(self.inputs, [given.detach() for given in inputs])
            self.graph.replay()
            inside = [tensor for value, slopes in self.found for tensor in (value, *slopes)]
            outside = [torch.empty_like(tensor) for tensor in inside]
            copy_all(outside, inside)
        rest = iter(outside)
        return [(next(rest), [next(rest) for _ in slopes]) for _, slopes in self.found]

    @staticmethod
    def _side_by_side(
        jobs: Sequence[Job], copies: list[list[Tensor]], wanted: bool
    ) -> list[tuple[Tensor, list[Tensor]]]:
        """Every job on a stream of its own: in the graph they are branches that a GPU may run at the same time."""
        if len(jobs) == 1:
            return [_evaluate(jobs[0].function, copies[0], wanted)]
        main, found = torch.cuda.current_stream(), []
        branches = [torch.cuda.Stream() for _ in jobs]  # type: ignore[no-untyped-call]
        for branch in branches:  # all of them leave before the first one returns, or each would wait for the last
            branch.wait_stream(main)
        for branch, job, own in zip(branches, jobs, copies, strict=True):
            with torch.cuda.stream(branch):
                found.append(_evaluate(job.function, own, wanted))
        for branch in branches:
            main.wait_stream(branch)
        return found


def _evaluate(function: Scalar, inputs: list[Tensor], wanted: bool) -> tuple[Tensor, list[Tensor]]:
    with torch.set_grad_enabled(wanted):
        value = function(*inputs)
        slopes = list(torch.autograd.grad(value, inputs)) if wanted else [torch.zeros_like(i) for i in inputs]
    return value.detach(), slopes


def _graph(jobs: Sequence[Job], wanted: bool) -> _Graph | None:
    device = jobs[0].inputs[0].device
    # Graphs share buffers within a stream's order only.
    stream = torch.cuda.current_stream(device).cuda_stream
    manner = settings.fused and settings.bounds, torch.get_float32_matmul_precision()
    key = (wanted, device, stream, manner, tuple(job.form for job in jobs))
    if key not in _graphs:
        try:
            _graphs[key] = _Graph(jobs, wanted)
        except RuntimeError as error:
            _graphs[key] = None
            warnings.warn(f"a CUDA graph could not be captured, so bounds cost more time: {error}", stacklevel=2)
        if len(_graphs) > _MOST_GRAPHS:
            _graphs.popitem(last=False)
    _graphs.move_to_end(key)
    return _graphs[key]


def _pool(device: torch.device, stream: int) -> Any:
    """Memory of graphs that run one after the other: two that run on different streams may not share any."""
    if (device, stream) not in _pools:
        _pools[device, stream] = torch.cuda.graph_pool_handle()
    return _pools[device, stream]


def _capturable(inputs: tuple[Tensor, ...]) -> bool:
    return (
        all(i.is_cuda and i.device == inputs[0].device for i in inputs)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not torch.cuda.is_current_stream_capturing()
    )
