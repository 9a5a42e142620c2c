"""Convolutions with what follows them in one kernel: oneDNN's, which torch has for its own compiler."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch
from torch import Tensor


def has_joined_kernels() -> bool:
    """Whether there are such kernels here, and nobody has turned oneDNN off.

    Other processors have oneDNN too, but not its kernels for what follows a convolution.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():  # type: ignore[no-untyped-call]
        return False
    kernel = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)
    return kernel is not None and "binary" in kernel.overloads()


class JoinedWeight:
    """A weight ``(m, c, k1, k2)`` in float32, for channels-last pictures.

    oneDNN could lay it out once for all products. But such tensors have no memory that others could look at, which
    tools that watch operations do, and with some pictures at a time nothing is gained.

    Args:
        weight: of a convolution with stride 1.
        padding: zeros around pictures.
    """

    def __init__(self, weight: Tensor, padding: Sequence[int]) -> None:
        self.weight = weight.detach().contiguous(memory_format=torch.channels_last)
        self.geometry = list(padding), [1, 1], [1, 1], 1

    def product(self, v: Tensor, beside: Tensor | None, then: str) -> Tensor:
        """``A v``, or with a picture ``beside`` it, to "rectify" ``relu(A v + beside)``, to "weigh" their product."""
        kernel = torch.ops.mkldnn._convolution_pointwise
        if beside is None:
            found: Tensor = kernel(v, self.weight, None, *self.geometry, "none", [], "")
        elif then == "rectify":
            # It could rectify too, but makes a zero of what is not a number, and nobody would notice.
            found = kernel.binary(v, beside, self.weight, None, *self.geometry, "add", 1.0, None, [], None).relu_()
        else:
            found = kernel.binary(v, beside, self.weight, None, *self.geometry, "mul", None, None, [], None)
        return found
