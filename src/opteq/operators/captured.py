"""Numbers and their gradients, computed by a GPU in one launch each.

The bound on a weight is a scalar function of a few parameters, made of fifty to three hundred small operations. A GPU
computes each of them faster than Python can launch it, and several such functions at once faster than one after the
other. Captured once as a CUDA graph with a branch for every function, values and gradients together are replayed as
one. The gradient of a scalar is known once its value is, whatever will be asked of it later, so nothing of the graph
has to stay alive for a backward pass: what leaves is copied, and a replay for the next batch harms nobody. On a stream
of their own, gradients have another graph, and are computed beside all that is done with the values.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from opteq._autocast import Autocast
from opteq._capturing import mend_generator, no_garbage_collected
from opteq._copying import copy_all
from opteq._fast import settings

Scalar = Callable[..., Tensor]
Result = TypeVar("Result")

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


class Aside:
    """Another stream than the one in force, and when it has values: whoever uses one waits for ``ready`` first."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.ready: Any = None


def in_one_launch(*jobs: Job, aside: Aside | None = None) -> list[Tensor]:
    """The value of every job; on a GPU by graphs, with their gradients, elsewhere by calling the functions.

    With ``aside`` the graphs run there.
    """
    flat = tuple(tensor for job in jobs for tensor in job.inputs)
    if not _capturable(flat):
        return [job.function(*job.inputs) for job in jobs]
    values: tuple[Tensor, ...] = _OneLaunch.apply(jobs, aside, *flat)  # type: ignore[no-untyped-call]
    return list(values)


def scaled_in_one_launch(job: Job) -> Tensor | None:
    """The only input of a job times its value, in the dtype of both; None where no graph can be used.

    One node on the tape in place of two, and fewer launches on the way back, which count where weights are small.
    """
    (weight,) = job.inputs
    if not _capturable(job.inputs):
        return None
    product: Tensor = _Scaled.apply(job, weight)  # type: ignore[no-untyped-call]
    return product


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: Job, weight: Tensor) -> Tensor:
        ctx.function = job.function
        wanted = ctx.needs_input_grad[1]
        graph = _graph([job], wanted, apart=False)
        (value,), (slope,) = _evaluated([job], wanted) if graph is None else graph.both([weight])
        ctx.save_for_backward(weight, value, slope)
        return weight * value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        weight, value, slope = ctx.saved_tensors
        (gradient,) = gradients
        if torch.is_grad_enabled():  # a second derivative may follow: give it the operations themselves
            value = ctx.function(weight)
            (slope,) = _slopes(value, [weight], again=True)
            return None, gradient * value + (gradient * weight).sum() * slope
        if torch._C._functorch.is_legacy_batchedtensor(gradient):  # many of them, which not all operations know of
            return None, gradient * value + (gradient * weight).sum() * slope
        if gradient.is_contiguous() and weight.is_contiguous():
            along = torch.dot(gradient.view(-1), weight.view(-1))
        else:
            along = (gradient * weight).sum()
        return None, torch.addcmul(gradient * value, slope, along)


class _OneLaunch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, jobs: Sequence[Job], aside: Aside | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.jobs = [(job.function, len(job.inputs)) for job in jobs]
        ctx.known = None  # when gradients are known, where that is not in the order of this stream
        wanted = any(ctx.needs_input_grad)
        if aside is None:
            graph = _graph(jobs, wanted, apart=False)
            values, slopes = _evaluated(jobs, wanted) if graph is None else graph.both(inputs)
        else:
            # Only the numbers are made on the other stream: autograd's node, and so its backward, belongs to this one.
            here = torch.cuda.current_stream(inputs[0].device)
            aside.stream.wait_stream(here)
            with torch.cuda.stream(aside.stream):
                graph = _graph(jobs, wanted, apart=wanted)
                if graph is None:
                    values, slopes = _evaluated(jobs, wanted)
                    aside.ready = ctx.known = aside.stream.record_event()
                else:
                    values = graph.values(inputs)
                    aside.ready = aside.stream.record_event()
                    slopes = graph.slopes()
                    ctx.known = aside.stream.record_event()
            for tensor in (*values, *slopes):
                tensor.record_stream(here)
        ctx.save_for_backward(*inputs, *slopes)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        # Whoever captures has waited for everything before, and may not wait for what is outside.
        if ctx.known is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(gradients[0].device).wait_event(ctx.known)
        half = len(ctx.saved_tensors) // 2
        inputs, slopes = ctx.saved_tensors[:half], list(ctx.saved_tensors[half:])
        spread: list[Tensor] = []
        start = 0
        for (function, count), gradient in zip(ctx.jobs, gradients, strict=True):
            own = inputs[start : start + count]
            if torch.is_grad_enabled():  # a second derivative may follow: give it the operations themselves
                slopes[start : start + count] = _slopes(function(*own), own, again=True)
            spread += [gradient] * count
            start += count
        return None, None, *[gradient * slope for gradient, slope in zip(spread, slopes, strict=True)]


class _Graph:
    """Captured evaluations with their own copies of the inputs; ``apart`` if gradients have a graph of their own."""

    def __init__(self, jobs: Sequence[Job], wanted: bool, apart: bool) -> None:
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
            try:
                with no_garbage_collected(), torch.set_grad_enabled(wanted):
                    # The same for both: autograd goes back on the streams of the way there.
                    branches = [torch.cuda.Stream() for _ in jobs]  # type: ignore[no-untyped-call]
                    self.second, pairs = None, list(zip(jobs, copies, strict=True))
                    if apart:
                        there = [partial(job.function, *own) for job, own in pairs]
                        self.first, values = self._captured(there, branches, home)
                        back = [partial(_slopes, value, own) for value, own in zip(values, copies, strict=True)]
                        self.second, slopes = self._captured(back, branches, home)
                    else:
                        whole = [partial(_evaluate, job.function, own, wanted) for job, own in pairs]
                        self.first, found = self._captured(whole, branches, home)
                        values, slopes = [value for value, _ in found], [own for _, own in found]
            except BaseException:
                # The allocator may take the pool for one that is still recorded to: the next capture has another one.
                _pools.pop((device, home), None)
                mend_generator()
                raise
            self.found = [value.detach() for value in values]
            self.slopes_found = [slope for own in slopes for slope in own]

    def both(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Values at ``inputs`` and gradients by them, as copies, of a graph that has both."""
        self._replay(inputs)
        copies = _copies([*self.found, *self.slopes_found])
        return copies[: len(self.found)], copies[len(self.found) :]

    def values(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Values at ``inputs``, as copies."""
        self._replay(inputs)
        return _copies(self.found)

    def slopes(self) -> list[Tensor]:
        """Gradients by all inputs where :meth:`values` was just asked for, as copies."""
        if self.second is not None:
            self.second.replay()
        return _copies(self.slopes_found)

    def _replay(self, inputs: Sequence[Tensor]) -> None:
        with torch.no_grad():
            copy_all(self.inputs, [given.detach() for given in inputs])
        self.first.replay()

    @staticmethod
    def _captured(
        works: Sequence[Callable[[], Result]], branches: Sequence[Any], home: int
    ) -> tuple[Any, list[Result]]:
        graph, device = torch.cuda.CUDAGraph(), torch.device("cuda", torch.cuda.current_device())
        # What other threads do meanwhile, one that loads data for instance, is no concern of this capture.
        with torch.cuda.graph(graph, pool=_pool(device, home), capture_error_mode="thread_local"):
            found = _side_by_side(works, branches)
        return graph, found


def _copies(inside: list[Tensor]) -> list[Tensor]:
    outside = [torch.empty_like(tensor) for tensor in inside]
    copy_all(outside, inside)
    return outside


def _side_by_side(works: Sequence[Callable[[], Result]], branches: Sequence[Any]) -> list[Result]:
    """All works, each on a stream of its own: in a graph they are branches that a GPU may run at the same time."""
    if len(works) == 1:
        return [works[0]()]
    main, found = torch.cuda.current_stream(), []
    for branch in branches:  # all of them leave before the first one returns, or each would wait for the last
        branch.wait_stream(main)
    for branch, work in zip(branches, works, strict=True):
        with torch.cuda.stream(branch):
            found.append(work())
    for branch in branches:
        main.wait_stream(branch)
    return found


def _slopes(value: Tensor, inputs: Sequence[Tensor], again: bool = False) -> list[Tensor]:
    """Gradients in full precision, whatever the caller asks of his own products; ``again`` for their gradients."""
    with Autocast.current(value.device).off():
        return list(torch.autograd.grad(value, inputs, create_graph=again))


def _evaluate(function: Scalar, inputs: list[Tensor], wanted: bool) -> tuple[Tensor, list[Tensor]]:
    with torch.set_grad_enabled(wanted):
        value = function(*inputs)
        slopes = _slopes(value, inputs) if wanted else [torch.zeros_like(i) for i in inputs]
    return value.detach(), slopes


def _evaluated(jobs: Sequence[Job], wanted: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Values and gradients where no graph can be captured: the same numbers, one launch after the other."""
    found = [_evaluate(job.function, [i.detach().requires_grad_() for i in job.inputs], wanted) for job in jobs]
    return [value for value, _ in found], [slope for _, slopes in found for slope in slopes]


def _graph(jobs: Sequence[Job], wanted: bool, apart: bool) -> _Graph | None:
    device = jobs[0].inputs[0].device
    # Graphs share buffers within a stream's order only.
    stream = torch.cuda.current_stream(device).cuda_stream
    manner = settings.fused and settings.bounds, torch.get_float32_matmul_precision()
    key = (wanted, apart, device, stream, manner, tuple(job.form for job in jobs))
    if key not in _graphs:
        try:
            _graphs[key] = _Graph(jobs, wanted, apart)
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
