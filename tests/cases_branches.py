"""The problems with branches over which the laws are tested."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

import opteq
from cases import Case
from opteq import operators as op
from opteq.problems.base import Problem
from opteq.problems.branches.mopteq import MOptEq
from opteq.problems.branches.parallel import Parallel
from opteq.problems.branches.popteq import POptEq


def vectors(count: int, bound: float = 0.7) -> list[opteq.Branch]:
    """Branches with features of four entries and states of different lengths."""
    return [opteq.Branch(op.Dense(4, 5 + i, bound=bound), nn.Linear(4, 5 + i)) for i in range(count)]


def pictures(*scales: int, bound: float = 0.7) -> list[opteq.Branch]:
    """Branches with features of three channels that see the input at these scales."""
    return [opteq.Branch(op.Conv2d(3, 4, 3, bound=bound), nn.Conv2d(2, 4, 3, padding=1), scale) for scale in scales]


def mopteq(count: int, **options: object) -> Callable[[], Problem]:
    return lambda: MOptEq(vectors(count), **options)


def mopteq_conv(*scales: int, **options: object) -> Callable[[], Problem]:
    return lambda: MOptEq(pictures(*scales), **options)


def popteq(*scales: int, **options: object) -> Callable[[], Problem]:
    return lambda: POptEq(pictures(*scales, bound=0.8), **options)


def side_by_side() -> Problem:
    """Parts of all kinds with one penalty: the sum still has the form of a hidden problem."""
    single = opteq.OptEq(op.Conv2d(2, 3, 3, bound=0.8), nn.Conv2d(2, 3, 3, padding=1), "tanh")
    ring = MOptEq(pictures(1, 2), diversity=0.1, smoothing=0.5, activation="tanh")
    return Parallel([single, ring], scales=[2, 1])


def with_deep() -> Problem:
    single = opteq.OptEq(op.Dense(5, 6, bound=0.8), nn.Linear(4, 6), "softplus")
    deep = opteq.DeepOptEq([(op.Dense(5, n, bound=0.8), nn.Linear(4, n)) for n in (6, 3)], activation="tanh")
    return Parallel([deep, single])


def inhibition(*scales: int, **options: object) -> Callable[[], Problem]:
    return lambda: opteq.Inhibition(pictures(*scales), m=0.8, **options)


MORE_CASES: list[Case] = [
    Case("mopteq-heritage", mopteq(3), (4,)),
    Case("mopteq-sign", mopteq(3, diversity=0.02), (4,)),
    Case("mopteq-one", mopteq(1, diversity=0.1, smoothing=0.3, activation="tanh"), (4,), kinks=False),
    Case("mopteq-two", mopteq(2, diversity=0.1, smoothing=0.3, activation="softplus"), (4,), kinks=False),
    Case("mopteq-four", mopteq(4, diversity=0.1, smoothing=0.3), (4,)),
    Case("mopteq-conv", mopteq_conv(1, 2, 4, diversity=0.05, smoothing=0.5), (2, 4, 8)),
    Case("mopteq-no-heritage", mopteq(3, diversity=0.1, smoothing=0.3, heritage=False), (4,)),
    Case("mopteq-perturbed", mopteq_conv(2, 1, perturbation=0.1, activation="tanh"), (2, 4, 4)),
    Case("popteq", popteq(1, 2), (2, 4, 4)),
    Case("popteq-sum", popteq(2, 1, fuse="sum", activation="tanh"), (2, 4, 4), kinks=False),
    Case("popteq-conv", popteq(1, 2, fuse="conv"), (2, 4, 4)),
    Case("inhibition-branches", inhibition(1, 2), (2, 4, 4)),
    Case("inhibition-softplus", inhibition(2, 1, activation="softplus"), (2, 4, 4), kinks=False),
    Case("parallel", side_by_side, (2, 4, 4), kinks=False),
    Case("parallel-deep", with_deep, (4,), one_equation=False, kinks=False),
]
