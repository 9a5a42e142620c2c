"""Penalties f and activations sigma = prox_f, as one object.

The prox of a penalty maps t to the minimiser of ``f(y) + (y - t)^2 / 2``. It is an activation. Conversely, every
non-decreasing activation is the prox of a penalty with ``f'(y) = sigma^{-1}(y) - y``. A :class:`Penalty` holds both, so
that a layer and the objective that it minimises always agree.

>>> import torch
>>> relu = get("relu")                                          # f(y) = 0 for y >= 0, +inf for y < 0
>>> relu.prox(torch.tensor([-1.0, 2.0])), relu.value(torch.tensor([-1.0, 2.0]))
(tensor([0., 2.]), tensor([inf, 0.]))

Formulas are written so that autograd is right, and finite at kinks, at saturation and for large numbers: the
derivative of ``antiderivative`` is ``prox``, that of ``prox`` is ``derivative``, and that of ``value`` is
``sigma^{-1}(y) - y`` inside the domain. Where that is infinite (tanh at y = 1), it is the finite number of the
nearest float inside; outside the domain it is 0.

Accuracy: ``prox`` and ``derivative`` are accurate to a few ulps until they underflow, also where a unit is saturated
and its slope is 1e-20. Torch computes the derivative of ``prox`` from its output, tanh's as ``1 - y^2`` for instance.
So those of tanh, sigmoid and softsign are accurate relative to 1, not to the slope, and may be 0 for a saturated unit.
``antiderivative`` is accurate relative to t.
"""

from __future__ import annotations

from collections.abc import Callable

from opteq.common.errors import unknown_name
from opteq.penalties.base import ElementwisePenalty, Linearised, Penalty
from opteq.penalties.custom import FromActivation
from opteq.penalties.linear import LinearActivation
from opteq.penalties.piecewise import HardTanh, Identity, LeakyReLU, ReLU, SoftThreshold
from opteq.penalties.smooth import ELU, Sigmoid, Softplus, Softsign, Tanh

__all__ = [
    "ELU", "ElementwisePenalty", "FromActivation", "HardTanh", "Identity", "LeakyReLU", "LinearActivation",
    "Linearised", "Penalty", "ReLU", "Sigmoid", "SoftThreshold", "Softplus", "Softsign", "Tanh", "get", "names",
]  # fmt: skip

_BY_NAME: dict[str, Callable[[], Penalty]] = {
    "identity": Identity, "relu": ReLU, "leaky_relu": LeakyReLU, "tanh": Tanh, "sigmoid": Sigmoid,
    "softplus": Softplus, "elu": ELU, "soft_threshold": SoftThreshold, "hardtanh": HardTanh, "softsign": Softsign,
}  # fmt: skip

_NOT_MONOTONE = frozenset({"gelu", "quick_gelu", "silu", "swish", "hardswish", "mish", "sine", "sin", "cosine", "cos"})


def names() -> list[str]:
    """The names that :func:`get` knows.

    >>> names()[:3]
    ['identity', 'relu', 'leaky_relu']
    """
    return list(_BY_NAME)


def get(activation: str | Penalty) -> Penalty:
    """The penalty of a name, with its defaults; a penalty passes through.

    >>> get("leaky_relu"), get(LeakyReLU(slope=0.2))
    (LeakyReLU(slope=0.01), LeakyReLU(slope=0.2))
    """
    if isinstance(activation, Penalty):
        return activation
    if not isinstance(activation, str):
        raise TypeError(
            f"an activation is a name or a Penalty, such as 'relu' or LeakyReLU(slope=0.1); got {activation!r}. "
            "A function of your own becomes a penalty with FromActivation(function, lipschitz=...)"
        )
    if activation.lower() in _NOT_MONOTONE:
        raise ValueError(
            f"activation {activation!r} is not monotone, so it is the prox of no penalty and a network with it "
            "minimises nothing; near to it and monotone are 'softplus', 'elu' and 'relu'"
        )
    if activation not in _BY_NAME:
        raise unknown_name("activation", activation, _BY_NAME)
    return _BY_NAME[activation]()
