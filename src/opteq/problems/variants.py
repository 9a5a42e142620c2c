"""Variants of OptEq: with an affine change of variable, or with a non-smooth regulariser."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opteq.common.validate import check_invertible, check_positive, check_tensor
from opteq.problems.base import Problem
from opteq.problems.certificate import Certificate, existence, for_finite_weights, unknown
from opteq.problems.hidden import BoundMap
from opteq.problems.opteq import Block, OptEq
from opteq.regularizers import Regularizer
from opteq.states import State, single, working_dtype


class AffineOptEq(Problem):
    """The fixed points of ``A^-1 o T o A`` with ``A(u) = matrix u + shift``: the minimisers of ``phi o A``.

    They are the features of the inner OptEq in other coordinates. The step is a prox only for an orthogonal matrix, so
    its Jacobian is not symmetric in general.

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
        matrix = check_invertible("matrix", matrix)
        shift = matrix.new_zeros(matrix.shape[0]) if shift is None else check_tensor("shift", shift).to(matrix)
        if shift.shape != (matrix.shape[0],):
            raise ValueError(f"shift should have length {matrix.shape[0]}; got shape {tuple(shift.shape)}")
        self.problem = problem
        self.matrix = nn.Parameter(matrix.detach().clone())
        self.shift = nn.Parameter(shift.detach().clone())

    def bind(self, x: Tensor) -> BoundAffineOptEq:
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
        return torch.zeros_like(self.block.back(self.block.c))

    def outer(self, u: State) -> Tensor:
        """``A(u)``."""
        return single(u) @ self.matrix.T + self.shift

    def step(self, y: State) -> Tensor:
        inner = self.block(self.outer(y)) - self.shift
        moved: Tensor = inner @ self.inverse.T
        return moved

    def objective(self, y: State) -> Tensor:
        """The Moreau envelope of phi at ``A u``: explicit, with the minimisers and the least value of ``phi o A``."""
        return self.block.merit(self.outer(y))


class Splitting(Problem):
    """Features that minimise ``phi + gamma R`` exactly, for a convex R known by its prox (the l1 norm, say).

    ``T o prox`` would minimise another function, with R's Moreau envelope in place of R. The Douglas-Rachford step
    ``u <- u + T(2 p - u) - p`` with ``p = prox(u)`` minimises the sum itself; the features are p.

    Args:
        problem: an OptEq without a regulariser of its own, which gives T.
        regularizer: a convex R with a prox.
        gamma: its weight.

    >>> import torch, opteq
    >>> inner = opteq.OptEq(opteq.operators.Dense(1, 1), activation="relu")
    >>> _ = inner.W.weight.data.fill_(0.5)  # phi(z) = 3/2 z^2 - 2 z for z >= 0, so that phi + z is least at 1/3
    >>> layer = opteq.Equilibrium(opteq.Splitting(inner, opteq.regularizers.L1()), opteq.Anderson(tol=1e-6))
    >>> round(layer(torch.ones(1, 1)).item(), 4)
    0.3333
    """

    def __init__(self, problem: OptEq, regularizer: Regularizer, gamma: float = 1.0) -> None:
        super().__init__()
        if not isinstance(problem, OptEq) or problem.regularizer is not None:
            raise TypeError("Splitting wraps an OptEq without a regulariser of its own")
        convex = isinstance(regularizer, Regularizer) and regularizer.convex
        if not convex or type(regularizer).prox is Regularizer.prox:
            raise TypeError(f"Splitting needs a convex regulariser with a prox; got {regularizer!r}")
        self.problem = problem
        self.regularizer = regularizer
        self.gamma = check_positive("gamma", gamma)

    def bind(self, x: Tensor) -> BoundSplitting:
        return BoundSplitting(self.problem.bind(x).block, self.regularizer, self.gamma)

    @for_finite_weights
    def certificate(self) -> Certificate:
        """Where T contracts, phi is strongly convex, so ``phi + gamma R`` has exactly one minimiser.

        That is about the features; several u may belong to them.
        """
        inner = self.problem.certificate()
        if inner.contraction is None or inner.contraction >= 1:
            return unknown("T is not known to contract")
        why = "phi is strongly convex where T contracts, so phi + gamma R has exactly one minimiser: the features"
        averaged = "a Douglas-Rachford step is firmly nonexpansive: it converges, at a rate that is not computed here"
        lipschitz = inner.reasons["lipschitz"]
        if inner.lipschitz is not None:
            lipschitz += "; a convex R does not loosen it, for subgradients are monotone"
        reasons = {"exists": why, "unique": why, "contraction": averaged, "lipschitz": lipschitz}
        return Certificate(True, True, 1.0, inner.lipschitz, reasons)


class BoundSplitting(BoundMap):
    """The Douglas-Rachford map with its input bound."""

    def __init__(self, block: Block, regularizer: Regularizer, gamma: float) -> None:
        self.block = block
        self.regularizer = regularizer
        self.gamma = gamma
        self.coupled = regularizer.couples_batch

    def start(self) -> Tensor:
        return torch.zeros_like(self.block.back(self.block.c))

    def features(self, y: State) -> Tensor:
        return self.regularizer.prox(single(y), self.gamma)

    def step(self, y: State) -> Tensor:
        u, p = single(y), self.features(y)
        return u + self.block(2 * p - u) - p

    def objective(self, y: State) -> Tensor:
        """``phi + gamma R`` at ``T(2 p - u)``, which is p at the fixed point; explicit, and finite everywhere."""
        w = 2 * self.features(y) - single(y)
        return self.block.envelope(w, 1.0) + self.gamma * self.regularizer.value(self.block(w))
