"""Convolutions that are differentiated by their adjoint, also in higher derivatives.

torch's own second derivative of a convolution computes a gradient of the weight that is thrown away, which takes
several times as long as all the rest: Hessian-vector products of a user's objective would consist of little else. Here
a convolution and its adjoint are each other's derivative, and gradients of weights are computed only where one is
wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Pair = tuple[int, int]


class Geometry(NamedTuple):
    """Stride, padding, dilation and groups of a convolution."""

    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1


def convolve(v: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """``A v``, as :func:`torch.nn.functional.conv2d` computes it."""
    v, weight = _cast(v, weight)
    result: Tensor = _Convolution.apply(v, weight, geometry)  # type: ignore[no-untyped-call]
    return result


def convolve_adjoint(u: Tensor, weight: Tensor, size: Pair, geometry: Geometry) -> Tensor:
    """``A' u`` for the same weight; ``size`` is the height and width of the result."""
    u, weight = _cast(u, weight)
    result: Tensor = _Adjoint.apply(u, weight, size, geometry)  # type: ignore[no-untyped-call]
    return result


class _Convolution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(v: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
        return torch.conv2d(v, weight, None, *geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        v, weight, ctx.geometry = inputs
        ctx.size = tuple(v.shape[2:])
        ctx.save_for_backward(v, weight)
        ctx.save_for_forward(v, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        v, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        by_input = _Adjoint.apply(gradient, weight, ctx.size, ctx.geometry) if wanted[0] else None  # type: ignore[no-untyped-call]
        by_weight = _by_weight(v, gradient, weight, ctx.geometry) if wanted[1] else None
        return by_input, by_weight, None

    @staticmethod
    def jvp(ctx: Any, of_v: Tensor | None, of_weight: Tensor | None, _: None) -> Tensor | None:
        v, weight = ctx.saved_tensors
        return _linear_in_both(of_v, of_weight, v, weight, lambda a, b: torch.conv2d(a, b, None, *ctx.geometry))


class _Adjoint(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor, weight: Tensor, size: Pair, geometry: Geometry) -> Tensor:
        return _transposed(u, weight, size, geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        u, weight, ctx.size, ctx.geometry = inputs
        ctx.save_for_backward(u, weight)
        ctx.save_for_forward(u, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        u, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        by_input = _Convolution.apply(gradient, weight, ctx.geometry) if wanted[0] else None  # type: ignore[no-untyped-call]
        by_weight = _by_weight(gradient, u, weight, ctx.geometry) if wanted[1] else None
        return by_input, by_weight, None, None

    @staticmethod
    def jvp(ctx: Any, of_u: Tensor | None, of_weight: Tensor | None, *_: None) -> Tensor | None:
        u, weight = ctx.saved_tensors
        return _linear_in_both(of_u, of_weight, u, weight, lambda a, b: _transposed(a, b, ctx.size, ctx.geometry))


def _transposed(u: Tensor, weight: Tensor, size: Pair, geometry: Geometry) -> Tensor:
    stride, padding, dilation, groups = geometry
    height, width = _least_size(u, weight, geometry)
    more = (size[0] - height, size[1] - width)
    if more == (0, 0) and stride == dilation == (1, 1) and groups == 1:
        return torch.conv_transpose2d(u, weight, padding=padding)
    return torch.conv_transpose2d(u, weight, None, stride, padding, more, groups, dilation)


def _least_size(u: Tensor, weight: Tensor, geometry: Geometry) -> list[int]:
    """Height and width of ``A' u`` without output padding."""
    each = zip(u.shape[2:], weight.shape[2:], geometry.stride, geometry.padding, geometry.dilation, strict=True)
    return [(n - 1) * stride - 2 * padding + dilation * (k - 1) + 1 for n, k, stride, padding, dilation in each]


def _by_weight(v: Tensor, gradient: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The gradient of ``<A v, gradient>`` by the weight."""
    stride, padding, dilation, groups = geometry
    found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        gradient, v, weight, None, stride, padding, dilation, False, [0, 0], groups, [False, True, False]
    )
    return found[1]


def _linear_in_both(
    of_v: Tensor | None, of_weight: Tensor | None, v: Tensor, weight: Tensor, apply: Callable[[Tensor, Tensor], Tensor]
) -> Tensor | None:
    first = None if of_v is None else apply(of_v, weight)
    second = None if of_weight is None else apply(v, of_weight)
    return second if first is None else first if second is None else first + second


def _cast(v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the precision that autocast asks for, if it does."""
    kind = v.device.type
    if torch.is_autocast_enabled(kind) and v.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        return v.to(dtype), weight.to(dtype)
    return v, weight


def conv2d(
    v: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:  # fmt: skip
    """:func:`torch.conv2d` by :func:`convolve`; None for arguments that it does not take."""
    if not isinstance(v, Tensor) or v.ndim != 4 or isinstance(padding, str):
        return None
    image = convolve(v, weight, Geometry(_pair(stride), _pair(padding), _pair(dilation), groups))
    return image if bias is None else image + bias.to(image.dtype)[:, None, None]


def conv_transpose2d(
    u: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1,
) -> Tensor | None:  # fmt: skip
    """:func:`torch.conv_transpose2d` by :func:`convolve_adjoint`; None for arguments that it does not take."""
    if not isinstance(u, Tensor) or u.ndim != 4:
        return None
    geometry = Geometry(_pair(stride), _pair(padding), _pair(dilation), groups)
    (height, width), more = _least_size(u, weight, geometry), _pair(output_padding)
    image = convolve_adjoint(u, weight, (height + more[0], width + more[1]), geometry)
    return image if bias is None else image + bias.to(image.dtype)[:, None, None]


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))


SECOND_ORDER: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    torch.conv2d: conv2d,
    torch.conv_transpose2d: conv_transpose2d,
}
"""Functions of torch, and what computes the same with cheap second derivatives."""
