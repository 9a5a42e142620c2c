"""A problem of the library beside its equations in float64, and the parts that all families draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hunt import oracle
from hunt.drawing import Draw
from hunt.oracle import Equations, State, Weights
from opteq import operators as op
from opteq.problems.base import Problem


@dataclass(frozen=True)
class DrawnProblem:
    """A problem that was drawn, in float64.

    Attributes:
        name: its family and what was chosen, for reports.
        problem: as the library has it.
        equations: as the mathematics has it.
        shape: of one sample of the input.
        minimises: whether it has an objective that has a Hessian, so that CONVERGED means a minimum.
        stretch: for given inputs, what residuals of the library are multiplied by, per sample, to bound those of the
            equations; None where both have the same map.
        more: weights of the equations that are no parameters of the problem.
    """

    name: str
    problem: Problem
    equations: Equations
    shape: tuple[int, ...]
    minimises: bool = True
    stretch: Callable[[Tensor], Tensor] | None = None
    more: Callable[[], Weights] = dict

    @property
    def family(self) -> str:
        words = self.name.split()
        return " ".join(words[:2]) if words[0] in ("own", "geq") else words[0]

    def weights(self) -> tuple[Weights, set[str]]:
        """The weights that act, in float64, and the names of those that a bound has changed."""
        given = {name: weight.detach().double().cpu() for name, weight in self.problem.named_parameters()}
        more = self.more()
        acting, changed = {**given, **more}, set(given) if more else set()
        for name, module in self.problem.named_modules():
            if isinstance(module, op.Dense | op.Conv2d):
                key = f"{name}.weight"
                acting[key] = module.prepare().weight.detach().double().cpu()
                if not torch.equal(acting[key], given[key]):
                    changed.add(key)
        return acting, changed

    def placed(self, state: State, x: Tensor, device: str) -> Any:
        """A state of the equations as the library has it for input ``x``: a tensor or a tuple, in the dtype of x."""
        given = tuple(part.to(device, x.dtype) for part in state)
        return given if isinstance(self.problem(x.to(device)).start(), tuple) else given[0]

    def stretched(self, x: Tensor) -> list[float]:
        return [1.0] * len(x) if self.stretch is None else self.stretch(x).double().tolist()


@dataclass(frozen=True)
class Frame:
    """Sizes that the parts of one problem share: of vectors, or of images; and the activation."""

    images: bool
    inputs: int
    features: int
    states: int
    size: tuple[int, ...]
    activation: str

    @classmethod
    def drawn(cls, draw: Draw, images: float = 0.4) -> Frame:
        is_image = draw.chance(images)
        side = (draw.one_of([2, 4]), draw.one_of([2, 4])) if is_image else ()
        inputs, features, states = (draw.whole(1, 4 if is_image else 7) for _ in range(3))
        return cls(is_image, inputs, features, states, side, draw.one_of(list(oracle.ACTIVATIONS)))

    @property
    def slope(self) -> float:
        return oracle.SLOPES.get(self.activation, 1.0)

    @property
    def kinks(self) -> tuple[float, ...]:
        return oracle.KINKS.get(self.activation, ())

    def sigma(self, t: Tensor) -> Tensor:
        return oracle.ACTIVATIONS[self.activation](t)


def drawn_operator(
    draw: Draw, frame: Frame, inputs: int, outputs: int, size: tuple[int, ...], most: float
) -> op.Operator:
    """An operator of norm ``most`` at most on images of ``size``: free, or with a bound that may act, or does."""
    kernel = draw.one_of([1, 3])
    weight = draw.normal(*((outputs, inputs, kernel, kernel) if frame.images else (outputs, inputs)))
    weight *= draw.number(0.2, 1.0) * most / max(oracle.norm(weight, size), 1e-30)
    manner = draw.one_of(["free", "free", "slack", "acting"])
    bound = None if manner == "free" else 1.15 * most if manner == "slack" else most
    W = op.Conv2d(inputs, outputs, kernel, bound=bound) if frame.images else op.Dense(inputs, outputs, bound=bound)
    W = W.double()
    W.weight.data.copy_(weight * (4 if manner == "acting" else 1))
    return W


def drawn_injection(draw: Draw, frame: Frame, inputs: int, outputs: int) -> nn.Module:
    """A linear U, with a bias or without."""
    bias, kernel = draw.chance(0.7), draw.one_of([1, 3])
    if frame.images:
        U: nn.Module = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=bias)
    else:
        U = nn.Linear(inputs, outputs, bias=bias)
    U = U.double()
    for weight in U.parameters():
        weight.data.copy_(draw.normal(*weight.shape) / math.sqrt(max(1, weight[0].numel())))
    return U


def injected(w: Weights, prefix: str, x: Tensor) -> Tensor:
    """``U x + b``; x itself without a U."""
    weight, bias = w.get(f"{prefix}U.weight"), w.get(f"{prefix}U.bias")
    if weight is None:
        return x
    product = oracle.forward(weight, x)
    return product if bias is None else product + bias.reshape(-1, *[1] * (product.ndim - 2))


def injected_size(w: Weights, prefix: str, x: Tensor) -> Tensor:
    """The norm of ``|U| |x| + |b|`` of each sample: by the rounding of these, ``U x + b`` may be off."""
    large = injected({name: weight.abs() for name, weight in w.items()}, prefix, x.abs())
    return large.reshape(len(x), -1).norm(dim=1)
