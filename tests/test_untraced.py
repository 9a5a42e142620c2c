"""Functions that a compiler leaves as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.common.dynamo import constant
from opteq.equilibrium import dynamo_disable


def test_a_compiler_leaves_them_as_they_are() -> None:
    seen: list[bool] = []

    @dynamo_disable
    def inside(x: Tensor, *, shift: float = 0.0) -> Tensor:
        """A word."""
        seen.append(torch.compiler.is_compiling())
        return x.relu() + shift

    def model(x: Tensor) -> Tensor:
        return inside(x.sin(), shift=2.0).cos()

    x = torch.linspace(-1, 1, 5)
    expected = model(x)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), expected)
    assert seen == [False] * 3  # every call was made, and none was traced
    assert inside.__name__ == "inside"
    assert inside.__doc__ == "A word."


def test_a_constant_is_computed_while_tracing() -> None:
    calls: list[str] = []

    @constant
    def known(name: str) -> int:
        calls.append(name)
        return len(name)

    compiled = torch.compile(lambda x: x * known("abc"), backend="eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 3.0))
    assert calls == ["abc"]
