"""The bounds of many operators at once, and ahead of time: a GPU computes them side by side, beside other work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from opteq.operators.base import Operator
from opteq.operators.captured import Aside, in_one_launch
from opteq.operators.norms import Known, known_scales, scale_job

# Operations of a product from which a GPU is busy with it for longer than Python takes to use another stream.
_LONG, _LONG_IN_16_BITS = 10**10, 3 * 10**10
_side_streams: dict[torch.device, Any] = {}
_last_times: dict[
    torch.device, Any
] = {}  # of every device, an event at the last call that might have used another stream


@contextmanager
def bounded_together(module: nn.Module, ahead: bool = False, beside: Tensor | None = None) -> Iterator[None]:
    """While this is in force, operators inside ``module`` take their bounds from one computation for all of them.

    Bounds are chains of small operations, which leave a GPU mostly idle; those of several branches fit beside each
    other, and all of them beside whatever else a network does before it needs them. On other devices nothing is
    changed. The same numbers come out in any case.

    Args:
        module: what holds the operators.
        ahead: compute on a stream of their own, so that work which follows does not wait until it needs a bound.
        beside: an input to be multiplied by weights of about their size meanwhile; where it is large enough for that to
            take some time, and the device is far behind Python, they are computed ahead.
    """
    if known_scales.get() is not None or torch.compiler.is_compiling():  # a problem inside a problem: done already
        yield
        return
    bounded = [found for part in module.modules() if isinstance(part, Operator) and (found := part.bounded_by())]
    if beside is not None and beside.ndim > 1 and bounded:
        rows = beside.numel() // max(1, beside.shape[1])
        least = _LONG_IN_16_BITS if beside.itemsize == 2 or torch.is_autocast_enabled(beside.device.type) else _LONG
        long = 2 * rows * max(weight.numel() for weight, *_ in bounded) >= least
        ahead = ahead or (long and _is_behind(beside.device))
    if len(bounded) < (1 if ahead else 2) or not all(weight.is_cuda for weight, *_ in bounded):
        yield
        return
    jobs = [scale_job(*found) for found in bounded]
    ready = None
    if ahead and not torch.cuda.is_current_stream_capturing():
        aside = Aside(_side_stream(bounded[0][0].device))
        scales = in_one_launch(*jobs, aside=aside)
        ready = aside.ready
    else:
        scales = in_one_launch(*jobs)
    known = {id(weight): Known(weight, scale, ready) for (weight, *_), scale in zip(bounded, scales, strict=True)}
    token = known_scales.set(known)
    try:
        yield
    finally:
        known_scales.reset(token)


def _is_behind(device: torch.device) -> bool:
    """Whether a GPU has not even come to where it was asked for bounds the last time.

    Else it may be waiting for Python, and another stream means more launches.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    last = _last_times.get(device)
    behind = last is not None and not last.query()
    if last is None:
        last = _last_times[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
    last.record(torch.cuda.current_stream(device))
    return behind


def _side_stream(device: torch.device) -> Any:
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _side_streams[device]
