"""Small choices that make products faster and change no number: precision decided once, the faster of two ways."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from opteq._autocast import has_autocast
from opteq._fast import settings

_TRIALS = 3
# Cycles of a device, a few milliseconds.
_AHEAD = 5_000_000
_second_is_faster: dict[Hashable, bool] = {}
_zeros: dict[Hashable, Tensor] = {}


def rounded_for_autocast(weight: Tensor) -> Tensor | None:
    """The weight in the dtype of the autocast region in force; None outside of one, or where it has no effect."""
    kind = weight.device.type
    if weight.dtype != torch.float32 or not has_autocast(kind):
        return None
    return weight.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None


def zeros_at_hand(count: int, like: Tensor) -> Tensor:
    """So many zeros with dtype and device of ``like``, made once a process; nobody is to write to them.

    While a CUDA graph is captured none are kept: their memory, and the launch that fills them, belong to that graph.
    """
    key = count, like.dtype, like.device
    if key in _zeros:
        return _zeros[key]
    with torch.inference_mode(False):
        made = torch.zeros(count, dtype=like.dtype, device=like.device)
    if not torch.cuda.is_current_stream_capturing():
        _zeros[key] = made
    return made


def faster(key: Hashable, first: Callable[[], Tensor], second: Callable[[], Tensor]) -> Tensor:
    """The value that both ways have, by the one that was faster when this key was met for the first time on a GPU."""
    if not settings.fused or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return first()
    return second() if is_faster(key, first, second) else first()


def is_known(key: Hashable) -> bool:
    """Whether two ways of this key have been measured."""
    return key in _second_is_faster


def is_faster(
    key: Hashable, first: Callable[[], Tensor] | None = None, second: Callable[[], Tensor] | None = None
) -> bool:
    """Whether the second of two ways was faster when this key was met for the first time.

    Measuring makes the device wait, once a key and process. While a CUDA graph is captured nothing can be measured, and
    the answer is no where the key is new; as it is where there are no ways to be measured.
    """
    if key not in _second_is_faster:
        if first is None or second is None or torch.cuda.is_current_stream_capturing():
            return False
        _second_is_faster[key] = _milliseconds(second) < _milliseconds(first)
    return _second_is_faster[key]


def _milliseconds(way: Callable[[], Tensor]) -> float:
    way()
    # While the device waits, Python gets ahead of it: what is measured is the device's time.
    torch.cuda._sleep(_AHEAD)  # type: ignore[no-untyped-call]
    begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(_TRIALS):
        way()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
