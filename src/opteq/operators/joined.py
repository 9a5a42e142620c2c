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
    """A weight ``(m, c, k1, k2)`` in float32, laid out once as kernels want it, for channels-last pictures like one.

    Args:
        weight: of a convolution with stride 1.
        padding: zeros around pictures.
        size: ``(b, c, h, w)`` of a picture. Others of as many channels can be multiplied too.
    """

    def __init__(self, weight: Tensor, padding: Sequence[int], size: Sequence[int]) -> None:
        self.weight = weight.detach()
        self.geometry = list(padding), [1, 1], [1, 1], 1
        lay_out = getattr(torch._C._nn, "mkldnn_reorder_conv2d_weight", None)
        if lay_out is not None:
            self.weight = lay_out(self.weight.to_mkldnn(), *self.geometry, list(size))

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
