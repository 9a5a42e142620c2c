"""A number and its gradient, computed by a GPU in one launch.

The bound on a weight is a scalar function of a few parameters, made of some two hundred small operations. A GPU
computes each of them faster than Python can launch it. Captured once as a CUDA graph, value and gradient together are
replayed as one. The gradient of a scalar is known as soon as its value is, whatever will be asked of it later, so
nothing of the graph has to stay alive for a backward pass: what leaves is copied, and a replay for the next batch harms
nobody.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

Scalar = Callable[..., Tensor]

# A captured graph holds device memory for its intermediate results; old ones go when there are many.
_MOST_GRAPHS = 64
_graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()
_pools: dict[torch.device, Any] = {}


def in_one_launch(function: Scalar, name: Hashable, *inputs: Tensor) -> Tensor:
    """``function(*inputs)``, a scalar; on a GPU as one graph with its gradient, elsewhere called as it is.

    Args:
        function: a pure function of its inputs, without synchronisation.
        name: what distinguishes it from other functions of inputs of the same shapes.
        inputs: tensors on one device.
    """
    if not _capturable(inputs):
        return function(*inputs)
    value: Tensor = _OneLaunch.apply(function, name, *inputs)  # type: ignore[no-untyped-call]
    return value


class _OneLaunch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Scalar, name: Hashable, *inputs: Tensor) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        graph = _graph(function, name, inputs, wanted)
        if graph is None:  # capture is not possible here: the same numbers, one launch after the other
            value, slopes = _evaluate(function, [i.detach().requires_grad_() for i in inputs], wanted)
        else:
            value, slopes = graph.replay(inputs)
        ctx.function = function
        ctx.save_for_backward(*inputs, *slopes)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        half = len(ctx.saved_tensors) // 2
        inputs, slopes = ctx.saved_tensors[:half], ctx.saved_tensors[half:]
        if torch.is_grad_enabled():  # a second derivative may follow: give it the operations themselves
            slopes = torch.autograd.grad(ctx.function(*inputs), inputs, create_graph=True)
        return None, None, *[gradient * slope for slope in slopes]


class _Graph:
    """A captured evaluation with its own copies of the inputs."""

    def __init__(self, function: Scalar, inputs: tuple[Tensor, ...], wanted: bool) -> None:
        device = inputs[0].device
        with torch.inference_mode(False), torch.cuda.device(device):
            # Leaves of their own: a tie to the parameters would draw other streams into the capture.
            self.inputs = [i.detach().clone().requires_grad_() for i in inputs]
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):  # libraries set themselves up on first use, which cannot be captured
                    _evaluate(function, self.inputs, wanted)
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=_pool(device)):
                self.value, self.slopes = _evaluate(function, self.inputs, wanted)

    def replay(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
        """Value and gradient at ``inputs``, as copies."""
        with torch.no_grad():
            for own, given in zip(self.inputs, inputs, strict=True):
                own.copy_(given)
            self.graph.replay()
            return self.value.clone(), [slope.clone() for slope in self.slopes]


def _evaluate(function: Scalar, inputs: list[Tensor], wanted: bool) -> tuple[Tensor, list[Tensor]]:
    with torch.set_grad_enabled(wanted):
        value = function(*inputs)
        slopes = list(torch.autograd.grad(value, inputs)) if wanted else [torch.zeros_like(i) for i in inputs]
    return value.detach(), slopes


def _graph(function: Scalar, name: Hashable, inputs: tuple[Tensor, ...], wanted: bool) -> _Graph | None:
    device = inputs[0].device
    # Graphs share buffers within a stream's order only.
    stream = torch.cuda.current_stream(device).cuda_stream
    key = (name, wanted, device, stream, tuple((i.shape, i.dtype, i.stride()) for i in inputs))
    if key not in _graphs:
        try:
            _graphs[key] = _Graph(function, inputs, wanted)
        except RuntimeError as error:
            _graphs[key] = None
            warnings.warn(f"a CUDA graph could not be captured, so bounds cost more time: {error}", stacklevel=2)
        if len(_graphs) > _MOST_GRAPHS:
            _graphs.popitem(last=False)
    _graphs.move_to_end(key)
    return _graphs[key]


def _pool(device: torch.device) -> Any:
    if device not in _pools:
        _pools[device] = torch.cuda.graph_pool_handle()
    return _pools[device]


def _capturable(inputs: tuple[Tensor, ...]) -> bool:
    return (
        all(i.is_cuda and i.device == inputs[0].device for i in inputs)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not torch.cuda.is_current_stream_capturing()
    )
