"""OptEq with a regulariser that has kinks, solved for what it says and not for its envelope."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.common.validate import check_positive
from opteq.problems.base import Problem
from opteq.problems.certificate import Certificate, for_finite_weights
from opteq.problems.hidden import BoundMap, FeatureForm
from opteq.problems.opteq import Block, OptEq
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
        if (
            not isinstance(regularizer, Regularizer)
            or not regularizer.convex
            or type(regularizer).prox is Regularizer.prox
        ):
            raise TypeError(f"Splitting needs a convex regulariser with a prox; got {regularizer!r}")
        self.problem = problem
        self.regularizer = regularizer
        self.gamma = check_positive("gamma", gamma)

    def bind(self, x: Tensor) -> BoundSplitting:
        """T for this input, once."""
        return BoundSplitting(self.problem.bind(x).block, self.regularizer, self.gamma)

    @for_finite_weights
    def certificate(self) -> Certificate:
        """Where T contracts, phi is strongly convex, so ``phi + gamma R`` has exactly one minimiser.

        That is about the features; several u may belong to them.
        """
        inner = self.problem.certificate()
        if inner.contraction is None or inner.contraction >= 1:
            why = "T is not known to contract"
            return Certificate(reasons=dict.fromkeys(("exists", "unique", "contraction", "lipschitz"), why))
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
        """Zeros."""
        return torch.zeros_like(self.block.back(self.block.c))

    def features(self, y: State) -> Tensor:
        """``p = prox(u)``."""
        return self.regularizer.prox(single(y), self.gamma)

    def step(self, y: State) -> Tensor:
        """``u + T(2 p - u) - p``."""
        u, p = single(y), self.features(y)
        return u + self.block(2 * p - u) - p

    def feature_form(self) -> FeatureForm:
        """There is none: the step is made for u, which p does not determine."""
        raise ValueError("a solver that works on features can't solve a Splitting, whose step is not on its features")

    def objective(self, y: State) -> Tensor:
        """``phi + gamma R`` at ``T(2 p - u)``, which is p at the fixed point; explicit, and finite everywhere."""
        w = 2 * self.features(y) - single(y)
        return self.block.envelope(w, 1.0) + self.gamma * self.regularizer.value(self.block(w))
