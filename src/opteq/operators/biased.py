"""A convolution with a bias whose derivative does not take longer than the convolution's.

The derivative by a bias is the sum over all pixels, and torch's kernel for that takes several times as long on
channels-last pictures as reading them does; adding the bias takes three times as long as it should. Here both are one
pass over memory. Everything else is torch's.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_modules

from opteq._autocast import has_autocast
from opteq._triton import columns, is_capturing, may_launch
from opteq.operators import narrow_layer
from opteq.states import working_dtype

_WARPS = 4
# Entries of a tile, and parts that a sum is cut into: as many programs keep a GPU busy.
_TILE, _PARTS = 2048, 512
# Bytes of the result from which the passes over memory that are saved take longer than the launches from Python; twice
# as many in 16 bits, where everything else takes a GPU less time, too, and more often waits for Python.
_WORTH = 2**25
# Variants of the kernels that have been launched, and so compiled and loaded.
_ready: set[Hashable] = set()


def convolved(U: nn.Module, x: Tensor) -> Tensor | None:
    """``U(x)`` for a convolution of torch's; None where U should be called."""
    if type(U) is not nn.Conv2d or U.padding_mode != "zeros" or x.ndim != 4:
        return None
    biases = [] if U.bias is None else [U.bias.detach()]
    if any(bias.dtype != U.weight.dtype for bias in biases):  # which torch refuses
        return None
    if not _is_worth_it(U, x) or not may_launch(x, *biases) or _observed(U):
        return None
    found = narrow_layer.convolved(U, x, summed)
    if found is not None or U.bias is None:
        return found
    product = F.conv2d(x, U.weight, None, U.stride, U.padding, U.dilation, U.groups)
    if not (may_launch(product) and product.is_contiguous(memory_format=torch.channels_last)):
        return product.add_(U.bias.to(product.dtype).reshape(-1, 1, 1))
    biased: Tensor = _Biased.apply(product, U.bias)  # type: ignore[no-untyped-call]
    return biased


def _is_worth_it(U: nn.Conv2d, x: Tensor) -> bool:
    """Whether ``U(x)`` has bytes enough."""
    pixels = x.shape[0] * x.shape[2] * x.shape[3] // (U.stride[0] * U.stride[1])
    kind = x.device.type
    narrow = torch.is_autocast_enabled(kind) if has_autocast(kind) else False
    size = 2 if narrow else x.element_size()
    return pixels * U.out_channels * size >= (2 * _WORTH if size == 2 else _WORTH)


def _observed(U: nn.Module) -> bool:
    """Whether somebody changed what a call of ``U`` does, or watches it."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return (
        any(getattr(U, name, None) for name in hooks)
        or any(getattr(torch_modules, f"_global{name}", None) for name in hooks)
        or getattr(U, "_compiled_call_impl", None) is not None
        or "forward" in vars(U)
    )


class _Biased(torch.autograd.Function):
    """A bias added to channels-last pictures."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        out = torch.empty_like(v)
        done = _launched("add", v, bias.contiguous(), out)
        return out if done else torch.add(v, bias.to(v.dtype).reshape(-1, 1, 1), out=out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        by_bias = None
        if ctx.needs_input_grad[1]:
            by_bias = summed(gradient).to(ctx.dtype)
        return gradient if ctx.needs_input_grad[0] else None, by_bias

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, by_bias: Tensor | None) -> Tensor | None:  # noqa: ARG004
        if by_bias is None:
            return tangent
        spread = by_bias.reshape(-1, 1, 1)
        return None if tangent is None else tangent + spread.to(tangent.dtype)


def summed(gradient: Tensor) -> Tensor:
    """Of every channel, the sum over all pixels."""
    found = None if torch.is_grad_enabled() else _sums(gradient)  # else a second derivative may follow
    return gradient.sum(dim=(0, 2, 3)) if found is None else found


def _sums(gradient: Tensor) -> Tensor | None:
    """Of every channel, the sum over all pixels; None where torch should compute it."""
    if not (may_launch(gradient) and gradient.is_contiguous(memory_format=torch.channels_last)):
        return None
    batch, channels, height, width = gradient.shape
    tall = _TILE // columns(channels)
    tiles = -(-batch * height * width // (tall * _PARTS))
    count = -(-batch * height * width // (tall * tiles))
    parts = torch.empty(count, channels, dtype=working_dtype(gradient.dtype), device=gradient.device)
    return parts.sum(dim=0) if _launched("sums", gradient, parts, None, tiles) else None


def _launched(name: str, source: Tensor, second: Tensor, out: Tensor | None, tiles: int = 1) -> bool:
    """Run a kernel on ``source``; false where it can't be loaded now."""
    batch, channels, height, width = source.shape
    pixels, wide = batch * height * width, columns(channels)
    aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in (source, second))
    variant = (name, source.device, source.dtype, second.dtype, channels, aligned)
    if variant not in _ready and is_capturing(source):
        return False
    import triton.language as tl

    from opteq.operators import bias_kernels as kernels

    shape = {"C": channels, "PIXELS": _TILE // wide, "CHANNELS": wide, "num_warps": _WARPS}
    shape["WIDE"] = tl.float64 if working_dtype(source.dtype) == torch.float64 else tl.float32
    grid = (-(-pixels // (_TILE // wide * tiles)), -(-channels // wide))
    with torch.cuda.device_of(source):  # type: ignore[no-untyped-call]  # kernels run on the current device
        if out is None:
            kernels.sums[grid](source, second, pixels, tiles, **shape)
        else:
            kernels.add[grid](source, second, out, pixels, **shape)
    _ready.add(variant)
    return True
