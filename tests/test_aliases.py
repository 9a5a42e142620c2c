"""An answer is memory of its own: whoever writes into it changes neither the input nor a weight."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import opteq
from opteq import operators as op
from opteq.problems.base import Problem
from opteq.states import blocks, map_state


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


class Started(opteq.Objective):
    """It begins at its own parameter, which is the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(2, 4, 4, 4))

    def start(self, x: Tensor) -> Tensor:
        return self.first

    def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        return {"data": 0.5 * (y - x).square().flatten(1).sum(1)}


@torch.no_grad()
@pytest.mark.parametrize("path", [opteq.engine.off, nullcontext], ids=["plain", "engine"])
@pytest.mark.parametrize("build", [*PROBLEMS.values(), Started], ids=[*PROBLEMS, "started"])
def test_an_answer_is_not_the_start(build: Callable[[], Problem], path: Callable[[], Any]) -> None:
    """A solve that begins at an equilibrium takes no step: it handed on an earlier answer, or a weight."""
    problem = build()
    layer, x = opteq.Equilibrium(problem), torch.zeros(2, 4, 4, 4)
    weights = [parameter.clone() for parameter in problem.parameters()]
    earlier = layer.solve(x).state
    kept = map_state(Tensor.clone, earlier)
    for _ in range(4):
        for start in (None, earlier):
            with path():
                solution = layer.solve(x, start)
            for part in (*blocks(solution.state), *blocks(solution.features)):
                part.add_(1)
    torch.testing.assert_close(earlier, kept, rtol=0, atol=0)
    torch.testing.assert_close(list(problem.parameters()), weights, rtol=0, atol=0)
