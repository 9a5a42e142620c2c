"""A product on a tape whose value is known already: it costs nothing on the way forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opteq.operators import narrow
from opteq.operators.base import LinearMap
from opteq.operators.conv import ConvMap


def recalled(
    linear: ConvMap, v: Tensor, c: Tensor, value: Tensor, slope: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """``A v + c``, which is ``value``, with the derivatives by v, by c and by the weight of A.

    With ``slope``, which multiplies by the derivative of an activation there, it is the activation of that.
    """
    known: Tensor = _Recalled.apply(linear, v, linear.acting, c, value, slope)  # type: ignore[no-untyped-call]
    return known


def recalled_adjoint(linear: LinearMap, u: Tensor, value: Tensor) -> Tensor:
    """``A' u`` for a constant u, which is ``value``, with the derivative by the weight of A.

    Maps that are no plain convolution compute it again.
    """
    if not isinstance(linear, ConvMap):
        return linear.adjoint(u)
    known: Tensor = _RecalledAdjoint.apply(linear, u, linear.acting, value)  # type: ignore[no-untyped-call]
    return known


def by_weight(linear: ConvMap, v: Tensor, u: Tensor, weight: Tensor | None = None) -> Tensor:
    """The derivative of ``<A v, u>`` by the weight of A, or by the one that acts in its place."""
    weight = linear.weight if weight is None else weight

    def plain() -> Tensor:
        found: Tensor = torch.ops.aten.convolution_backward(
            u, v, weight, None, (1, 1), linear.padding, (1, 1), False, (0, 0), 1, (False, True, False)
        )[1]
        return found

    return narrow.by_weight(linear, v, u, plain)


class _Recalled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, linear: ConvMap, v: Tensor, weight: Tensor, c: Tensor, value: Tensor, slope: Any) -> Tensor:
        ctx.linear, ctx.slope, ctx.dtype = linear, slope, c.dtype
        ctx.save_for_backward(v, weight)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inside = gradients[0] if ctx.slope is None else ctx.slope(gradients[0])
        v, weight = ctx.saved_tensors
        _, want_v, want_weight, want_c, *_ = ctx.needs_input_grad
        return (
            None,
            ctx.linear.adjoint(inside) if want_v else None,
            by_weight(ctx.linear, v.to(weight.dtype), inside.to(weight.dtype), weight) if want_weight else None,
            inside.to(ctx.dtype) if want_c else None,
            None,
            None,
        )


class _RecalledAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, linear: ConvMap, u: Tensor, weight: Tensor, value: Tensor) -> Tensor:
        ctx.linear = linear
        ctx.save_for_backward(u, weight)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        u, weight = ctx.saved_tensors
        # <A' u, g> = <A g, u>
        found = by_weight(ctx.linear, gradient.to(weight.dtype), u.to(weight.dtype), weight)
        return None, None, found, None
