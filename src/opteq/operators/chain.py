"""A chain of convolutions that acts as one: a bank of large filters from few parameters, with an exact spectrum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opteq.common.validate import check_flag, check_odd, check_whole
from opteq.operators.base import LinearMap, Operator, check_bound, initial_norm
from opteq.operators.conv import check_image
from opteq.operators.spectral.bound import low_precision_rounding, normalise
from opteq.operators.spectral.norms import kernel_norm
from opteq.states import Autocast, widest_dtype, working_dtype


class ChainMap(LinearMap):
    """Convolutions with prepared weights, one after the other, on an image that is extended by zeros once.

    Padding between the convolutions would make another map, which the composed kernel says nothing about: here
    ``A v`` is exactly the composed convolution of the image extended by zeros, at the positions of the image.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = tuple(weights)
        self.padding = tuple(sum(w.shape[dim] // 2 for w in weights) for dim in (2, 3))

    def __call__(self, v: Tensor) -> Tensor:
        check_image("the chain of convolutions", v, self.weights[0].shape[1])
        first, *rest = self.weights
        out = F.conv2d(v, first, padding=self.padding)
        for weight in rest:
            out = F.conv2d(out, weight)
        return out

    def adjoint(self, u: Tensor) -> Tensor:
        """The transposed convolutions in the opposite order; what falls outside the image is cut off."""
        check_image("the adjoint of the chain", u, self.weights[-1].shape[0])
        first, *rest = self.weights
        out = u
        for weight in reversed(rest):
            out = F.conv_transpose2d(out, weight)
        return F.conv_transpose2d(out, first, padding=self.padding)

    def composed_kernel(self) -> Tensor:
        """The kernel ``(m, c, K1, K2)`` of the one convolution that the chain is, in float64 where the device has it.

        A product of float32 may be rounded to fewer digits, by autocast or TensorFloat-32, and overflow.
        """
        wide = ChainMap([weight.to(widest_dtype(weight)) for weight in self.weights])
        c = self.weights[0].shape[1]
        impulse = wide.weights[0].new_zeros(c, c, *(2 * p + 1 for p in self.padding))
        impulse[range(c), range(c), self.padding[0], self.padding[1]] = 1
        with Autocast.current(impulse.device).off():
            return wide(impulse).flip(2, 3).transpose(0, 1).contiguous()


class ConvChain(Operator):
    """Convolutions ``(B, c_0, h, w) -> (B, c_k, h, w)`` that act as one with a large kernel.

    Three convolutions of size 5 make filters of size 13 from a fraction of their parameters. The image is extended by
    zeros once, before the first, so that the norm is that of the composed kernel.

    Args:
        channels: numbers of channels, first that of the input.
        kernel_size: odd size of every kernel.
        zero_mean: whether constant images give zero in the interior: the mean of every kernel of the first
            convolution is taken off.
        bound: largest spectral norm allowed, or None for none.

    >>> A = ConvChain((1, 4, 8, 16), kernel_size=5, bound=1.0)
    >>> A(torch.zeros(2, 1, 20, 20)).shape, A.adjoint(torch.zeros(2, 16, 20, 20)).shape
    (torch.Size([2, 16, 20, 20]), torch.Size([2, 1, 20, 20]))
    """

    def __init__(
        self, channels: Sequence[int], kernel_size: int = 5, zero_mean: bool = True, bound: float | None = None
    ) -> None:
        super().__init__()
        if not isinstance(channels, Sequence) or len(channels) < 2:
            raise ValueError(f"ConvChain.channels should name at least input and output channels; got {channels!r}")
        self.channels = tuple(check_whole("channels", c) for c in channels)
        self.kernel_size = check_odd("kernel_size", kernel_size)
        self.zero_mean = check_flag("zero_mean", zero_mean)
        self.bound = check_bound(bound)
        pairs = zip(self.channels[:-1], self.channels[1:], strict=True)
        self.weights = nn.ParameterList(torch.empty(m, c, kernel_size, kernel_size) for c, m in pairs)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights again and scale them to the initial norm."""
        for weight in self.weights:
            nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
        self.weights[-1].mul_(initial_norm(self.bound) / self._norm(ChainMap(self._centred_weights())))

    def prepare(self) -> ChainMap:
        weights = self._centred_weights()
        if self.bound is not None:
            last, norm = weights[-1], self._norm(ChainMap(weights))
            if growth := low_precision_rounding(last.dtype):
                norm = norm + growth * self._norm(ChainMap([weight.abs() for weight in weights]))
            scale = self.bound / norm.clamp_min(self.bound)
            weights[-1] = (last.to(scale.dtype) * scale).to(last.dtype)
        chain = ChainMap(weights)
        # One convolution with the composed kernel where that takes fewer multiplications, as with one input channel; on
        # a CPU its adjoint, from many channels to one, takes four times as long as that of the chain.
        size = [2 * p + 1 for p in chain.padding]
        together = self.channels[0] * self.channels[-1] * size[0] * size[1]
        if weights[0].is_cpu or together > sum(weight.numel() for weight in weights):
            return chain
        return ChainMap([chain.composed_kernel().to(weights[0].dtype)])

    def norm(self) -> Tensor:
        with torch.no_grad():
            return self._norm(self.prepare()).to(working_dtype(self.weights[0].dtype))

    def _centred_weights(self) -> list[Tensor]:
        first, *rest = self.weights
        return [first - first.mean(dim=(2, 3), keepdim=True) if self.zero_mean else first, *rest]

    def _norm(self, chain: ChainMap) -> Tensor:
        """The norm, in float64 where the device has it."""
        kernel, magnitude = normalise(chain.composed_kernel())
        kernel = kernel.to(working_dtype(chain.weights[0].dtype))
        if kernel.shape[1] > 1:
            return kernel_norm(kernel) * magnitude
        ones = kernel.new_ones(1, kernel.shape[0])
        return largest_response(response_powers(kernel), ones, kernel)[0].sqrt() * magnitude

    def extra_repr(self) -> str:
        return f"channels={self.channels}, kernel_size={self.kernel_size}, bound={self.bound}"


def response_powers(kernel: Tensor, grid: int = 128) -> Tensor:
    """``|k_c(w)|^2`` of filters ``(m, 1, K1, K2)`` at frequencies of a grid: ``(m, grid * (grid / 2 + 1))``.

    Frequencies of the other half plane have the same powers.
    """
    if kernel.shape[1] != 1:
        raise ValueError(f"filters of one input channel have a power per frequency; got {kernel.shape[1]} channels")
    wide = kernel[:, 0].to(torch.promote_types(kernel.dtype, torch.float32))
    spectrum = torch.fft.rfft2(wide, s=(grid, grid))
    powers: Tensor = spectrum.real.square() + spectrum.imag.square()
    return powers.flatten(1)


def largest_response(powers: Tensor, weights: Tensor, kernel: Tensor, grid: int = 128) -> Tensor:
    """An upper bound of ``sup_w sum_c a_c |k_c(w)|^2`` over all frequencies, for non-negative weights ``(B, m)``.

    That is the largest eigenvalue of ``K' diag(a) K``, on images of every size. The sum is a non-negative
    trigonometric polynomial of degree ``d = K1 - 1`` and ``K2 - 1``. Near the place of its maximum M such a one is at
    least ``M cos(d x / 2)^2`` along each axis, and no frequency is further than ``pi / grid`` from the grid.
    """
    if max(kernel.shape[2:]) > grid // 2:
        raise ValueError(f"a grid of {grid} frequencies is too coarse for kernels of size {tuple(kernel.shape[2:])}")
    missed: float = math.prod(math.cos((size - 1) * math.pi / (2 * grid)) ** 2 for size in kernel.shape[2:])
    with Autocast.current(powers.device).off():
        largest: Tensor = (weights.to(powers.dtype) @ powers).amax(dim=1)
    slack = 2**-10 if powers.dtype == torch.float32 else 1e-9  # for products in TensorFloat-32
    bound: Tensor = largest * ((1 + slack) / missed)
    return bound
