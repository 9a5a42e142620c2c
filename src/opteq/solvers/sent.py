"""Numbers on their way from the device to the host, which does not wait for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Sent:
    """A copy of a tensor of integers that the host has once the device has got there."""

    def __init__(self, numbers: Tensor) -> None:
        self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
        self._copy.copy_(numbers, non_blocking=True)
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(numbers.device))

    def arrived(self) -> bool:
        """Whether they can be read without waiting."""
        return bool(self._event.query())

    def read(self) -> list[int]:
        """The numbers; waits for them."""
        self._event.synchronize()
        numbers: list[int] = self._copy.tolist()
        return numbers
