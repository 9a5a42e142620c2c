"""Changing the resolution of a picture by averaging, and back by the exact adjoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opteq._fast import settings
from opteq.operators import resample_fused
from opteq.operators.base import LinearMap, Operator, checked_size
from opteq.states import is_channels_last


class AveragePoolMap(LinearMap):
    """Averages over squares of ``factor x factor`` pixels."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, v: Tensor) -> Tensor:
        if v.ndim != 4 or v.shape[2] % self.factor or v.shape[3] % self.factor:
            raise ValueError(
                f"AveragePool({self.factor}) expects pictures (batch, channels, height, width) "
                f"with height and width divisible by {self.factor}, got {tuple(v.shape)}."
            )
        if not is_channels_last(v):
            return F.avg_pool2d(v, self.factor)
        batch, channels, height, width = v.shape
        k = self.factor
        if _has_kernels(v):
            return _pooled(v, k)
        # A mean over two dimensions of the same memory: its derivative is a copy, that of avg_pool2d a slow kernel.
        squares = v.permute(0, 2, 3, 1).reshape(batch, height // k, k, width // k, k, channels)
        return squares.mean(dim=(2, 4)).permute(0, 3, 1, 2)

    def adjoint(self, u: Tensor) -> Tensor:
        """Nearest upsampling divided by ``factor ** 2``."""
        if u.ndim != 4:
            raise ValueError(
                f"the adjoint of AveragePool({self.factor}) expects pictures (batch, channels, height, width), "
                f"got {tuple(u.shape)}."
            )
        k = self.factor
        if is_channels_last(u) and _has_kernels(u):
            return _spread(u, k)
        batch, channels, height, width = u.shape
        shares = u / k**2
        if is_channels_last(u):
            pixels = shares.permute(0, 2, 3, 1)[:, :, None, :, None].expand(batch, height, k, width, k, channels)
            return pixels.reshape(batch, height * k, width * k, channels).permute(0, 3, 1, 2)
        repeated = shares[:, :, :, None, :, None].expand(batch, channels, height, k, width, k)
        return repeated.reshape(batch, channels, height * k, width * k)


def _has_kernels(v: Tensor) -> bool:
    """Whether kernels for channels-last pictures, ours or torch's, can be used: not under torch.func and torch.compile.

    Neither of them can look into the functions below.
    """
    return (
        (v.is_cuda or (settings.fused and settings.interpreted))
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def _pooled(v: Tensor, factor: int) -> Tensor:
    pooled: Tensor = _Pooled.apply(v, factor)  # type: ignore[no-untyped-call]
    return pooled


def _spread(u: Tensor, factor: int) -> Tensor:
    spread: Tensor = _Spread.apply(u, factor)  # type: ignore[no-untyped-call]
    return spread


class _Pooled(torch.autograd.Function):
    """Averages. Its derivative is the adjoint as this file has it, not the slow kernel that torch has for it."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        pooled = resample_fused.pooled(v, factor)
        return F.avg_pool2d(v, factor) if pooled is None else pooled

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _spread(gradient.contiguous(memory_format=torch.channels_last), ctx.factor), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _pooled(tangent, ctx.factor)


class _Spread(torch.autograd.Function):
    """The adjoint of :class:`_Pooled`."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        spread = resample_fused.spread(u, factor)
        if spread is not None:
            return spread
        with torch.autocast("cuda", enabled=False):  # which would do this in float32
            return F.interpolate(u / factor**2, scale_factor=factor, mode="nearest")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _pooled(gradient.contiguous(memory_format=torch.channels_last), ctx.factor), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _spread(tangent, ctx.factor)


class AveragePool(Operator):
    """The mean over squares of ``factor x factor`` pixels, of norm ``1 / factor``.

    ``(B, C, h, w) -> (B, C, h / factor, w / factor)``. The adjoint repeats each pixel and divides by ``factor ** 2``.
    (Plain nearest upsampling is not the adjoint; it has norm ``factor`` and would break a contraction.)

    >>> P = AveragePool(2)
    >>> P(torch.ones(1, 1, 4, 4)).shape, P.norm()
    (torch.Size([1, 1, 2, 2]), tensor(0.5000))
    """

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = checked_size("factor", factor)

    def prepare(self) -> AveragePoolMap:
        return AveragePoolMap(self.factor)

    def norm(self) -> Tensor:
        """Exactly ``1 / factor``."""
        return torch.tensor(1 / self.factor)

    def extra_repr(self) -> str:
        return str(self.factor)


def resample(z: Tensor, size: int | tuple[int, int]) -> Tensor:
    """``z`` of shape ``(B, C, h, w)`` at the resolution ``size``, an integer (square) or a pair (height, width).

    Average pooling if ``size`` is smaller by an integer factor, its exact adjoint if it is larger by one, ``z`` itself
    if equal. So ``resample(., s)`` from ``t`` and ``resample(., t)`` from ``s`` are adjoint to each other, and no
    resampling has a norm above 1. This is the P that ties the branches of MOptEq together.

    >>> resample(torch.ones(1, 2, 4, 4), 2).shape, resample(torch.ones(1, 2, 4, 4), 8).mean()
    (torch.Size([1, 2, 2, 2]), tensor(0.2500))
    """
    there = (size, size) if isinstance(size, int) else (size[0], size[1])
    if z.ndim != 4:
        raise ValueError(f"resample expects pictures (batch, channels, height, width), got {tuple(z.shape)}.")
    here = (z.shape[2], z.shape[3])
    if here == there:
        return z
    if factor := _integer_factor(here, there):
        return AveragePoolMap(factor)(z)
    if factor := _integer_factor(there, here):
        return AveragePoolMap(factor).adjoint(z)
    raise ValueError(
        f"resample cannot go from {here} to {there}: "
        "one size must be an integer multiple of the other, by the same factor in height and width."
    )


def _integer_factor(large: tuple[int, int], small: tuple[int, int]) -> int | None:
    factor = large[0] // small[0] if small[0] > 0 else 0
    return factor if factor > 0 and large == (factor * small[0], factor * small[1]) else None
