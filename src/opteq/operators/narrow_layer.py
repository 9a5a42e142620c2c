"""A convolution of torch's by products of halves where TF32 is allowed, with its derivatives (see :mod:`.narrow`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opteq.operators.conv import ConvMap
from opteq.operators.narrow_choice import is_chosen, is_plain, narrow_dtype_on_tape
from opteq.operators.narrow_plans import Sums, processors
from opteq.operators.narrow_products import Rows, balanced_sum, convolve
from opteq.operators.narrow_rounding import rounded_with_sizes

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
    if 2 * (x.numel() // max(1, x.shape[1])) * U.weight.numel() < _WORTH:
        return None
    if narrow_dtype_on_tape(U.weight, x) != _HALF or x.dtype == _HALF:
        return None
    plan = Sums.of(*x.shape, len(U.weight), taps[0] * taps[1], processors(x.device))
    if plan is None:
        return None
    weight, bias = U.weight, U.bias
    key = ("narrow layer", x.shape, weight.shape, weight.stride(), bias is None, x.device)
    linear = ConvMap(weight.detach())

    def plain() -> Tensor:
        return F.conv2d(x.detach(), weight.detach(), None if bias is None else bias.detach(), 1, U.padding)

    def quick() -> Tensor:
        return _product(linear, False, *_rounded(x.detach()), bias)

    def prepared() -> Callable[[], Tensor]:
        # What the way back needs is loaded now: it may be captured later, and what fails should fail here.
        with torch.no_grad():
            (rounded, tops), (arrived, sizes) = _rounded(x.detach()), _rounded(plain())
            _product(linear, True, arrived, sizes)
            _by_weight(plain(), sizes, rounded, tops, taps, plan)
        return quick

    if not is_chosen(key, x, plain, prepared, outside=True):
        return None
    found: Tensor = _Convolved.apply(x, weight, bias, linear, plan, summed)  # type: ignore[no-untyped-call]
    return found


def _rounded(v: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures as halves, each with a scale of its own: samples have nothing to do with each other."""
    with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]  # kernels run on the current device
        return rounded_with_sizes(_HALF, v)


def _product(linear: ConvMap, adjoint: bool, rounded: Tensor, tops: Tensor, bias: Tensor | None = None) -> Tensor:
    with torch.no_grad(), torch.cuda.device_of(rounded):  # type: ignore[no-untyped-call]
        rows = Rows.of(linear, _HALF, adjoint)
        return convolve(rounded, rows, torch.float32, tops, bias, "nothing" if bias is None else "shift")


def _by_weight(
    gradient: Tensor, sizes: Tensor, rounded: Tensor, tops: Tensor, taps: Sequence[int], plan: Sums
) -> Tensor:
    with torch.cuda.device_of(gradient):  # type: ignore[no-untyped-call]
        return balanced_sum(gradient, sizes, rounded, tops, taps, plan)


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, linear: ConvMap, plan: Sums, summed: Any
    ) -> Tensor:
        ctx.linear, ctx.plan, ctx.summed = linear, plan, summed
        rounded, tops = _rounded(x)
        ctx.save_for_backward(x, weight, rounded, tops)
        ctx.save_for_forward(x, weight)
        return _product(linear, False, rounded, tops, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rounded, tops = ctx.saved_tensors
        by_x, by_weight, by_bias = ctx.needs_input_grad[:3]
        sums = ctx.summed(gradient) if by_bias else None
        if torch.is_grad_enabled() or _is_watched(gradient):  # a second derivative may follow
            plain = torch.ops.aten.convolution_backward(
                gradient, x, weight, None, (1, 1), ctx.linear.padding, (1, 1), False, (0, 0), 1,
                (by_x, by_weight, False),
            )  # fmt: skip
            return plain[0], plain[1], sums, None, None, None
        gradient = _arranged(gradient)
        arrived, sizes = _rounded(gradient)
        return (
            _product(ctx.linear, True, arrived, sizes) if by_x else None,
            _by_weight(gradient, sizes, rounded, tops, weight.shape[2:], ctx.plan) if by_weight else None,
            sums,
            None,
            None,
            None,
        )

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


def _arranged(v: Tensor) -> Tensor:
    """Channels last, with the strides of its sizes."""
    return v if is_plain(v) else v.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def _is_watched(gradient: Tensor) -> bool:
    """Whether a transformation of torch looks on, or it is a tensor of another kind."""
    return (
        type(gradient) is not Tensor
        or gradient.dtype != torch.float32
        or torch._C._are_functorch_transforms_active()
        or torch._C._functorch.is_legacy_batchedtensor(gradient)
    )
