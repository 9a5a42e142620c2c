"""Feed-forward networks, fully connected or convolutional, written as Deep OptEq: exact to rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from opteq import penalties
from opteq.operators import Conv2d, Dense, Operator, kernel_norm
from opteq.penalties import Penalty

Layers = list[tuple[Operator, nn.Module | None]]

_ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid", nn.Softplus: "softplus", nn.Softsign: "softsign",
    nn.Hardtanh: "hardtanh", nn.Identity: "identity", nn.GELU: "gelu", nn.SiLU: "silu", nn.Mish: "mish",
    nn.Hardswish: "hardswish",
}  # fmt: skip
_STANDARD: tuple[tuple[type[nn.Module], str, float], ...] = (
    (nn.Softplus, "beta", 1),
    (nn.Softplus, "threshold", 20),
    (nn.Hardtanh, "min_val", -1),
    (nn.Hardtanh, "max_val", 1),
)
_HOMOGENEOUS = (penalties.ReLU, penalties.LeakyReLU, penalties.Identity)


@dataclass(frozen=True)
class FeedForward:
    """``h_k = sigma(A_k h_{k-1} + b_k)`` with ``h_0`` the input, and the output ``A_out h_K + b_out``.

    An A is a matrix ``(n, m)``, or the kernel ``(n, m, k1, k2)`` of a convolution.
    """

    weights: list[Tensor]
    biases: list[Tensor]
    out_weight: Tensor
    out_bias: Tensor
    activation: Penalty

    @property
    def sizes(self) -> list[int]:
        """Widths of the hidden layers."""
        return [weight.shape[0] for weight in self.weights]


def read_network(network: nn.Sequential) -> FeedForward:
    """The weights of a sequence Linear, activation, ..., Linear; or of convolutions in place of linear layers."""
    if not isinstance(network, nn.Sequential):
        raise TypeError(f"from_feedforward takes an nn.Sequential; got {type(network).__name__}")
    modules = list(network)
    kind: type[nn.Linear | nn.Conv2d] = nn.Conv2d if modules and isinstance(modules[0], nn.Conv2d) else nn.Linear
    layers = [module for module in modules[0::2] if isinstance(module, kind)]
    if len(modules) < 3 or len(modules) % 2 == 0 or len(layers) < len(modules[0::2]):
        kinds = ", ".join(type(module).__name__ for module in modules)
        raise ValueError(f"from_feedforward takes {kind.__name__}, activation, ..., {kind.__name__}; got {kinds}")
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            _check_convolution(layer)
    activations = {_penalty(module) for module in modules[1::2]}
    if len(activations) > 1:
        raise ValueError(f"all activations should be the same; got {sorted(map(str, activations))}")
    weights = [layer.weight.detach() for layer in layers]
    biases = [
        layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias.detach() for layer in layers
    ]
    return FeedForward(weights[:-1], biases[:-1], weights[-1], biases[-1], activations.pop())


def _check_convolution(conv: nn.Conv2d) -> None:
    kept = conv.padding == "same" or conv.padding == tuple((k - 1) / 2 for k in conv.kernel_size)
    plain = conv.stride == (1, 1) and conv.dilation == (1, 1) and conv.groups == 1 and conv.padding_mode == "zeros"
    if not kept or not plain or any(k % 2 == 0 for k in conv.kernel_size):
        raise ValueError(
            "from_feedforward takes convolutions of stride 1 with odd kernels, no groups or dilation, and zero "
            f"padding that keeps the size of images; got {conv}"
        )


def by_slots(network: FeedForward, nonexpansive: bool) -> tuple[Layers, nn.Module]:
    """Lemma 1 and the alpha = 1 case of Lemma 2: ``W_k W_{k-1}' = A_k``, and a leading zero layer.

    Even layers keep their values in the first coordinates (channels) of z, odd ones in the last, so that neighbours
    never overlap. The zero layer forgets the previous sweep: the map is constant, its fixed point reached at once.

    For convolutions a kernel that is 1 at its centre takes the place of the identity, and a flipped kernel that of a
    transpose. With stride 1 and zero padding that keeps the size, each product has a factor that moves nothing, so
    that borders are right as well.
    """
    sizes = network.sizes
    width = max([sizes[0], *(a + b for a, b in pairwise(sizes))])
    taps = [max(sides) for sides in zip(*(A.shape[2:] for A in (*network.weights, network.out_weight)), strict=True)]
    centre = tuple(size // 2 for size in taps)

    def slot(k: int) -> slice:
        return slice(0, sizes[k]) if k % 2 == 0 else slice(width - sizes[k], width)

    kernels: list[Tensor] = []
    for k, A in enumerate(network.weights):
        W = A.new_zeros(sizes[k], width, *taps)
        own = (slice(None), slot(k), *centre)
        W[own] = torch.eye(sizes[k], dtype=A.dtype, device=A.device)
        if k > 0:
            # The transpose of a convolution has the kernel with channels exchanged and both axes flipped.
            transposed = kernels[-1][:, slot(k)].transpose(0, 1).flip([*range(2, W.ndim)])
            W[:, slot(k - 1)] = _enlarged(A, taps) - transposed
        kernels.append(W)
    out = network.out_weight.new_zeros(network.out_weight.shape[0], width, *network.out_weight.shape[2:])
    out[:, slot(len(sizes) - 1)] = network.out_weight
    shrink = 1.0
    if nonexpansive:
        if not isinstance(network.activation, _HOMOGENEOUS):  # sigma(s t) = s sigma(t) for positive s
            raise ValueError(
                f"nonexpansive=True scales the layers, which {type(network.activation).__name__} does not allow; "
                "ReLU, LeakyReLU and Identity do"
            )
        shrink = max(1.0, *(float(kernel_norm(W, fine=True)) for W in kernels))
    layers: Layers = [(_operator(out.new_zeros(1, width, *taps)), None)]
    for k, W in enumerate(kernels):
        scale = shrink ** (2 * (k + 1))
        first = network.weights[0]
        weight = first if k == 0 else first.new_zeros(sizes[k], first.shape[1], *[1] * len(taps))
        layers.append((_operator(W / shrink), _module(weight / scale, network.biases[k] / scale)))
    return layers, _module(out * shrink ** (2 * len(sizes) + 1), network.out_bias)


def by_gram(network: FeedForward, alpha: float) -> tuple[Layers, nn.Module]:
    """Exact for 0 < alpha < 1: a sweep of idle layers and the hidden layers, twice, with ``W_i W_j'`` prescribed.

    With ``q = 1 - alpha``, what a layer hears of its predecessor adds up to ``A_l h`` over the two copies, and what it
    hears of itself and of later layers cancels between them. The blocks that do so are ``[[1, -e], [-e, 1]] x (F + s)``
    where F holds ``A_l / alpha`` beside its diagonal and e is the power of q that lies between the copies; they are
    positive definite for s above ``|F|``, and are factored into the W.

    That equilibrium needs no idle layers, but without them others may exist and solvers end there. An idle layer has
    W = 0 and only shrinks the state by q; with enough of them a sweep contracts, and the equilibrium is the only one.
    """
    sizes, count = network.sizes, len(network.sizes)
    place = [slice(a, b) for a, b in pairwise([0, *accumulate(sizes)])]
    like = network.weights[0]
    coupling = torch.zeros(sum(sizes), sum(sizes), dtype=torch.float64, device=like.device)
    for k in range(1, count):
        coupling[place[k], place[k - 1]] = network.weights[k].double() / alpha
        coupling[place[k - 1], place[k]] = network.weights[k].double().T / alpha
    reach = -float(torch.linalg.eigvalsh(coupling)[0])
    # Half as much again as is needed keeps the factor well conditioned, so that h can be read off z.
    self_weight = max(1.5 * reach, 0.5)
    root = torch.linalg.cholesky(coupling + self_weight * torch.eye(len(coupling)).to(coupling))
    idle = _idle_layers(count, alpha, network.activation.lipschitz * self_weight)
    echo = (1 - alpha) ** (idle + count)
    layers: Layers = []
    for first, second in ((1.0, 0.0), (-echo, math.sqrt(1 - echo**2))):
        layers += [(_operator(like.new_zeros(1, 2 * len(root))), None) for _ in range(idle)]
        for k in range(count):
            W = torch.cat([first * root[place[k]], second * root[place[k]]], dim=1)
            weight = like if k == 0 else like.new_zeros(sizes[k], like.shape[1])
            layers.append((_operator(W.to(like)), _module(weight, network.biases[k])))
    # The last coordinates of z are alpha / sqrt(1 - e^2) R'h for the last hidden h, with R the factor's last block.
    corner = root[place[-1], place[-1]]
    out = torch.linalg.solve_triangular(corner.T, network.out_weight.double(), upper=True, left=False)
    read = like.new_zeros(out.shape[0], 2 * len(root))
    read[:, -sizes[-1] :] = out * math.sqrt(1 - echo**2) / alpha
    return layers, _module(read, network.out_bias)


def _idle_layers(count: int, alpha: float, stretch: float) -> int:
    """How many layers with W = 0 halve what one copy of the hidden layers may magnify.

    A hidden layer has the Lipschitz constant ``1 - alpha + alpha L |W|^2``, an idle one ``1 - alpha``.
    """
    growth = count * math.log(1 - alpha + alpha * stretch) + math.log(2)
    return max(0, math.ceil(growth / -math.log1p(-alpha)))


def _penalty(module: nn.Module) -> Penalty:
    if isinstance(module, nn.LeakyReLU):
        return penalties.LeakyReLU(module.negative_slope)
    if isinstance(module, nn.ELU):
        return penalties.ELU(module.alpha)
    if isinstance(module, nn.Softshrink):
        return penalties.SoftThreshold(module.lambd)
    for kind, field, usual in _STANDARD:
        if isinstance(module, kind) and getattr(module, field) != usual:
            raise ValueError(f"{kind.__name__} is known with {field}={usual}; got {field}={getattr(module, field)}")
    name = _ACTIVATIONS.get(type(module))
    if name is None:
        raise ValueError(f"no penalty belongs to {type(module).__name__}; known: {', '.join(penalties.names())}")
    return penalties.get(name)


def _enlarged(kernel: Tensor, taps: list[int]) -> Tensor:
    """The same kernel amid zeros; a matrix as it is."""
    margins = [(whole - own) // 2 for whole, own in zip(taps, kernel.shape[2:], strict=True)]
    return nn.functional.pad(kernel, [margin for margin in reversed(margins) for _ in range(2)])


def _operator(weight: Tensor) -> Dense | Conv2d:
    outputs, inputs, *taps = weight.shape
    layer = Conv2d(inputs, outputs, (taps[0], taps[1])) if taps else Dense(inputs, outputs)
    layer = layer.to(weight)
    layer.weight.data.copy_(weight)
    return layer


def _module(weight: Tensor, bias: Tensor) -> nn.Linear | nn.Conv2d:
    outputs, inputs, *taps = weight.shape
    layer: nn.Linear | nn.Conv2d = nn.Linear(inputs, outputs)
    if taps:
        layer = nn.Conv2d(inputs, outputs, (taps[0], taps[1]), padding=(taps[0] // 2, taps[1] // 2))
    layer = layer.to(weight)
    layer.weight.data.copy_(weight)
    assert layer.bias is not None
    layer.bias.data.copy_(bias)
    return layer
