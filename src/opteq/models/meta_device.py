"""Models as shapes alone: made in no time and no memory, to be counted, compared or filled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Tensors made inside are on the meta device, and nothing is written into them.

    Some initialisations would load torch's compiler first, to find out what writing to nothing means: that takes
    seconds.
    """
    with torch.device("meta"), _SkipInPlace():
        yield


class _SkipInPlace(TorchFunctionMode):
    """Leaves out operations in place on tensors without memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        target = args[0] if args else kwargs.get("tensor")
        if name.endswith("_") and not name.endswith("__") and isinstance(target, Tensor) and target.is_meta:
            return target
        return func(*args, **kwargs)
