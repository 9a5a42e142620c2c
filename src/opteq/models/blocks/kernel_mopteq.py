"""MOptEq whose branches see the input through a kernel: Table 5 of the GEQ paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from opteq.kernels.inner_product import InnerProduct
from opteq.operators import Operator
from opteq.penalties import Penalty
from opteq.problems.branches.branch import Branch
from opteq.problems.branches.mopteq import BoundMOptEq, MOptEq
from opteq.problems.certificate import Certificate, SmoothPart
from opteq.problems.hidden import Formulation, Structure
from opteq.states import State, blocks, inner, per_row


class KernelMOptEq(MOptEq):
    """MOptEq with ``-k(<U_i x_i + b_i, y_i>)`` in the place of ``-<U_i x_i + b_i, y_i>`` in every branch.

    Branches stay coupled by heritage and diversity. The step is
    ``y_i <- sigma(W_i h_i + k'(<c_i, y_i>) c_i)`` with ``c_i = U_i x_i + b_i``. With k the identity it is MOptEq.

    Args:
        branches: as for :class:`MOptEq`.
        kernel: k, such as :class:`opteq.kernels.Sigmoid` or :class:`opteq.kernels.Polynomial`.
        diversity, activation, smoothing, heritage: as for :class:`MOptEq`.

    >>> import torch, opteq
    >>> branches = [opteq.Branch(opteq.operators.Dense(4, 6, bound=0.7), torch.nn.Linear(3, 6)) for _ in range(3)]
    >>> layer = opteq.Equilibrium(KernelMOptEq(branches, opteq.kernels.Sigmoid()))
    >>> [tuple(z.shape) for z in layer(torch.randn(2, 3))]
    [(2, 4), (2, 4), (2, 4)]
    """

    def __init__(
        self,
        branches: Sequence[Branch],
        kernel: InnerProduct,
        diversity: float = 0.0,
        activation: str | Penalty = "relu",
        smoothing: float = 0.0,
        heritage: bool = True,
    ) -> None:
        super().__init__(branches, diversity, 0.0, activation, smoothing, heritage)
        if not isinstance(kernel, InnerProduct):
            raise TypeError(
                f"kernel should be one of an inner product, such as kernels.Sigmoid(); got {kernel!r}. GEQ takes others"
            )
        self.kernel = kernel

    def bind(self, x: State) -> BoundKernelMOptEq:
        """Every ``U_i x_i + b_i`` and bounded W, computed once."""
        plain = super().bind(x)
        return BoundKernelMOptEq(self, plain.maps, plain.injections)

    def smooth_part(self, norm: Callable[[Operator], float]) -> SmoothPart | None:  # noqa: ARG002
        """Nothing: the curvature of the kernel's term grows with the input."""
        return None

    def certificate(self) -> Certificate:
        """A minimiser exists where MOptEq's objective is strongly convex and k grows no faster than its argument."""
        plain = super().certificate()
        why = self.kernel.caveat or f"{type(self.kernel).__name__} declares nothing to conclude this from"
        exists = True if plain.unique and self.kernel.growth is not None else None
        reasons = dict.fromkeys(("exists", "unique", "contraction", "lipschitz"), why)
        if exists:
            reasons["exists"] = "without the kernel the objective is strongly convex, and the kernel grows more slowly"
        return Certificate(exists, None, None, None, reasons)


class BoundKernelMOptEq(BoundMOptEq):
    """MOptEq with a kernel and its input bound.

    Attributes:
        kernel: k.
    """

    def __init__(self, problem: KernelMOptEq, maps: list[Any], injections: tuple[Tensor, ...]) -> None:
        super().__init__(problem, maps, injections)
        self.kernel = problem.kernel
        self.structure, self.convex = Structure.SYMMETRIC, False
        self.quadratic = False
        self.has_merit = self.kernel.second_range is not None and self.penalty.has_total and not self.jumps

    def start(self) -> tuple[Tensor, ...]:
        """Zeros; or c where ``k'(0) = 0``, so that zero is a fixed point whatever the input is."""
        flat = bool(self.kernel.derivative(torch.zeros(())) == 0)
        return tuple(self.penalty.project(c.detach()) if flat else torch.zeros_like(c) for c in self.injections)

    def smooth_terms(self, y: State) -> dict[str, Tensor]:
        """Input by the kernel, heritage (or self) and diversity."""
        similarity = torch.stack([self.kernel.value(t) for t in self._inner_products(y)]).sum(dim=0)
        return {"input": -similarity, **self.coupling.terms(self.features(y))}

    def preactivation(self, y: State, signs: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
        """``W_i h_i + k'(<c_i, y_i>) c_i``."""
        driven = self._times_injections([self.kernel.derivative(t) for t in self._inner_products(y)])
        return self._carry(self.coupling.negative_gradient(self.features(y), signs), driven)

    def negative_hessian_at(self, y: State) -> Callable[[State], State]:
        """``v -> W_i [h'(z) W'v]_i + k''(<c_i, y_i>) c_i <c_i, v_i>``."""
        coupled = super().negative_hessian_at(y)
        seconds = [self.kernel.second(t) for t in self._inner_products(y)]

        def product(v: State) -> State:
            own = self._times_injections(
                [second * t for second, t in zip(seconds, self._inner_products(v), strict=True)]
            )
            return tuple(a + b for a, b in zip(blocks(coupled(v)), own, strict=True))

        return product

    def feature_form(self) -> Formulation:
        raise ValueError("a solver that works on features can't solve MOptEq with a kernel, whose step needs the state")

    @cached_property
    @torch.no_grad()
    def damping(self) -> float | Tensor:  # type: ignore[override]
        """That of MOptEq, with the kernel's slope ``-k'' |c_i|^2`` as well."""
        given = BoundMOptEq.damping.func(self)  # type: ignore[attr-defined]
        if self.kernel.second_range is None:
            return given  # type: ignore[no-any-return]
        slope = self.penalty.lipschitz * max(-self.kernel.second_range[0], 0.0)
        sizes = torch.stack([inner(c, c) for c in self.injections]).amax(dim=0)
        damping: Tensor = 2 / (2 / given + slope * sizes)
        return damping

    def step_and_merit(self, y: State) -> tuple[State, Tensor]:
        """The step and the objective, which damped steps decrease."""
        return self.step(y), self.objective(y)

    def _inner_products(self, y: State) -> list[Tensor]:
        """``<c_i, y_i>``, per branch."""
        return [inner(c, part) for c, part in zip(self.injections, blocks(y), strict=True)]

    def _times_injections(self, numbers: list[Tensor]) -> tuple[Tensor, ...]:
        pairs = zip(numbers, self.injections, strict=True)
        return tuple(per_row(n, c) * c for n, c in pairs)
