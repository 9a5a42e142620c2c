"""Convolutional feed-forward networks written as Deep OptEq: Lemma 1 and 2 with convolutions for matrices."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from opteq.operators import Conv2d, Operator, kernel_norm
from opteq.penalties import Penalty
from opteq.problems.deep.feedforward import activation_of, check_homogeneous

Layers = list[tuple[Operator, nn.Module | None]]


def by_conv_slots(network: nn.Sequential, nonexpansive: bool) -> tuple[Layers, nn.Conv2d, Penalty]:
    """Lemma 1 and the alpha = 1 case of Lemma 2 for Conv2d, activation, ..., Conv2d.

    ``W_k W_{k-1}' = A_k`` as for matrices (see :func:`~opteq.problems.deep.feedforward.by_slots`): channels take the
    place of coordinates, a kernel that is 1 at its centre that of the identity, and a flipped kernel that of a
    transpose. With stride 1 and zero padding that keeps the size, each product has a factor that moves nothing, so
    that borders are right as well.

    Returns:
        The layers, the read-out and the activation.
    """
    convolutions, activation = _read(network)
    hidden, out = convolutions[:-1], convolutions[-1]
    sizes = [conv.out_channels for conv in hidden]
    width = max([sizes[0], *(a + b for a, b in pairwise(sizes))])
    side = [max(conv.kernel_size[axis] for conv in convolutions) for axis in (0, 1)]
    like = hidden[0].weight.detach()

    def slot(k: int) -> slice:
        return slice(0, sizes[k]) if k % 2 == 0 else slice(width - sizes[k], width)

    kernels: list[Tensor] = []
    for k, conv in enumerate(hidden):
        W = like.new_zeros(sizes[k], width, *side)
        W[:, slot(k), side[0] // 2, side[1] // 2] = torch.eye(sizes[k], dtype=like.dtype, device=like.device)
        if k > 0:
            # The transpose of a convolution has the kernel with channels exchanged and both axes flipped.
            W[:, slot(k - 1)] = _enlarged(conv.weight.detach(), side) - kernels[-1][:, slot(k)].transpose(0, 1).flip(
                2, 3
            )
        kernels.append(W)
    shrink = 1.0
    if nonexpansive:
        check_homogeneous(activation)
        shrink = max(1.0, *(float(kernel_norm(W, fine=True)) for W in kernels))
    layers: Layers = [(_operator(like.new_zeros(1, width, *side)), None)]
    for k, (conv, W) in enumerate(zip(hidden, kernels, strict=True)):
        scale = shrink ** (2 * (k + 1))
        first = hidden[0].weight.detach()
        weight = first if k == 0 else first.new_zeros(sizes[k], first.shape[1], 1, 1)
        layers.append((_operator(W / shrink), _convolution(weight / scale, _bias(conv) / scale)))
    read = like.new_zeros(out.out_channels, width, *out.kernel_size)
    read[:, slot(len(sizes) - 1)] = out.weight.detach()
    return layers, _convolution(read * shrink ** (2 * len(sizes) + 1), _bias(out)), activation


def _read(network: nn.Sequential) -> tuple[list[nn.Conv2d], Penalty]:
    modules = list(network)
    convolutions = [module for module in modules[0::2] if isinstance(module, nn.Conv2d)]
    if len(modules) < 3 or len(modules) % 2 == 0 or len(convolutions) < len(modules[0::2]):
        kinds = ", ".join(type(module).__name__ for module in modules)
        raise ValueError(f"from_feedforward takes Conv2d, activation, ..., Conv2d; got {kinds}")
    for conv in convolutions:
        kept = conv.padding == "same" or conv.padding == tuple((k - 1) / 2 for k in conv.kernel_size)
        plain = conv.stride == (1, 1) and conv.dilation == (1, 1) and conv.groups == 1 and conv.padding_mode == "zeros"
        if not kept or not plain or any(k % 2 == 0 for k in conv.kernel_size):
            raise ValueError(
                "from_feedforward takes convolutions of stride 1 with odd kernels, no groups or dilation, and zero "
                f"padding that keeps the size of images; got {conv}"
            )
    return convolutions, activation_of(modules[1::2])


def _enlarged(kernel: Tensor, side: list[int]) -> Tensor:
    """The same kernel amid zeros."""
    down, right = ((whole - own) // 2 for whole, own in zip(side, kernel.shape[2:], strict=True))
    return nn.functional.pad(kernel, (right, right, down, down))


def _bias(conv: nn.Conv2d) -> Tensor:
    return conv.weight.new_zeros(conv.out_channels) if conv.bias is None else conv.bias.detach()


def _operator(kernel: Tensor) -> Conv2d:
    layer = Conv2d(kernel.shape[1], kernel.shape[0], (kernel.shape[2], kernel.shape[3])).to(kernel)
    layer.weight.data.copy_(kernel)
    return layer


def _convolution(kernel: Tensor, bias: Tensor) -> nn.Conv2d:
    size = (kernel.shape[2], kernel.shape[3])
    layer = nn.Conv2d(kernel.shape[1], kernel.shape[0], size, padding=(size[0] // 2, size[1] // 2)).to(kernel)
    layer.weight.data.copy_(kernel)
    assert layer.bias is not None
    layer.bias.data.copy_(bias)
    return layer
