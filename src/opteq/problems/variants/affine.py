"""OptEq seen through an invertible affine change of variable."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opteq.problems.base import Problem
from opteq.problems.certificate import Certificate, existence, for_finite_weights, unknown
from opteq.problems.hidden import BoundMap
from opteq.problems.opteq import Block, OptEq
from opteq.states import State, single, working_dtype


class AffineOptEq(Problem):
    """The fixed points of ``A^-1 o T o A`` with ``A(u) = matrix u + shift``: the minimisers of ``phi o A``.

    They are the features of the inner OptEq, in other coordinates. The step is a prox itself only where the matrix is
    orthogonal, so its Jacobian has no symmetry in general.

    Args:
        problem: the OptEq that gives T, with vectors as features.
        matrix: invertible, ``(m, m)`` for features of length m; learnable.
        shift: of length m, or None for zero; learnable.

    >>> import torch, opteq
    >>> inner = opteq.OptEq(opteq.operators.Dense(1, 1), activation="relu")
    >>> _ = inner.W.weight.data.fill_(0.5)  # z = 2/3 for the input 1
    >>> problem = opteq.AffineOptEq(inner, matrix=torch.tensor([[2.0]]), shift=torch.tensor([1.0]))
    >>> layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-6))
    >>> round(layer(torch.ones(1, 1)).item(), 4)  # (2/3 - 1) / 2
    -0.1667
    """

    def __init__(self, problem: OptEq, matrix: Tensor, shift: Tensor | None = None) -> None:
        super().__init__()
        if not isinstance(problem, OptEq) or problem.regularizer is not None:
            raise TypeError("AffineOptEq wraps an OptEq without a regulariser of its own")
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"matrix should be square; got shape {tuple(matrix.shape)}")
        spectrum = torch.linalg.svdvals(matrix.detach().double())
        if float(spectrum[-1]) <= 1e-10 * float(spectrum[0]):
            raise ValueError(
                "matrix should be invertible; its singular values run "
                f"from {float(spectrum[0]):.1e} to {float(spectrum[-1]):.1e}"
            )
        shift = matrix.new_zeros(matrix.shape[0]) if shift is None else shift
        if shift.shape != (matrix.shape[0],):
            raise ValueError(f"shift should have length {matrix.shape[0]}; got shape {tuple(shift.shape)}")
        self.problem = problem
        self.matrix = nn.Parameter(matrix.detach().clone())
        self.shift = nn.Parameter(shift.detach().clone())

    def bind(self, x: Tensor) -> BoundAffineOptEq:
        """T for this input and the inverse matrix, once."""
        return BoundAffineOptEq(self.problem.bind(x).block, self.matrix, self.shift)

    @for_finite_weights
    def certificate(self) -> Certificate:
        """Existence and uniqueness are those of the inner problem; a step contracts in the changed norm only."""
        inner = self.problem.certificate()
        spectrum = torch.linalg.svdvals(self.matrix.detach().double())
        rounding = len(spectrum) * torch.finfo(spectrum.dtype).eps * float(spectrum[0])
        least = float(spectrum[-1]) - rounding
        if least <= 0:
            return unknown("the matrix may be singular: its least singular value is lost in rounding")
        exists, unique, reasons = existence(inner.contraction, self.problem.penalty.bounded)
        lipschitz, why = None, inner.reasons.get("lipschitz", "")
        if inner.lipschitz is not None:
            lipschitz = inner.lipschitz / least
            why = "the inner problem's, times |matrix^-1|"
        reasons |= {"contraction": "a step contracts in the norm |matrix u|, not in |u|", "lipschitz": why}
        return Certificate(exists, unique, None, lipschitz, reasons)


class BoundAffineOptEq(BoundMap):
    """The conjugated map with its input bound."""

    def __init__(self, block: Block, matrix: Tensor, shift: Tensor) -> None:
        self.block = block
        self.matrix = matrix
        self.shift = shift
        # In float32 at least: torch inverts no matrix of half precision.
        self.inverse = torch.linalg.inv(matrix.to(working_dtype(matrix.dtype))).to(matrix.dtype)

    def start(self) -> Tensor:
        """Zeros."""
        return torch.zeros_like(self.block.back(self.block.c))

    def outer(self, u: State) -> Tensor:
        """``A(u)``."""
        return single(u) @ self.matrix.T + self.shift

    def step(self, y: State) -> Tensor:
        """``A^-1 T(A u)``."""
        inner = self.block(self.outer(y)) - self.shift
        moved: Tensor = inner @ self.inverse.T
        return moved

    def objective(self, y: State) -> Tensor:
        """The Moreau envelope of phi at ``A u``: explicit, with the minimisers and the least value of ``phi o A``."""
        return self.block.merit(self.outer(y))
