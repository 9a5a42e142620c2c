"""The GEQ problems over which the laws are tested.

``gamma="auto"`` is not among them: it is a function of the input that gradients leave out on purpose, so finite
differences disagree with it. ``test_geq.py`` holds it to the laws that apply.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from cases import Case
from opteq import kernels
from opteq import operators as op
from opteq.problems.base import Problem
from opteq.problems.branches.parallel import Parallel
from opteq.problems.geq import GEQ


def of_state(kernel: Callable[[], kernels.Kernel], activation: str) -> Callable[[], Problem]:
    """Kernels that compare the input with the state: U maps into the state's five dimensions."""
    return lambda: GEQ(op.Dense(5, 6, bound=0.8), nn.Linear(4, 5), kernel(), activation)


def small_inputs() -> Problem:
    """The sigmoid kernel contracts only for small ``U x + b``, and the laws also try inputs of size 30."""
    problem = GEQ(op.Dense(5, 6, bound=0.8), nn.Linear(4, 5), kernels.Sigmoid(), "tanh")
    problem.U.weight.data.mul_(0.05)
    return problem


def of_output(kernel: Callable[[], kernels.Kernel], activation: str = "relu") -> Callable[[], Problem]:
    """Kernels that compare the input with W's output: U maps into its six dimensions."""
    return lambda: GEQ(op.Dense(5, 6, bound=0.8), nn.Linear(4, 6), kernel(), activation)


def side_by_side() -> Problem:
    """Two branches, the second at half the size."""
    parts = [pictures(lambda: kernels.Gaussian(0.3, 2, 2), "tanh")(), pictures(lambda: kernels.Gaussian(0.1), "tanh")()]
    return Parallel(parts, scales=[1, 2])


def pictures(kernel: Callable[[], kernels.Kernel], activation: str = "relu") -> Callable[[], Problem]:
    return lambda: GEQ(op.Conv2d(3, 4, 3, bound=0.8), nn.Conv2d(2, 4, 3, padding=1), kernel(), activation)


MORE_CASES: list[Case] = [
    Case("geq-linear", of_state(kernels.Linear, "relu"), (4,)),
    Case("geq-polynomial", of_state(lambda: kernels.Polynomial(2), "sigmoid"), (4,), kinks=False),
    Case("geq-sigmoid", small_inputs, (4,), kinks=False),
    Case("geq-gaussian", of_output(lambda: kernels.Gaussian(0.5)), (4,)),
    Case("geq-learned", of_output(lambda: kernels.Gaussian(0.3, learn_gamma=True), "softplus"), (4,), kinks=False),
    Case("geq-conv", pictures(lambda: kernels.Gaussian(0.05)), (2, 4, 5)),
    Case("geq-patches", pictures(lambda: kernels.Gaussian(0.4, patch=2, split=2)), (2, 4, 2)),
    Case(
        "geq-projected",
        pictures(lambda: kernels.Gaussian(0.3, 2, 4, 5, learn_gamma=True), "tanh"),
        (2, 2, 4),
        kinks=False,
    ),
    Case("geq-parallel", side_by_side, (2, 4, 4), kinks=False),
]
