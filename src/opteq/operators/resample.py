"""Changing the resolution of an image by averaging, and back by the exact adjoint."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from opteq.common.override import overridable
from opteq.states import is_channels_last


@overridable
def pool(v: Tensor, factor: int) -> Tensor:
    """The mean over squares of ``factor x factor`` pixels, in the memory layout of ``v``."""
    if not is_channels_last(v):
        return F.avg_pool2d(v, factor)
    batch, channels, height, width = v.shape
    # A mean over two dimensions of the same memory: its derivative is a copy, that of avg_pool2d a slow kernel.
    squares = v.permute(0, 2, 3, 1).reshape(batch, height // factor, factor, width // factor, factor, channels)
    return squares.mean(dim=(2, 4)).permute(0, 3, 1, 2)


@overridable
def spread(u: Tensor, factor: int) -> Tensor:
    """The adjoint of :func:`pool`: every pixel repeated, divided by ``factor ** 2``."""
    return repeat_pixels(u / factor**2, factor, factor)


def repeat_pixels(u: Tensor, rows: int, columns: int) -> Tensor:
    """Every pixel as ``rows x columns`` pixels, in the memory layout of ``u``. Its derivative is a plain sum."""
    batch, channels, height, width = u.shape
    if is_channels_last(u):
        pixels = u.permute(0, 2, 3, 1)[:, :, None, :, None].expand(batch, height, rows, width, columns, channels)
        return pixels.reshape(batch, height * rows, width * columns, channels).permute(0, 3, 1, 2)
    repeated = u[:, :, :, None, :, None].expand(batch, channels, height, rows, width, columns)
    return repeated.reshape(batch, channels, height * rows, width * columns)


def resample(z: Tensor, size: int | tuple[int, int]) -> Tensor:
    """``z`` of shape ``(B, C, h, w)`` at the resolution ``size``, an integer (square) or a pair (height, width).

    Average pooling if ``size`` is smaller by an integer factor, its exact adjoint if it is larger by one, ``z`` itself
    if equal. So ``resample(., s)`` from ``t`` and ``resample(., t)`` from ``s`` are adjoint to each other, and no
    resampling has a norm above 1. This is the P that couples the branches of MOptEq.

    >>> import torch
    >>> resample(torch.ones(1, 2, 4, 4), 2).shape, resample(torch.ones(1, 2, 4, 4), 8).mean()
    (torch.Size([1, 2, 2, 2]), tensor(0.2500))
    """
    there = (size, size) if isinstance(size, int) else (size[0], size[1])
    if z.ndim != 4:
        raise ValueError(f"resample expects images (batch, channels, height, width); got {tuple(z.shape)}")
    here = (z.shape[2], z.shape[3])
    if here == there:
        return z
    if factor := _integer_factor(here, there):
        return pool(z, factor)
    if factor := _integer_factor(there, here):
        return spread(z, factor)
    raise ValueError(
        f"resample cannot go from {here} to {there}: "
        "one size should be an integer multiple of the other, by the same factor in height and width"
    )


def _integer_factor(large: tuple[int, int], small: tuple[int, int]) -> int | None:
    factor = large[0] // small[0] if small[0] > 0 else 0
    return factor if factor > 0 and large == (factor * small[0], factor * small[1]) else None
