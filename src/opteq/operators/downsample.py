"""Downsampling: a fixed filter, then every k-th pixel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from opteq.operators.base import LinearMap, Operator, checked_size, wrong_shape
from opteq.operators.spectral.norms import kernel_norm


class DownsampleMap(LinearMap):
    """Correlation with stride, channel by channel."""

    def __init__(self, kernel: Tensor, factor: int) -> None:
        self.kernel = kernel
        self.factor = factor
        # An even kernel lies over its block; an odd one is centred on the block's first pixel.
        self.padding = tuple((size - 1) // 2 if size % 2 else (size - factor) // 2 for size in kernel.shape)

    def __call__(self, v: Tensor) -> Tensor:
        if v.ndim != 4 or any(size % self.factor for size in v.shape[2:]):
            raise wrong_shape("Downsample", f"(B, c, h, w) with sizes that are multiples of {self.factor}", v)
        c = v.shape[1]
        return F.conv2d(v, self._weight(v), stride=self.factor, padding=self.padding, groups=c)

    def adjoint(self, u: Tensor) -> Tensor:
        """Zeros are put between the pixels, then comes the transposed filter."""
        extra = [self.factor - size + 2 * p for size, p in zip(self.kernel.shape, self.padding, strict=True)]
        return F.conv_transpose2d(
            u, self._weight(u), stride=self.factor, padding=self.padding, output_padding=extra, groups=u.shape[1]
        )

    def _weight(self, v: Tensor) -> Tensor:
        return self.kernel.to(v.dtype).expand(v.shape[1], 1, -1, -1)


class Downsample(Operator):
    """Images ``(B, c, h, w) -> (B, c, h / factor, w / factor)``: filter every channel, keep every ``factor``-th pixel.

    Args:
        factor: h and w should be multiples of it.
        kernel: the filter ``(k1, k2)``: odd sizes, or even ones of at least ``factor`` that differ from it by an even
            number; the mean of ``factor x factor`` pixels by default.

    >>> Downsample(2)(torch.arange(4.0).reshape(1, 1, 2, 2))
    tensor([[[[1.5000]]]])
    """

    kernel: Tensor

    def __init__(self, factor: int, kernel: Tensor | None = None) -> None:
        super().__init__()
        self.factor = checked_size("factor", factor)
        kernel = torch.full((factor, factor), factor**-2.0) if kernel is None else kernel
        if kernel.ndim != 2 or any(not self._fits(size) for size in kernel.shape):
            raise ValueError(
                f"Downsample.kernel should be a matrix of odd sizes, or of {factor} plus an even number; "
                f"got shape {tuple(kernel.shape)}"
            )
        self.register_buffer("kernel", kernel.detach().clone())

    def prepare(self) -> DownsampleMap:
        return DownsampleMap(self.kernel, self.factor)

    def norm(self) -> Tensor:
        """An upper bound; exact for the mean over blocks."""
        with torch.no_grad():
            if all(size == self.factor for size in self.kernel.shape):  # blocks do not overlap
                norm: Tensor = torch.linalg.vector_norm(self.kernel)
                return norm
            # Of the phases that the stride takes apart, each is a convolution of its own; rows of A side by side.
            return self._polyphase_norm()

    def _polyphase_norm(self) -> Tensor:
        f = self.factor
        rows, columns = (-(-size // f) * f for size in self.kernel.shape)
        padded = F.pad(self.kernel, (0, columns - self.kernel.shape[1], 0, rows - self.kernel.shape[0]))
        phases = padded.reshape(rows // f, f, columns // f, f).permute(1, 3, 0, 2).reshape(1, f * f, rows // f, -1)
        return kernel_norm(phases, fine=True)

    def _fits(self, size: int) -> bool:
        return size % 2 == 1 if size % 2 != self.factor % 2 or size % 2 == 1 else size >= self.factor

    def extra_repr(self) -> str:
        """The factor."""
        return f"factor={self.factor}, kernel of {tuple(self.kernel.shape)}"
