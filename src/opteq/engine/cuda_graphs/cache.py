"""Captured solves, by what they depend on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from opteq.engine.cuda_graphs.capture import CaptureContext, capture_lock, on, raw_stream
from opteq.engine.cuda_graphs.conditional_graph import available
from opteq.engine.cuda_graphs.conditional_solve import ConditionalSolve, OpenSolve
from opteq.engine.settings import settings

_MOST_SOLVES = 32

_solves: OrderedDict[Hashable, ConditionalSolve | str] = OrderedDict()
_seen: OrderedDict[Hashable, None] = OrderedDict()


def run(key: Hashable, inputs: Sequence[Tensor], open_solve: OpenSolve) -> tuple[list[Any], object] | str:
    """The output of a solve by a captured graph and the facts about it, or why it should run on the plain path.

    The output is a list of tensors, and last a function that gives the history of residuals. The first solve of a form
    runs plainly: a batch that is seen once is not worth a capture. A capture that fails is not tried again.

    Args:
        key: what distinguishes this form of solve; shapes, strides and dtypes of the inputs are added to it.
        inputs: every tensor that the solve depends on.
        open_solve: begins a solve that reads the given copies of the inputs.
    """
    reason = unusable(inputs)
    if reason is not None:
        return reason
    with capture_lock() as mine:
        if not mine:
            return "another thread has its turn with the graphs"
        with on(inputs[0].device):
            return _run(key, inputs, open_solve)


def _run(key: Hashable, inputs: Sequence[Tensor], open_solve: OpenSolve) -> tuple[list[Any], object] | str:
    device = inputs[0].device
    form = (key, device, raw_stream(device), environment(), tuple((i.shape, i.dtype, i.stride()) for i in inputs))
    if form not in _solves:
        if form not in _seen:
            _remember(_seen, form, None)
            return "the first call with inputs of this form is not captured"
        # The solve that ran plainly has left its memory with the allocator, where a graph's pool can't have it.
        torch.cuda.empty_cache()
        _remember(_solves, form, _captured(inputs, open_solve))
    _solves.move_to_end(form)
    solve = _solves[form]
    return solve if isinstance(solve, str) else (solve(inputs), solve.facts)


def _captured(inputs: Sequence[Tensor], open_solve: OpenSolve) -> ConditionalSolve | str:
    try:
        return ConditionalSolve(inputs, open_solve)
    except Exception as error:  # a user's code, and kernels that are compiled on the way, may raise anything
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"it could not be captured: {message}"


def environment() -> Hashable:
    """Settings of the process that decide what a capture records: a replay would not notice a change."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    convolutions: Any = getattr(cudnn, "conv", None)
    if hasattr(convolutions, "fp32_precision"):  # torch 2.9, where reading the older flags may raise
        products: Hashable = (cuda.fp32_precision, convolutions.fp32_precision)
    else:
        products = (cuda.allow_tf32, cudnn.allow_tf32)
    deterministic = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic
    return settings.triton, products, cudnn.enabled, deterministic, torch.get_default_dtype()


def unusable(inputs: Sequence[Tensor]) -> str | None:
    """Why graphs can't be used now for tensors like these; None where they can."""
    if not inputs or not all(tensor.is_cuda and tensor.device == inputs[0].device for tensor in inputs):
        return "not all tensors are on one CUDA device"
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return "a transformation of torch.func or torch.compile is active"
    if torch.cuda.is_current_stream_capturing():
        return "the caller captures a graph"
    if not available(inputs[0].device):
        return "conditional CUDA graphs need CUDA 12.8 and the cuda-bindings package"
    return None


def forget() -> None:
    """Drop every captured solve and the memory that they hold."""
    with capture_lock() as mine:
        if mine:  # not in a backward pass while another thread uses them
            _solves.clear()
            _seen.clear()
            CaptureContext.known.clear()


def _remember(store: OrderedDict[Hashable, Any], form: Hashable, value: Any) -> None:
    store[form] = value
    if len(store) > _MOST_SOLVES:
        store.popitem(last=False)
