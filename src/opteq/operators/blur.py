"""Blur: the same fixed kernel on every channel of an image."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from opteq.operators.base import LinearMap, Operator, wrong_shape
from opteq.operators.spectral.norms import kernel_norm

_BOUNDARIES = ("zeros", "circular", "valid")


def gaussian_kernel(sigma: float, size: int | None = None) -> Tensor:
    """A normalised Gaussian kernel ``(size, size)``; its size covers three standard deviations unless it is given.

    >>> gaussian_kernel(1.0).shape
    torch.Size([7, 7])
    """
    if not sigma > 0:
        raise ValueError(f"the standard deviation of a blur should be positive; got {sigma!r}")
    size = 2 * max(1, round(3 * sigma)) + 1 if size is None else size
    line = torch.exp(-((torch.arange(size) - size // 2) ** 2) / (2 * sigma**2))
    kernel = line[:, None] * line
    return kernel / kernel.sum()


class BlurMap(LinearMap):
    """Correlation with a kernel ``(k1, k2)``, channel by channel."""

    def __init__(self, kernel: Tensor, boundary: str) -> None:
        self.kernel = kernel
        self.boundary = boundary
        self.padding = (kernel.shape[0] // 2, kernel.shape[1] // 2)

    def __call__(self, v: Tensor) -> Tensor:
        return self._correlated(v, self.kernel, (0, 0) if self.boundary == "valid" else self.padding)

    def adjoint(self, u: Tensor) -> Tensor:
        whole = (2 * self.padding[0], 2 * self.padding[1]) if self.boundary == "valid" else self.padding
        return self._correlated(u, self.kernel.flip(0, 1), whole)

    def _correlated(self, v: Tensor, kernel: Tensor, padding: tuple[int, int]) -> Tensor:
        if v.ndim != 4:
            raise wrong_shape("Blur", "(B, c, h, w)", v)
        c = v.shape[1]
        weight = kernel.to(v.dtype).expand(c, 1, -1, -1)
        if self.boundary != "circular":
            return F.conv2d(v, weight, padding=padding, groups=c)
        if any(size < k for size, k in zip(v.shape[2:], kernel.shape, strict=True)):
            raise ValueError(
                f"a circular blur needs images of at least {tuple(kernel.shape)} pixels; got {tuple(v.shape)}"
            )
        rows, columns = padding
        return F.conv2d(F.pad(v, (columns, columns, rows, rows), mode="circular"), weight, groups=c)


class Blur(Operator):
    """Correlation of every channel with a fixed kernel.

    Args:
        kernel: ``(k1, k2)`` with odd sizes, or a number: the standard deviation of a Gaussian in pixels.
        boundary: what lies outside the image: ``"zeros"``, or the image again, ``"circular"``; both keep its size.
            ``"valid"`` asks nothing outside: the result is smaller by the size of the kernel less one.

    >>> A = Blur(1.5)
    >>> A(torch.ones(1, 1, 21, 21))[0, 0, 10, 10].item()  # doctest: +ELLIPSIS
    1.0...
    """

    kernel: Tensor

    def __init__(self, kernel: Tensor | float, boundary: str = "zeros") -> None:
        super().__init__()
        kernel = kernel if isinstance(kernel, Tensor) else gaussian_kernel(float(kernel))
        if kernel.ndim != 2 or any(size % 2 == 0 for size in kernel.shape):
            raise ValueError(f"Blur.kernel should be a matrix with odd sizes; got shape {tuple(kernel.shape)}")
        if boundary not in _BOUNDARIES:
            raise ValueError(f"Blur.boundary should be one of {', '.join(_BOUNDARIES)}; got {boundary!r}")
        self.boundary = boundary
        self.register_buffer("kernel", kernel.detach().clone())

    def prepare(self) -> BlurMap:
        return BlurMap(self.kernel, self.boundary)

    def norm(self) -> Tensor:
        with torch.no_grad():
            return kernel_norm(self.kernel[None, None], fine=True)

    def extra_repr(self) -> str:
        """Size and boundary."""
        return f"kernel of {tuple(self.kernel.shape)}, boundary={self.boundary!r}"
