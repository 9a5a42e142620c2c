"""A convolution of torch's by products of halves where TF32 is allowed, with its derivatives (see :mod:`.narrow`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opteq.operators import narrow
from opteq.operators.conv import ConvMap

_HALF = torch.float16
# Operations from which the time that is saved is longer than what a dozen launches from Python take.
_WORTH = 10**10


def convolved(U: nn.Conv2d, x: Tensor, summed: Callable[[Tensor], Tensor]) -> Tensor | None:
    """``U(x)``; None where it should be computed in another way.

    Args:
        U: the convolution.
        x: its input.
        summed: the sum over all pixels, of every channel.
    """
    taps = U.weight.shape[2:]
    same = all(side % 2 == 1 for side in taps) and tuple(U.padding) == tuple(side // 2 for side in taps)
    if not same or {*U.stride, *U.dilation, U.groups} != {1}:
        return None
    if 2 * x[:, 0].numel() * U.weight.numel() < _WORTH:
        return None
    if narrow.narrow_dtype_on_tape(U.weight, x) != _HALF or x.dtype == _HALF:
        return None
    plan = narrow.Sums.of(*x.shape, len(U.weight), taps[0] * taps[1], narrow.processors(x.device))
    if plan is None:
        return None
    weight, bias = U.weight, U.bias
    key = ("narrow layer", x.shape, weight.shape, bias is None, x.device)
    linear = ConvMap(weight.detach())

    def plain() -> Tensor:
        return F.conv2d(x.detach(), weight.detach(), None if bias is None else bias.detach(), 1, U.padding)

    def quick() -> Tensor:
        return _forward(linear, *narrow.rounded_together(_HALF, x.detach()), bias)

    if not narrow.is_chosen(key, plain, lambda: quick, outside=True):
        return None
    found: Tensor = _Convolved.apply(x, weight, bias, linear, plan, summed)  # type: ignore[no-untyped-call]
    return found


def _forward(linear: ConvMap, rounded: Tensor, top: Tensor, bias: Tensor | None) -> Tensor:
    with torch.no_grad(), torch.cuda.device_of(rounded):  # type: ignore[no-untyped-call]
        rows = narrow.Rows.of(linear, _HALF, False)
        out = torch.empty(*rounded.shape[:3], len(rows.numbers), device=rounded.device)
        narrow.convolve(rounded, rows, out, top, bias, "nothing" if bias is None else "shift")
        return out.permute(0, 3, 1, 2)


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, linear: ConvMap, plan: narrow.Sums, summed: Any
    ) -> Tensor:
        ctx.linear, ctx.plan, ctx.summed, ctx.biased = linear, plan, summed, bias is not None
        rounded, top = narrow.rounded_together(_HALF, x)
        ctx.save_for_backward(x, weight, rounded, top)
        ctx.save_for_forward(x, weight)
        return _forward(linear, rounded, top, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rounded, top = ctx.saved_tensors
        by_x, by_weight, by_bias = ctx.needs_input_grad[:3]
        wanted = by_x, by_weight, False
        sums = ctx.summed(gradient) if by_bias else None
        if torch.is_grad_enabled() or type(gradient) is not Tensor or torch._C._are_functorch_transforms_active():
            padding = ctx.linear.padding  # a second derivative may follow, or somebody looks on
            plain = torch.ops.aten.convolution_backward(
                gradient, x, weight, None, (1, 1), padding, (1, 1), False, (0, 0), 1, wanted
            )
            return plain[0], plain[1], sums, None, None, None
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        with torch.cuda.device_of(gradient):  # type: ignore[no-untyped-call]  # kernels run on the current device
            arrived, size = narrow.rounded_together(_HALF, gradient)
            slope = None
            if by_x:
                out = torch.empty(*rounded.shape, device=rounded.device)
                narrow.convolve(arrived, narrow.Rows.of(ctx.linear, _HALF, True), out, size)
                slope = out.permute(0, 3, 1, 2)
            taps = weight.shape[2:]
            found = narrow.correlated(arrived, size, rounded, top, taps, ctx.plan) if by_weight else None
        return slope, found, sums, None, None, None

    @staticmethod
    def jvp(ctx: Any, by_x: Tensor | None, by_weight: Tensor | None, by_bias: Tensor | None, *_: Any) -> Tensor | None:
        x, weight = ctx.saved_tensors[:2]
        padding, total = ctx.linear.padding, None
        for left, right in ((by_x, weight), (x, by_weight)):
            if left is not None and right is not None:
                part = F.conv2d(left, right, None, 1, padding)
                total = part if total is None else total + part
        if by_bias is not None:
            spread = by_bias.reshape(-1, 1, 1)
            shape = (len(x), len(weight), *x.shape[2:])
            total = spread.expand(shape) if total is None else total + spread
        return total
