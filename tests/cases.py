"""The problems, solvers and gradients over whose product the laws are tested. A new one is added here, once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opteq
from opteq import operators as op
from opteq import penalties, regularizers
from opteq.problems.base import Problem


@dataclass(frozen=True)
class Case:
    """A problem and inputs for it, from a seed."""

    name: str
    build: Callable[[], Problem]
    shape: tuple[int, ...]
    one_equation: bool = True  # T = sigma(-grad g), so that J = D M with M symmetric
    couples_batch: bool = False
    kinks: bool = True  # whether the activation has kinks (finite differences across one are meaningless)

    def problem(self, dtype: torch.dtype = torch.float64) -> Problem:
        torch.manual_seed(7)
        problem = self.build()
        # Operators begin exactly at their bound, where min(1, bound / norm) has a kink: move them off it.
        for module in problem.modules():
            if isinstance(module, op.Operator) and module.bound is not None:
                for weight in module.parameters():
                    weight.data.mul_(1.25)
        return problem.to(dtype)

    def input(self, batch: int = 3, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, *self.shape, generator=generator, dtype=torch.float64).to(dtype)


class Smoother(opteq.HiddenProblem):
    """Written by a user: neighbours agree, and the state resembles a learned view of the input."""

    penalty = "softplus"

    def __init__(self) -> None:
        super().__init__()
        self.view = nn.Linear(4, 4)

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        rough = (y[:, 1:] - y[:, :-1]).square().sum(1)
        return 0.1 * rough - (self.view(x) * y).sum(1) + 0.05 * (y**4).sum(1) / (1 + y.square().sum(1))


class TwoParts(opteq.HiddenProblem):
    """A state of two tensors that pull on each other."""

    penalty = "tanh"

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(0.2 * torch.randn(4, 3))

    def start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(x), x.new_zeros(x.shape[0], 3)

    def smooth(self, y: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
        a, b = y
        return -((a @ self.mix) * b).sum(1) - (x * a).sum(1) - 0.3 * b.sum(1)


class Jumps(opteq.Objective):
    """Written by a user: the state resembles a learned view of the input and jumps seldom."""

    def __init__(self, penalty: object = None) -> None:
        super().__init__()
        self.view = nn.Linear(4, 4)
        self.strength = nn.Parameter(torch.tensor(0.6))
        self.penalty = penalty

    def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        jumps = (1 + (y[:, 1:] - y[:, :-1]).square()).sqrt().sum(1) - 3
        return {"data": 0.5 * (y - self.view(x)).square().sum(1), "jumps": self.strength * jumps}


def dense(activation: str | penalties.Penalty = "relu", **options: object) -> Callable[[], Problem]:
    return lambda: opteq.OptEq(op.Dense(5, 6, bound=0.8), nn.Linear(4, 6), activation, **options)


def linear_activation() -> Problem:
    return opteq.OptEq(op.Dense(5, 6, bound=0.8), nn.Linear(4, 6), penalties.LinearActivation(6))


def conv() -> Problem:
    return opteq.OptEq(op.Conv2d(2, 3, kernel_size=3, bound=0.8), nn.Conv2d(2, 3, 3, padding=1))


def separable() -> Problem:
    return opteq.OptEq(op.SeparableConv2d(2, 3, kernel_size=3, bound=0.8), nn.Conv2d(2, 3, 3, padding=1), "tanh")


def deep(**options: object) -> Callable[[], Problem]:
    def build() -> Problem:
        layers = [(op.Dense(5, n, bound=0.8), nn.Linear(4, n)) for n in (6, 3)]
        return opteq.DeepOptEq(layers, **options)

    return build


def deep_conv() -> Problem:
    layers = [
        (op.Conv2d(2, 3, 3, bound=0.8), None),
        (op.Conv2d(2, 4, 3, bound=0.8), nn.Conv2d(2, 4, 3, padding=1)),
    ]
    return opteq.DeepOptEq(layers, alpha=(0.9, 0.6), activation="tanh")


def affine() -> Problem:
    matrix = torch.eye(5) + 0.1 * torch.randn(5, 5)
    inner = opteq.OptEq(op.Dense(5, 6, bound=0.8), nn.Linear(4, 6), "tanh")
    return opteq.AffineOptEq(inner, matrix, 0.1 * torch.randn(5))


def splitting() -> Problem:
    inner = opteq.OptEq(op.Dense(5, 6, bound=0.8), nn.Linear(4, 6), "tanh")
    return opteq.Splitting(inner, regularizers.L1(), gamma=0.05)


def inhibition(activation: str) -> Callable[[], Problem]:
    return lambda: opteq.Inhibition(op.Dense(5, 6), nn.Linear(4, 6), 0.3, activation)


def inhibited() -> Problem:
    return opteq.Inhibited(opteq.OptEq(op.Dense(5, 6, bound=0.6), nn.Linear(4, 6)), op.Dense(3, 6, bound=0.9), m=0.8)


class Recurrence(nn.Module):
    """A map without symmetry."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.U = op.Dense(4, 4, bound=0.8), nn.Linear(4, 4)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.W(z) + self.U(x))


def fixed_point() -> Problem:
    return opteq.FixedPoint(Recurrence())


CASES = [
    Case("opteq-relu", dense(), (4,)),
    Case("opteq-tanh", dense("tanh"), (4,), kinks=False),
    Case("opteq-elu-mu", dense("elu", mu=1.5), (4,), kinks=False),
    Case("opteq-ridge", dense(regularizer=regularizers.Ridge(), gamma=0.3), (4,)),
    Case("opteq-incay", dense("tanh", regularizer=regularizers.Incay(), gamma=0.1), (4,), kinks=False),
    Case("opteq-huber", dense(regularizer=regularizers.Envelope(regularizers.L1(), 0.1)), (4,)),
    Case(
        "opteq-decorrelation",
        dense("sigmoid", regularizer=regularizers.Decorrelation(eps=0.1), gamma=0.05),
        (4,),
        couples_batch=True,
        kinks=False,
    ),
    Case("opteq-linear", linear_activation, (4,), kinks=False),
    Case("opteq-conv", conv, (2, 5, 4)),
    Case("opteq-separable", separable, (2, 4, 5), kinks=False),
    Case("deep", deep(alpha=0.7), (4,), one_equation=False),
    Case("deep-learned", deep(alpha=0.7, learn_alpha=True, activation="tanh"), (4,), one_equation=False, kinks=False),
    Case("deep-ridge", deep(alpha=0.7, regularizer=regularizers.Ridge(), gamma=0.3), (4,), one_equation=False),
    Case("deep-conv", deep_conv, (2, 4, 4), one_equation=False, kinks=False),
    Case("affine", affine, (4,), one_equation=False, kinks=False),
    Case("splitting", splitting, (4,), one_equation=False),
    Case("written", Smoother, (4,), kinks=False),
    Case("written-tuple", TwoParts, (4,), kinks=False),
    Case("objective", Jumps, (4,), kinks=False),
    Case("objective-relu", lambda: Jumps("relu"), (4,)),
    Case("fixed-point", fixed_point, (4,), one_equation=False, kinks=False),
    Case("inhibition", inhibition("relu"), (4,)),
    Case("inhibited", inhibited, (4,)),
    Case("inhibition-tanh", inhibition("tanh"), (4,), kinks=False),
]

SOLVERS = {
    "picard": opteq.Picard(tol=1e-12, max_steps=2000),
    "anderson": opteq.Anderson(tol=1e-12, max_steps=300),
    "broyden": opteq.Broyden(tol=1e-12, max_steps=300),
    "fista": opteq.FISTA(tol=1e-12, max_steps=2000),
}

EXACT_GRADIENTS = {
    "implicit": opteq.Implicit(),
    "implicit-gmres": opteq.Implicit(linear=opteq.GMRES(tol=1e-11)),
    "phantom-long": opteq.Phantom(steps=150, damping=0.8),
    "unrolled-long": opteq.Unrolled(steps=150),
}

ROUGH_GRADIENTS = {
    "phantom": opteq.Phantom(),
    "one-step": opteq.OneStep(),
    "shine": opteq.Shine(),
}


def combined(cases: Iterable[Case], *axes: Mapping[str, object], quick: int = 1, every: int = 1) -> list[Any]:
    """Every case with every combination of options, as parameters of a test; all but ``quick`` a case are slow.

    Problems, solvers, gradients and dtypes hardly interact: what one of them gets wrong, it gets wrong with most of
    the others. So the quick run takes other combinations from case to case, and over all cases each of them occurs.
    With ``every=3`` it takes each third case: for tests of the options, where another test has every problem.
    """
    combinations = list(itertools.product(*(axis.items() for axis in axes)))
    stride = next(n for n in (7, 5, 3, 1) if len(combinations) % n)
    parameters = []
    for number, case in enumerate(cases):
        taken, first = 0 if number % every else quick, number // every * stride
        chosen = {(first + k * len(combinations) // quick) % len(combinations) for k in range(taken)}
        for index, options in enumerate(combinations):
            marks = pytest.mark.chosen if index in chosen else pytest.mark.slow
            name = "-".join([case.name, *(label for label, _ in options)])
            parameters.append(pytest.param(case, *(value for _, value in options), id=name, marks=marks))
    return parameters


def by_name(names: str) -> list[Case]:
    """The cases with these names, separated by blanks."""
    return [case for case in CASES if case.name in names.split()]
