"""Operators side by side, and the one that does nothing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from opteq.operators.base import LinearMap, Operator
from opteq.operators.spectral.bound import normalise


class IdentityMap(LinearMap):
    """``A v = v``."""

    def __call__(self, v: Tensor) -> Tensor:
        return v

    def adjoint(self, u: Tensor) -> Tensor:
        return u


class Identity(Operator):
    """``A v = v``, of norm 1, for inputs of any shape.

    >>> Identity()(torch.arange(3))
    tensor([0, 1, 2])
    """

    keeps_shape = True

    def prepare(self) -> IdentityMap:
        return IdentityMap()

    def norm(self) -> Tensor:
        return torch.ones(())


class StackMap(LinearMap):
    """``v -> [A_1 v; ...; A_L v]`` along ``dim``, where ``A_i`` puts out ``sizes[i]`` entries."""

    def __init__(self, maps: list[LinearMap], sizes: list[int], dim: int) -> None:
        self.maps = maps
        self.sizes = sizes
        self.dim = dim

    def __call__(self, v: Tensor) -> Tensor:
        return torch.cat([linear(v) for linear in self.maps], dim=self.dim)

    def adjoint(self, u: Tensor) -> Tensor:
        if u.ndim <= max(self.dim, 0) or u.shape[self.dim] != sum(self.sizes):
            raise ValueError(
                f"the adjoint of Stack expects {sum(self.sizes)} entries (those of its parts: {self.sizes}) "
                f"in dimension {self.dim}; got shape {tuple(u.shape)}"
            )
        parts = torch.split(u, self.sizes, dim=self.dim)
        total = self.maps[0].adjoint(parts[0])
        for linear, part in zip(self.maps[1:], parts[1:], strict=True):
            total = total + linear.adjoint(part)
        return total


class Stack(Operator):
    """Several operators on one input, their outputs concatenated: ``v -> [A_1 v; ...; A_L v]``.

    Outputs are joined along the channels (dimension 1) for convolutions and along the last dimension for matrices; the
    adjoint is the sum of the adjoints. Each operator keeps its own bound.

    Args:
        operators: convolutions, or matrices (or stacks of them), that take the same number of channels or features.

    >>> from opteq.operators import Dense
    >>> Stack([Dense(4, 2), Dense(4, 3)])(torch.ones(5, 4)).shape
    torch.Size([5, 5])
    """

    def __init__(self, operators: Iterable[Operator]) -> None:
        super().__init__()
        operators = list(operators)
        if not operators:
            raise ValueError("Stack needs at least one operator; got none")
        kinds = {"channels" if hasattr(A, "out_channels") else "features" for A in operators}
        for operator in operators:
            if not hasattr(operator, "out_channels") and not hasattr(operator, "out_features"):
                raise ValueError(f"Stack takes operators that know the size of their output; got {operator!r}")
        if len(kinds) > 1:
            raise ValueError("Stack takes convolutions or matrices, not both: their inputs differ in kind")
        kind = kinds.pop()
        inputs = [int(getattr(operator, f"in_{kind}")) for operator in operators]
        if len(set(inputs)) > 1:
            raise ValueError(f"Stack needs operators with the same number of input {kind}; got {inputs}")
        self.sizes = [int(getattr(operator, f"out_{kind}")) for operator in operators]
        self.dim = 1 if kind == "channels" else -1
        # The same attribute names as the parts have, so that a stack can stand wherever one of them can.
        setattr(self, f"in_{kind}", inputs[0])
        setattr(self, f"out_{kind}", sum(self.sizes))
        self.operators = nn.ModuleList(operators)

    def prepare(self) -> StackMap:
        return StackMap([A.prepare() for A in self.parts()], self.sizes, self.dim)

    def norm(self) -> Tensor:
        """``sqrt(|A_1|^2 + ... + |A_L|^2)``, from ``|A v|^2 = sum |A_i v|^2``.

        Certified, and attained only if all parts stretch the same input most; it may exceed the norm by up to
        ``sqrt(L)``.
        """
        unit, magnitude = normalise(torch.stack([A.norm() for A in self.parts()]))
        return unit.square().sum().sqrt() * magnitude

    def parts(self) -> list[Operator]:
        """The operators, in order."""
        return [A for A in self.operators if isinstance(A, Operator)]
