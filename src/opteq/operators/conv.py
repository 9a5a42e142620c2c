"""Convolutions as operators: full, and separable into a filter per channel and a mixing of channels."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opteq.common.validate import check_odd, check_whole
from opteq.operators.base import LinearMap, Operator, check_bound, initial_norm, wrong_shape
from opteq.operators.spectral.bound import bounded
from opteq.operators.spectral.norms import certified_norm, kernel_norm


class ConvMap(LinearMap):
    """Convolution with a prepared weight ``(m, c, k1, k2)``, stride 1 and zero padding that keeps the image's size."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.padding = (weight.shape[2] // 2, weight.shape[3] // 2)

    def __call__(self, v: Tensor) -> Tensor:
        check_image("the convolution", v, self.weight.shape[1])
        return F.conv2d(v, self.weight, padding=self.padding)

    def adjoint(self, u: Tensor) -> Tensor:
        """Transposed convolution with the same weight: for stride 1 and odd kernels the exact adjoint."""
        check_image("the adjoint of the convolution", u, self.weight.shape[0])
        return F.conv_transpose2d(u, self.weight, padding=self.padding)


class SeparableConvMap(LinearMap):
    """A filter per channel, ``depthwise (c, 1, k1, k2)``, then a mixing of channels, ``pointwise (m, c, 1, 1)``."""

    def __init__(self, depthwise: Tensor, pointwise: Tensor) -> None:
        self.depthwise = depthwise
        self.pointwise = pointwise
        self.padding = (depthwise.shape[2] // 2, depthwise.shape[3] // 2)

    def __call__(self, v: Tensor) -> Tensor:
        channels = self.depthwise.shape[0]
        check_image("the separable convolution", v, channels)
        return F.conv2d(F.conv2d(v, self.depthwise, padding=self.padding, groups=channels), self.pointwise)

    def adjoint(self, u: Tensor) -> Tensor:
        check_image("the adjoint of the separable convolution", u, self.pointwise.shape[0])
        mixed = F.conv_transpose2d(u, self.pointwise)
        return F.conv_transpose2d(mixed, self.depthwise, padding=self.padding, groups=self.depthwise.shape[0])


class _Convolution(Operator):
    """The base class of both convolutions: sizes, and the initial norm."""

    other_names = {"in_channels": "c", "out_channels": "m"}  # noqa: RUF012  # read by the metaclass

    def __init__(self, c: int, m: int, kernel_size: int | tuple[int, int], bound: float | None = None) -> None:
        super().__init__()
        self.in_channels = check_whole("c", c)
        self.out_channels = check_whole("m", m)
        self.kernel_size = _odd_pair(kernel_size)
        self.bound = check_bound(bound)
        self.keeps_shape = c == m
        self._make_parameters(c, m)
        self.reset_parameters()

    @abstractmethod
    def _make_parameters(self, c: int, m: int) -> None:
        """Uninitialised parameters."""

    @abstractmethod
    def reset_parameters(self) -> None:
        """Draw the parameters again and scale them to the initial norm."""

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, bound={self.bound}"


class Conv2d(_Convolution):
    """A convolution ``(B, c, h, w) -> (B, m, h, w)`` of stride 1 with zero padding.

    With ``bound=b`` the norm never exceeds ``b``, for images of every size. Where the bound acts, the norm on large
    images lies above 0.93 ``b``, typically at 0.96 ``b``, if input or output has at most 128 channels; and above 0.91
    ``b``, typically at 0.93 ``b``, if both have more (:mod:`opteq.operators.spectral.norms` explains why).

    Args:
        c: channels of the input.
        m: channels of the output.
        kernel_size: odd size of the kernel, or a pair (height, width) of odd sizes.
        bound: largest spectral norm allowed, or None for none.

    ``weight`` has the shape ``(m, c, height, width)`` of ``nn.Conv2d``. It starts normal, scaled to a norm just
    within ``bound`` (0.9 without one).

    >>> W = Conv2d(3, 8, kernel_size=3, bound=0.95)
    >>> W.adjoint(W(torch.randn(1, 3, 7, 7))).shape
    torch.Size([1, 3, 7, 7])
    """

    weight: nn.Parameter

    def _make_parameters(self, c: int, m: int) -> None:
        self.weight = nn.Parameter(torch.empty(m, c, *self.kernel_size))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.weight.is_meta:
            return
        nn.init.normal_(self.weight, std=self.weight[0].numel() ** -0.5)
        self.weight.mul_(initial_norm(self.bound) / kernel_norm(self.weight))

    def prepare(self) -> ConvMap:
        return ConvMap(bounded(self.weight, self.bound))

    def norm(self) -> Tensor:
        return certified_norm(self.prepare().weight, self.bound)


class SeparableConv2d(_Convolution):
    """A convolution whose kernel is ``K[m, c] = pointwise[m, c] * depthwise[c]``: fewer weights, fewer products.

    Shapes, options and bound are those of :class:`Conv2d`. The bound holds for the composed kernel (bounding the two
    parts one by one would waste some of it) and scales the pointwise part.

    ``depthwise`` is ``(c, 1, height, width)`` and ``pointwise`` is ``(m, c, 1, 1)``.

    >>> W = SeparableConv2d(4, 6, kernel_size=(3, 5), bound=0.95)
    >>> W(torch.randn(2, 4, 8, 8)).shape
    torch.Size([2, 6, 8, 8])
    """

    depthwise: nn.Parameter
    pointwise: nn.Parameter

    def _make_parameters(self, c: int, m: int) -> None:
        self.depthwise = nn.Parameter(torch.empty(c, 1, *self.kernel_size))
        self.pointwise = nn.Parameter(torch.empty(m, c, 1, 1))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.pointwise.is_meta:
            return
        nn.init.normal_(self.depthwise, std=self.depthwise[0].numel() ** -0.5)
        nn.init.normal_(self.pointwise, std=self.in_channels**-0.5)
        composed = self.pointwise * self.depthwise.transpose(0, 1)
        self.pointwise.mul_(initial_norm(self.bound) / kernel_norm(composed))

    def prepare(self) -> SeparableConvMap:
        pointwise = bounded(self.pointwise, self.bound, self.depthwise.transpose(0, 1))
        return SeparableConvMap(self.depthwise, pointwise)

    def norm(self) -> Tensor:
        linear = self.prepare()
        return certified_norm(linear.pointwise, self.bound, linear.depthwise.transpose(0, 1))


def _odd_pair(kernel_size: object) -> tuple[int, int]:
    pair = kernel_size if isinstance(kernel_size, (tuple, list)) else (kernel_size, kernel_size)
    if len(pair) != 2:
        raise ValueError(f"kernel_size should be an odd integer or a pair of them; got {kernel_size!r}")
    return check_odd("kernel_size", pair[0]), check_odd("kernel_size", pair[1])


def check_image(who: str, v: Tensor, channels: int) -> None:
    """Raise unless ``v`` is a batch of images with so many channels."""
    if v.ndim != 4 or v.shape[1] != channels:
        raise wrong_shape(who, f"(batch, {channels}, height, width)", v)
