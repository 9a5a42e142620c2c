"""Run linear algebra in full precision inside a caller's autocast region, and the caller's map as he asked."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from opteq.common.dynamo import constant


@constant
def has_autocast(kind: str) -> bool:
    """Whether there is autocast for this type of device. (Not all compilers of torch know torch's own question.)"""
    return torch.amp.is_autocast_available(kind)


@dataclass(frozen=True)
class Autocast:
    """An autocast setting that can be entered again later, in the backward pass for instance."""

    device_type: str
    enabled: bool
    dtype: torch.dtype | None

    @classmethod
    def current(cls, device: torch.device) -> Autocast:
        """The setting in force now for ``device``."""
        kind = device.type
        if not has_autocast(kind):
            return cls(kind, enabled=False, dtype=None)
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def entered(self) -> AbstractContextManager[object]:
        """The setting in force again."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled)

    def off(self) -> AbstractContextManager[object]:
        """No autocast, whatever the caller's setting: Gram matrices of bfloat16 products would be noise."""
        if self.dtype is None or not self.enabled:
            return nullcontext()
        return _Off(self.device_type)


class _Off:
    """No autocast for a while, entered in a tenth of the time that a region of torch's own takes."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __enter__(self) -> None:
        self.before = torch.is_autocast_enabled(self.kind)
        torch.set_autocast_enabled(self.kind, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self.kind, self.before)
