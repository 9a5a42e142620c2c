"""OptEq with a regulariser that has kinks, solved for what it says and not for its envelope."""

from __future__ import annotations

from torch import Tensor

from opteq.problems.base import Problem
from opteq.problems.block import Block
from opteq.problems.branch import check_positive
from opteq.problems.certificate import Certificate
from opteq.problems.hidden import BoundMap
from opteq.problems.opteq import OptEq
from opteq.regularizers import Regularizer
from opteq.states import State, single


class Splitting(Problem):
    """Features that minimise ``phi + gamma R`` exactly, for a convex R known by its prox (the l1 norm, say).

    ``T o prox`` minimises another function: R's Moreau envelope in R's place. The Douglas-Rachford step
    ``u <- u + T(2 p - u) - p`` with ``p = prox(u)`` does not; its features are p.

    Args:
        problem: an OptEq without a regulariser of its own, which gives T.
        regularizer: a convex R with a prox.
        gamma: its weight.
    """

    def __init__(self, problem: OptEq, regularizer: Regularizer, gamma: float = 1.0) -> None:
        super().__init__()
        if not isinstance(problem, OptEq) or problem.regularizer is not None:
            raise TypeError("Splitting wraps an OptEq without a regulariser of its own")
        if not isinstance(regularizer, Regularizer) or not regularizer.convex:
            raise TypeError(f"Splitting needs a convex regulariser with a prox; got {regularizer!r}")
        self.problem = problem
        self.regularizer = regularizer
        self.gamma = check_positive("gamma", gamma)

    def bind(self, x: Tensor) -> BoundSplitting:
        """T for this input, once."""
        return BoundSplitting(self.problem.bind(x).block, self.regularizer, self.gamma)

    def certificate(self) -> Certificate:
        """Where T contracts, phi is strongly convex, so ``phi + gamma R`` has exactly one minimiser."""
        inner = self.problem.certificate()
        unknown = "Douglas-Rachford converges for any convex pair, at a rate that is not computed here"
        reasons = {"contraction": unknown, "lipschitz": "not derived for this splitting"}
        if inner.contraction is not None and inner.contraction < 1:
            why = "phi is strongly convex where T contracts, so phi + gamma R has exactly one minimiser"
            return Certificate(True, True, None, None, {**reasons, "exists": why, "unique": why})
        why = "T is not known to contract"
        return Certificate(None, None, None, None, {**reasons, "exists": why, "unique": why})


class BoundSplitting(BoundMap):
    """The Douglas-Rachford map with its input bound."""

    def __init__(self, block: Block, regularizer: Regularizer, gamma: float) -> None:
        self.block = block
        self.regularizer = regularizer
        self.gamma = gamma
        self.coupled = regularizer.couples_batch

    def start(self) -> Tensor:
        """Zeros."""
        return self.block.back(self.block.c) * 0

    def features(self, y: State) -> Tensor:
        """``p = prox(u)``."""
        return self.regularizer.prox(single(y), self.gamma)

    def step(self, y: State) -> Tensor:
        """``u + T(2 p - u) - p``."""
        u, p = single(y), self.features(y)
        return u + self.block(2 * p - u) - p

    def objective(self, y: State) -> Tensor:
        """``phi + gamma R`` at ``T(2 p - u)``, which is p at the fixed point; explicit, and finite everywhere."""
        w = 2 * self.features(y) - single(y)
        return self.block.envelope(w, 1.0) + self.gamma * self.regularizer.value(self.block(w))
