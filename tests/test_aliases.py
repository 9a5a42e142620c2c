"""An answer is memory of its own: whoever writes into it changes neither the input nor a weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import opteq
from opteq import operators as op
from opteq.problems.base import Problem
from opteq.states import blocks


class Echo(opteq.HiddenProblem):
    """Its state is its input, and that is where it begins."""

    penalty = "identity"

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return -(x * y).flatten(1).sum(1)

    def start(self, x: Tensor) -> Tensor:
        return x


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "conv": lambda: opteq.OptEq(op.Conv2d(2, 4, 3, bound=0.9), activation="identity"),
    "geq": lambda: opteq.GEQ(op.Conv2d(4, 4, 3, bound=0.9), kernel=opteq.kernels.Linear(), activation="identity"),
    "echo": Echo,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "contiguous"])
@pytest.mark.parametrize("build", PROBLEMS.values(), ids=PROBLEMS)
def test_an_answer_is_not_the_input(build: Callable[[], Problem], last: bool, dtype: torch.dtype) -> None:
    layer = opteq.Equilibrium(build().to(dtype))
    x = torch.zeros(2, 4, 4, 4, dtype=dtype)
    if last:
        x = x.to(memory_format=torch.channels_last)
    with opteq.engine.off():
        for tape in (False, True):
            with torch.set_grad_enabled(tape):
                solution = layer.solve(x)
            with torch.no_grad():
                for part in (*blocks(solution.state), *blocks(solution.features)):
                    part.add_(1)
            assert not x.any()
