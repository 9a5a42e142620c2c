"""Feed-forward networks written as Deep OptEq: two constructions, exact to rounding."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from opteq import penalties
from opteq.operators import Dense
from opteq.penalties import Penalty

Layers = list[tuple[Dense, nn.Module | None]]

_ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    nn.Softplus: "softplus",
    nn.Softsign: "softsign",
    nn.Hardtanh: "hardtanh",
    nn.Identity: "identity",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Mish: "mish",
}
_HOMOGENEOUS = (penalties.ReLU, penalties.LeakyReLU, penalties.Identity)


@dataclass(frozen=True)
class FeedForward:
    """``h_k = sigma(A_k h_{k-1} + b_k)`` with ``h_0`` the input, and the output ``A_out h_K + b_out``."""

    weights: list[Tensor]
    biases: list[Tensor]
    out_weight: Tensor
    out_bias: Tensor
    activation: Penalty

    @property
    def sizes(self) -> list[int]:
        """Widths of the hidden layers."""
        return [weight.shape[0] for weight in self.weights]


def read_mlp(mlp: nn.Sequential) -> FeedForward:
    """The matrices of a sequence Linear, activation, Linear, activation, ..., Linear."""
    if not isinstance(mlp, nn.Sequential):
        raise TypeError(f"from_feedforward takes an nn.Sequential; got {type(mlp).__name__}")
    modules = list(mlp)
    linears, activations = modules[0::2], modules[1::2]
    if len(modules) < 3 or len(modules) % 2 == 0 or not all(isinstance(m, nn.Linear) for m in linears):
        kinds = ", ".join(type(m).__name__ for m in modules)
        raise ValueError(f"from_feedforward takes Linear, activation, ..., Linear; got {kinds}")
    shared = {_penalty(module) for module in activations}
    if len(shared) > 1:
        raise ValueError(f"all activations should be the same; got {sorted(map(str, shared))}")
    weights = [m.weight.detach() for m in linears if isinstance(m, nn.Linear)]
    biases = [
        m.bias.detach() if m.bias is not None else m.weight.new_zeros(m.out_features)
        for m in linears
        if isinstance(m, nn.Linear)
    ]
    return FeedForward(weights[:-1], biases[:-1], weights[-1], biases[-1], shared.pop())


def by_slots(network: FeedForward, nonexpansive: bool) -> tuple[Layers, nn.Linear]:
    """Lemma 1 and the alpha = 1 case of Lemma 2: ``W_k W_{k-1}' = A_k``, and a leading zero layer.

    Even layers keep their values in the first coordinates of z, odd ones in the last, so that neighbours never
    overlap. The zero layer forgets the previous sweep: the map is constant and its fixed point is reached at once.
    """
    sizes = network.sizes
    width = max([sizes[0], *(a + b for a, b in pairwise(sizes))])

    def slot(k: int) -> slice:
        return slice(0, sizes[k]) if k % 2 == 0 else slice(width - sizes[k], width)

    matrices: list[Tensor] = []
    for k, A in enumerate(network.weights):
        W = A.new_zeros(sizes[k], width)
        W[:, slot(k)] = torch.eye(sizes[k], dtype=A.dtype, device=A.device)
        if k > 0:
            W[:, slot(k - 1)] = A - matrices[-1][:, slot(k)].T
        matrices.append(W)
    out = network.out_weight.new_zeros(network.out_weight.shape[0], width)
    out[:, slot(len(sizes) - 1)] = network.out_weight
    shrink = _shrink(matrices, network.activation) if nonexpansive else 1.0
    layers: Layers = [(_dense(out.new_zeros(1, width)), None)]
    for k, W in enumerate(matrices):
        scale = shrink ** (2 * (k + 1))
        weight = network.weights[0] if k == 0 else out.new_zeros(sizes[k], network.weights[0].shape[1])
        layers.append((_dense(W / shrink), _linear(weight / scale, network.biases[k] / scale)))
    return layers, _linear(out * shrink ** (2 * len(sizes) + 1), network.out_bias)


def by_gram(network: FeedForward, alpha: float) -> tuple[Layers, nn.Linear]:
    """Exact for 0 < alpha < 1: every hidden layer twice, with the Gram blocks ``W_i W_j'`` prescribed.

    With ``q = 1 - alpha`` and N hidden layers, what a layer hears of its predecessor adds up to ``A_l h``, and what it
    hears of itself and of later layers cancels between the two copies. The blocks are then factored into the W.
    """
    sizes, count = network.sizes, len(network.sizes)
    decay = (1 - alpha) ** count
    ends = torch.tensor([0, *sizes, *sizes]).cumsum(0).tolist()
    place = [slice(ends[i], ends[i + 1]) for i in range(2 * count)]
    like = network.weights[0]
    gram = like.new_zeros(ends[-1], ends[-1])

    def put(i: int, j: int, block: Tensor) -> None:
        gram[place[i], place[j]] = block
        gram[place[j], place[i]] = block.T

    for k in range(1, count):
        forward = network.weights[k] / alpha
        for copy in (0, count):
            put(k + copy, k - 1 + copy, forward)
            put(k + copy, k - 1 + (count - copy), -decay * forward)
    least = float(torch.linalg.eigvalsh(gram)[0])
    # The smallest diagonal that makes the Gram matrix safely positive definite, so that h can be read off z.
    self_weight = (1.0 + max(-least, 0.0)) / (1 - decay)
    for k in range(count):
        eye = torch.eye(sizes[k], dtype=like.dtype, device=like.device)
        put(k, k, self_weight * eye)
        put(k + count, k + count, self_weight * eye)
        put(k, k + count, -decay * self_weight * eye)
    root = torch.linalg.cholesky(gram)
    layers: Layers = []
    for i in range(2 * count):
        k = i % count
        weight = network.weights[0] if k == 0 else like.new_zeros(sizes[k], like.shape[1])
        layers.append((_dense(root[place[i]]), _linear(weight, network.biases[k])))
    # z = root' d with d_i = alpha / (1 - q^2N) q^(2N-1-i) h_i, so the last block of d is proportional to h_N.
    read = torch.linalg.inv(root.T)[place[-1]] * (1 - (1 - alpha) ** (2 * count)) / alpha
    return layers, _linear(network.out_weight @ read, network.out_bias)


def _penalty(module: nn.Module) -> Penalty:
    if isinstance(module, nn.LeakyReLU):
        return penalties.LeakyReLU(module.negative_slope)
    if isinstance(module, nn.ELU):
        return penalties.ELU(module.alpha)
    if isinstance(module, nn.Softshrink):
        return penalties.SoftThreshold(module.lambd)
    standard = {nn.Softplus: ("beta", 1), nn.Hardtanh: ("max_val", 1)}
    for kind, (field, usual) in standard.items():
        if isinstance(module, kind) and getattr(module, field) != usual:
            raise ValueError(f"{kind.__name__} is known with {field}={usual}; got {getattr(module, field)}")
    name = _ACTIVATIONS.get(type(module))
    if name is None:
        raise ValueError(f"no penalty belongs to {type(module).__name__}; known: {', '.join(penalties.names())}")
    return penalties.get(name)


def _shrink(matrices: list[Tensor], activation: Penalty) -> float:
    if not isinstance(activation, _HOMOGENEOUS):
        raise ValueError(
            f"nonexpansive=True scales the layers, which {type(activation).__name__} does not allow; "
            "ReLU, LeakyReLU and Identity do"
        )
    return max(1.0, *(float(torch.linalg.matrix_norm(W, 2)) for W in matrices))


def _dense(weight: Tensor) -> Dense:
    layer = Dense(weight.shape[1], weight.shape[0]).to(weight)
    layer.weight.data.copy_(weight)
    return layer


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0]).to(weight)
    layer.weight.data.copy_(weight)
    layer.bias.data.copy_(bias)
    return layer
