"""OptEq: the network whose state minimises a convex quadratic under a penalty."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from opteq import penalties
from opteq.operators import Operator, module_norm, unhooked
from opteq.penalties import Linearised, Penalty
from opteq.problems.base import Problem
from opteq.problems.branches.branch import check_injection, check_operator, check_positive, inject, unknown_norm
from opteq.problems.certificate import Certificate, existence, for_finite_weights
from opteq.problems.deep.block import Block, half_square
from opteq.problems.hidden import FeatureForm, Hidden
from opteq.problems.linearisation import Reduction, Structure, SymmetricLinearisation
from opteq.problems.prior import check_prior, prior_factors
from opteq.regularizers import Regularizer
from opteq.states import State, inner, single


class OptEq(Problem):
    """``min sum f(y) + 1/2 |y|^2 - |W'y|^2 / (2 mu) - <U x + b, y>``, with features ``z = W'y / mu``.

    The step is ``y <- sigma(W W'y / mu + U x + b)``; for the features it is ``z <- W' sigma(W z + U x + b) / mu``, the
    form of the paper. It contracts when ``L |W|^2 < mu``, with L the largest slope of sigma.

    Args:
        W: operator from features to state; its adjoint goes back.
        U: what carries the input into the state's space (its bias is b); None takes the input as it is.
        activation: name or :class:`~opteq.penalties.Penalty`. A :class:`~opteq.penalties.LinearActivation` gives the
            variant with a symmetric positive definite S.
        mu: divides the coupling; ``mu >= L |W|^2`` makes the step a prox (Theorem 1).
        regularizer: a smooth R on the features; the objective gains ``mu gamma R(z)``, so that the features minimise
            ``phi + gamma R`` (Theorem 4). A non-smooth R enters as its envelope,
            ``regularizers.Envelope(R, gamma)``, or exactly, by :class:`~opteq.problems.variants.splitting.Splitting`.
        gamma: weight of the regulariser.

    >>> import torch, opteq
    >>> problem = opteq.OptEq(opteq.operators.Dense(1, 1), activation="relu")
    >>> _ = problem.W.weight.data.fill_(0.5)
    >>> layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-6))
    >>> round(layer(torch.ones(1, 1)).item(), 4)
    0.6667
    """

    def __init__(
        self,
        W: Operator,
        U: nn.Module | None = None,
        activation: str | Penalty = "relu",
        mu: float = 1.0,
        regularizer: Regularizer | None = None,
        gamma: float = 1.0,
    ) -> None:
        super().__init__()
        self.W = check_operator(W, "W")
        self.U = check_injection(U)
        self.penalty = penalties.get(activation)
        self.mu = check_positive("mu", mu)
        self.gamma = check_positive("gamma", gamma)
        self.regularizer = check_prior(regularizer)

    def bind(self, x: Tensor) -> BoundOptEq:
        """``U x + b`` and the bounded W, computed once."""
        return BoundOptEq(
            self, Block(unhooked(self.W, "W").prepare(), inject(self.U, x, self.W), self.penalty, self.mu)
        )

    def known_contraction(self) -> bool:
        """Whether the bound on W alone, whatever the weights, makes a step contract."""
        if isinstance(self.penalty, nn.Module):  # its slope is learned, and reading it would make a device wait
            return False
        bound = self.W.bound
        return bound is not None and self.penalty.lipschitz * bound**2 < self.mu

    @for_finite_weights
    def certificate(self) -> Certificate:
        """Theorem 1, with existence put right: strict convexity alone does not give a minimiser.

        With a regulariser: a step takes ``z - gamma grad R(z)``, which stretches distances by some factor, and
        ``<dz, d(z - gamma grad R)>`` is at most ``|dz|^2`` times another one, which is 1 for every convex R. The first
        bounds the step. The second is enough for uniqueness and the Lipschitz constant: sigma is the gradient of a
        convex function, so ``<dy, dt> >= |dy|^2 / L`` for the states y and pre-activations t of two equilibria.
        """
        norm, slope = float(unhooked(self.W, "W").norm()), self.penalty.lipschitz
        factor = slope * norm**2 / self.mu
        stretch, pull = prior_factors(self.regularizer, self.gamma)
        contraction = None if stretch is None else factor * stretch
        exists, unique, reasons = self._existence(factor, contraction)
        if contraction is None:
            reasons["contraction"] = f"the gradient of {_name(self.regularizer)} has no known Lipschitz constant"
        else:
            reasons["contraction"] = f"L |W|^2 / mu with L = {slope:.4g} and |W| <= {norm:.4g}"
            if self.regularizer is not None:
                reasons["contraction"] += f", times |I - gamma hess R| <= {stretch:.4g}"
        carried = 1.0 if self.U is None else module_norm(self.U)
        lipschitz = None
        if pull is None:
            reasons["lipschitz"] = reasons["contraction"]
        elif factor * pull >= 1:
            reasons["lipschitz"] = f"needs L |W|^2 / mu below {1 / pull:.4g}; it is bounded by {factor:.4g}"
        elif carried is None:
            reasons["lipschitz"] = unknown_norm(self.U)
        else:
            lipschitz = float(carried) * slope * norm / self.mu / (1 - factor * pull)
            share = "" if pull == 1 else f"{pull:.4g} "
            reasons["lipschitz"] = (
                f"|U| L |W| / mu / (1 - {share}L |W|^2 / mu), since sigma is a convex function's gradient"
            )
        return Certificate(exists, unique, contraction, lipschitz, reasons)

    def _existence(self, factor: float, contraction: float | None) -> tuple[bool | None, bool | None, dict[str, str]]:
        R = self.regularizer
        banach = contraction is not None and contraction < 1
        if R is not None and R.convex and factor < 1 and not banach:
            why = "phi is strongly convex where L |W|^2 < mu, so phi + gamma R has exactly one minimiser"
            return True, True, {"exists": why, "unique": why}
        if R is None or R.gradient_lipschitz is not None or not self.penalty.bounded:
            return existence(contraction, self.penalty.bounded)
        # Decorrelation, for one, has a gradient that jumps where a feature vanishes: Brouwer needs it continuous.
        return existence(contraction, False, f"the gradient of {_name(R)} is not known to be continuous")


class BoundOptEq(Hidden):
    """OptEq with its input bound, in closed form."""

    def __init__(self, problem: OptEq, block: Block) -> None:
        self.block = block
        self.penalty = problem.penalty
        self.mu = problem.mu
        self.regularizer = problem.regularizer
        self.gamma = problem.gamma
        if self.regularizer is None:
            self.contracts = problem.known_contraction()
            self.structure = Structure.POSITIVE if self.contracts else Structure.SYMMETRIC
            self.has_merit = problem.penalty.has_potential
            self.quadratic = True
        else:
            self.coupled = self.regularizer.couples_batch

    def start(self) -> Tensor:
        """Zeros."""
        return torch.zeros_like(self.block.c)

    def features(self, y: State) -> Tensor:
        """``z = W'y / mu``."""
        return self.block.back(single(y))

    def smooth(self, y: State) -> Tensor:
        """``-|W'y|^2 / (2 mu) - <c, y> + mu gamma R(z)``."""
        return torch.stack(list(self.smooth_terms(y).values())).sum(dim=0)

    def smooth_terms(self, y: State) -> dict[str, Tensor]:
        """Coupling, input and, where there is one, the regulariser."""
        z = self.features(y)
        terms = {"coupling": -self.mu * half_square(z), "input": -inner(self.block.c, y)}
        if self.regularizer is not None:
            terms["regularizer"] = self.mu * self.gamma * self.regularizer.value(z)
        return terms

    def step(self, y: State) -> State:
        """``sigma(W z + c)``."""
        return self.block.activation(self.features(y)) if self.regularizer is None else super().step(y)

    def preactivation(self, y: State) -> Tensor:
        """``W (z - gamma grad R(z)) + c``."""
        z = self.features(y)
        if self.regularizer is not None:
            z = z - self.gamma * self.regularizer.gradient(z)
        return self.block.preactivation(z)

    def curvature_at(self, y: State) -> Callable[[State], State]:
        """``v -> W (I - gamma hess R(z)) W'v / mu``."""
        block, regularizer, gamma = self.block, self.regularizer, self.gamma
        if regularizer is None:
            return lambda v: block.W(block.back(single(v)))
        z = self.features(y).detach()

        def product(v: State) -> Tensor:
            u = block.back(single(v))
            return block.W(u - gamma * regularizer.curvature(z, u))

        return product

    def feature_objective(self, y: State) -> Tensor:
        """``phi(z) + gamma R(z)`` at ``z = W'y / mu``: the objective in the paper's variable, with no inverse of W.

        It is ``(G(y) - k n) / mu`` for n units; equal to phi where y is the least state with these features, as an
        equilibrium is.
        """
        units = math.prod(self.block.c.shape[1:])
        return (self.objective(y) - self.penalty.offset * units) / self.mu

    def linearise(self, y: State) -> SymmetricLinearisation:
        """As for every hidden problem; where features are not larger than the state, by way of them."""
        z = self.features(y)
        if self.regularizer is not None or z.numel() > single(y).numel():
            return super().linearise(y)
        local = self.penalty.linearise(self.block.preactivation(z))
        return SymmetricLinearisation(
            self.curvature_at(y),
            lambda w: local.factor(single(w)),
            lambda v: local.factor_adjoint(single(v)),
            self._reduction(local),
        )

    def _reduction(self, local: Linearised) -> Reduction:
        """``J`` of the features, ``W' D W / mu``, which is symmetric."""
        block, mu = self.block, self.mu

        def carry(u: State) -> Tensor:
            carried = block.W(single(u))
            return carried if mu == 1 else carried / mu

        return Reduction(
            product=lambda u: block.W.adjoint(local.derivative(carry(u))),
            restrict=lambda g: block.W.adjoint(local.derivative(single(g))),
            expand=carry,
        )

    def feature_form(self) -> FeatureForm:
        """``z <- W' sigma(W z + c) / mu``, begun at zero features."""
        if self.regularizer is not None:
            raise ValueError("a solver that works on features needs OptEq without a regulariser of its own")
        return FeatureForm(
            lambda z: self.block(single(z)),
            torch.zeros_like(self.features(self.start())),
            lambda z: self.block.activation(single(z)),
            self._measured_features if self.has_merit else None,
        )

    def compact_form(self) -> FeatureForm | None:
        """The paper's variable, where it is not the larger one.

        It begins with half a step less, and its state is half a step further. Only where a step contracts:
        ``y = sigma(W z + c)`` then moves by at most ``L |W| |T(z) - z|`` in a step, and ``|z| <= |W| |y| / mu``. So
        the relative residual of y is at most ``L |W|^2 / mu < 1`` times that of z, which is reported.
        """
        if not self.contracts:
            return None
        form = self.feature_form()
        return form if single(form.start).numel() <= self.block.c.numel() else None

    def _measured_features(self, z: State) -> tuple[State, Tensor]:
        """The same for features: the step and its merit."""
        inside = self.block.preactivation(single(z))
        merit = half_square(single(z)) - self.penalty.potential(inside) / self.mu
        return self.block.back(self.penalty.prox(inside)), merit

    def _measured(self, y: State) -> tuple[State, Tensor]:
        """The step, and the merit ``1/2 |z|^2 - psi(z)`` that plain steps decrease, from the same pre-activation."""
        z = self.features(y)
        inside = self.block.preactivation(z)
        merit = half_square(z) - self.penalty.potential(inside) / self.mu
        return self.penalty.prox(inside), merit


def _name(regularizer: Regularizer | None) -> str:
    return type(regularizer).__name__
