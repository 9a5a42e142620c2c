"""Feed-forward networks written as Deep OptEq: two constructions, exact to rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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
    nn.Hardswish: "hardswish",
}
_STANDARD: tuple[tuple[type[nn.Module], str, float], ...] = (
    (nn.Softplus, "beta", 1),
    (nn.Softplus, "threshold", 20),
    (nn.Hardtanh, "min_val", -1),
    (nn.Hardtanh, "max_val", 1),
)
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
    activation = activation_of(activations)
    weights = [m.weight.detach() for m in linears if isinstance(m, nn.Linear)]
    biases = [
        m.bias.detach() if m.bias is not None else m.weight.new_zeros(m.out_features)
        for m in linears
        if isinstance(m, nn.Linear)
    ]
    return FeedForward(weights[:-1], biases[:-1], weights[-1], biases[-1], activation)


def activation_of(modules: Sequence[nn.Module]) -> Penalty:
    """The penalty that belongs to all of them."""
    shared = {_penalty(module) for module in modules}
    if len(shared) > 1:
        raise ValueError(f"all activations should be the same; got {sorted(map(str, shared))}")
    return shared.pop()


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
        layers += [(_dense(like.new_zeros(1, 2 * len(root))), None) for _ in range(idle)]
        for k in range(count):
            W = torch.cat([first * root[place[k]], second * root[place[k]]], dim=1)
            weight = like if k == 0 else like.new_zeros(sizes[k], like.shape[1])
            layers.append((_dense(W.to(like)), _linear(weight, network.biases[k])))
    # The last coordinates of z are alpha / sqrt(1 - e^2) R'h for the last hidden h, with R the factor's last block.
    corner = root[place[-1], place[-1]]
    out = torch.linalg.solve_triangular(corner.T, network.out_weight.double(), upper=True, left=False)
    read = like.new_zeros(out.shape[0], 2 * len(root))
    read[:, -sizes[-1] :] = out * math.sqrt(1 - echo**2) / alpha
    return layers, _linear(read, network.out_bias)


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


def check_homogeneous(activation: Penalty) -> None:
    """Raise unless ``sigma(s t) = s sigma(t)`` for positive s."""
    if not isinstance(activation, _HOMOGENEOUS):
        raise ValueError(
            f"nonexpansive=True scales the layers, which {type(activation).__name__} does not allow; "
            "ReLU, LeakyReLU and Identity do"
        )


def _shrink(matrices: list[Tensor], activation: Penalty) -> float:
    check_homogeneous(activation)
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
