"""Measurement operators for images: blur, missing pixels, downsampling."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from opteq.common.validate import check_choice, check_positive, check_tensor, check_whole
from opteq.operators.base import LinearMap, Operator, wrong_shape
from opteq.operators.spectral.bound import normalise
from opteq.operators.spectral.norms import kernel_norm


def gaussian_kernel(sigma: float, size: int | None = None) -> Tensor:
    """A normalised Gaussian kernel ``(size, size)``; its size covers three standard deviations unless it is given.

    >>> gaussian_kernel(1.0).shape
    torch.Size([7, 7])
    """
    check_positive("the standard deviation of a blur", sigma)
    size = 2 * max(1, round(3 * sigma)) + 1 if size is None else check_whole("size", size)
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
        return self._correlate(v, self.kernel, (0, 0) if self.boundary == "valid" else self.padding)

    def adjoint(self, u: Tensor) -> Tensor:
        whole = (2 * self.padding[0], 2 * self.padding[1]) if self.boundary == "valid" else self.padding
        return self._correlate(u, self.kernel.flip(0, 1), whole)

    def _correlate(self, v: Tensor, kernel: Tensor, padding: tuple[int, int]) -> Tensor:
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
        boundary: the values outside the image: ``"zeros"``, or ``"circular"`` for the image again; both keep its size.
            ``"valid"`` uses no values outside, so the result is smaller by the size of the kernel less one.

    >>> A = Blur(1.5)
    >>> A(torch.ones(1, 1, 21, 21))[0, 0, 10, 10].item()  # doctest: +ELLIPSIS
    1.0...
    """

    kernel: Tensor

    def __init__(self, kernel: Tensor | float, boundary: str = "zeros") -> None:
        super().__init__()
        kernel = check_tensor("Blur.kernel", kernel) if isinstance(kernel, Tensor) else gaussian_kernel(kernel)
        if kernel.ndim != 2 or any(size % 2 == 0 for size in kernel.shape):
            raise ValueError(f"Blur.kernel should be a matrix with odd sizes; got shape {tuple(kernel.shape)}")
        self.boundary = check_choice("Blur.boundary", boundary, ("zeros", "circular", "valid"))
        self.keeps_shape = boundary != "valid"
        self.register_buffer("kernel", kernel.detach().clone())

    def prepare(self) -> BlurMap:
        return BlurMap(self.kernel, self.boundary)

    def norm(self) -> Tensor:
        with torch.no_grad():
            return kernel_norm(self.kernel[None, None], fine=True)

    def extra_repr(self) -> str:
        return f"kernel of {tuple(self.kernel.shape)}, boundary={self.boundary!r}"


class MaskMap(LinearMap):
    """Multiplication by fixed numbers."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __call__(self, v: Tensor) -> Tensor:
        masked = self.mask.to(v.dtype) * v
        if masked.shape != v.shape:
            raise wrong_shape("Mask", f"to which its mask {tuple(self.mask.shape)} is expanded", v)
        return masked

    def adjoint(self, u: Tensor) -> Tensor:
        return self(u)


class Mask(Operator):
    """Multiplication of every entry by a fixed number: 1 where it is measured, 0 where it is missing, or any weight.

    Args:
        mask: numbers that broadcast against images ``(B, c, h, w)``: ``(h, w)`` for instance.

    >>> Mask(torch.tensor([1.0, 0.0, 1.0]))(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[1., 0., 3.]])
    """

    mask: Tensor
    keeps_shape = True

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        check_tensor("Mask.mask", mask)
        dtype = mask.dtype if mask.is_floating_point() else torch.get_default_dtype()
        self.register_buffer("mask", mask.detach().to(dtype, copy=True))

    def prepare(self) -> MaskMap:
        return MaskMap(self.mask)

    def norm(self) -> Tensor:
        return self.mask.abs().amax()

    def least_singular_value(self) -> Tensor:
        """The smallest singular value: 0 where anything is hidden."""
        return self.mask.abs().amin()


class DownsampleMap(LinearMap):
    """Correlation with stride, channel by channel."""

    def __init__(self, kernel: Tensor, factor: int) -> None:
        self.kernel = kernel
        self.factor = factor
        # A kernel lies over its block where it can, and is centred on the block's first pixel elsewhere.
        over = [size >= factor and (size - factor) % 2 == 0 for size in kernel.shape]
        self.padding = tuple((k - (factor if whole else 1)) // 2 for k, whole in zip(kernel.shape, over, strict=True))

    def __call__(self, v: Tensor) -> Tensor:
        if v.ndim != 4 or any(size % self.factor for size in v.shape[2:]):
            raise wrong_shape("Downsample", f"(B, c, h, w) with sizes that are multiples of {self.factor}", v)
        c = v.shape[1]
        return F.conv2d(v, self._weight(v), stride=self.factor, padding=self.padding, groups=c)

    def adjoint(self, u: Tensor) -> Tensor:
        """Zeros are put between the pixels, then comes the transposed filter."""
        if u.ndim != 4:
            raise wrong_shape("the adjoint of Downsample", "(B, c, h, w)", u)
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
        self.factor = check_whole("factor", factor)
        blocks = torch.full((factor, factor), factor**-2.0)
        kernel = blocks if kernel is None else check_tensor("Downsample.kernel", kernel)
        fit = [size % 2 == 1 or (factor % 2 == 0 and size >= factor) for size in kernel.shape]
        if kernel.ndim != 2 or not all(fit):
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
                unit, magnitude = normalise(self.kernel)
                return unit.square().sum().sqrt() * magnitude
            # Of the phases that the stride takes apart, each is a convolution of its own; rows of A side by side.
            f = self.factor
            rows, columns = (-(-size // f) * f for size in self.kernel.shape)
            padded = F.pad(self.kernel, (0, columns - self.kernel.shape[1], 0, rows - self.kernel.shape[0]))
            phases = padded.reshape(rows // f, f, columns // f, f).permute(1, 3, 0, 2).reshape(1, f * f, rows // f, -1)
            return kernel_norm(phases, fine=True)

    def extra_repr(self) -> str:
        return f"factor={self.factor}, kernel of {tuple(self.kernel.shape)}"
