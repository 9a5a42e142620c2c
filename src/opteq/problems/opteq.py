"""OptEq: the network whose state minimises a convex quadratic under a penalty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from opteq import penalties
from opteq.common.errors import ConvergenceError
from opteq.common.validate import check_positive
from opteq.operators import LinearMap, Operator
from opteq.penalties import Penalty
from opteq.problems.base import Problem, check_injection, check_operator, check_unhooked, inject
from opteq.problems.certificate import Certificate, SmoothPart, for_finite_weights
from opteq.problems.hidden import Formulation, Hidden, Reduction, Structure, SymmetricLinearisation
from opteq.problems.opteq_certificate import certify, check_prior
from opteq.regularizers import Regularizer
from opteq.solvers import Anderson
from opteq.solvers.base import FixedPointTask
from opteq.states import State, inner, single, sum_over_sample


class OptEq(Problem):
    """``min sum f(y) + 1/2 |y|^2 - |W'y|^2 / (2 mu) - <U x + b, y>``, with features ``z = W'y / mu``.

    The step is ``y <- sigma(W W'y / mu + U x + b)``; for the features it is ``z <- W' sigma(W z + U x + b) / mu``, the
    form of the paper. It contracts when ``L |W|^2 < mu``, with L the largest slope of sigma.

    Args:
        W: operator from features to state; its adjoint maps back.
        U: module from the input to the space of the state (its bias is b); None for the input itself.
        activation: name or :class:`~opteq.penalties.Penalty`. A :class:`~opteq.penalties.LinearActivation` gives the
            variant with a symmetric positive definite S.
        mu: divides the coupling; ``mu >= L |W|^2`` makes the step a prox (Theorem 1).
        regularizer: a smooth R on the features; the objective gains ``mu gamma R(z)``, so that the features minimise
            ``phi + gamma R`` (Theorem 4). A non-smooth R enters as its envelope,
            ``regularizers.Envelope(R, gamma)``, or exactly, by :class:`~opteq.problems.variants.Splitting`.
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
        self.regularizer, self.gamma = check_prior(regularizer, gamma)

    def bind(self, x: Tensor) -> BoundOptEq:
        """``U x + b`` and the bounded W, computed once."""
        return BoundOptEq(
            self, Block(check_unhooked(self.W, "W").prepare(), inject(self.U, x, self.W), self.penalty, self.mu)
        )

    def known_contraction(self) -> bool:
        """Whether the bound on W makes a step contract, for all weights within it."""
        if isinstance(self.penalty, nn.Module):  # its slope is learned, and reading it would make a device wait
            return False
        bound = self.W.bound
        return bound is not None and self.penalty.lipschitz * bound**2 < self.mu

    def smooth_part(self, norm: Callable[[Operator], float]) -> SmoothPart | None:
        if self.regularizer is not None:
            return None
        size = norm(self.W)
        return SmoothPart(-(size**2) / self.mu, 0.0, size / self.mu, self.U)

    @for_finite_weights
    def certificate(self) -> Certificate:
        """Theorem 1; see :func:`~opteq.problems.opteq_certificate.certify`."""
        return certify(self.W, self.U, self.penalty, self.mu, self.regularizer, self.gamma)


class Block:
    """``T = prox_phi`` where ``phi = psi* - 1/2 |.|^2`` and ``psi(z) = sum antiderivative(W z + c) / mu``.

    Theorem 1 of OptEq. ``phi`` itself needs an inverse of W, its values at images of T do not: that is what the
    methods here use (for any u with ``p = T(u)``, ``phi(p) = <p, u> - psi(u) - 1/2 |p|^2``).
    """

    def __init__(self, W: LinearMap, c: Tensor, penalty: Penalty, mu: float) -> None:
        self.W = W
        self.c = c
        self.penalty = penalty
        self.mu = mu

    def preactivation(self, z: Tensor) -> Tensor:
        """``W z + c``."""
        return self.W(z) + self.c

    def activation(self, z: Tensor) -> Tensor:
        """``sigma(W z + c)``."""
        return self.penalty.prox(self.preactivation(z))

    def back(self, u: Tensor) -> Tensor:
        """``W' u / mu``."""
        z = self.W.adjoint(u)
        return z if self.mu == 1 else z / self.mu

    def __call__(self, z: Tensor) -> Tensor:
        """``T(z)``."""
        return self.back(self.activation(z))

    def potential(self, z: Tensor) -> Tensor:
        """``psi(z)``, of which T is the gradient."""
        return self.penalty.potential(self.preactivation(z)) / self.mu

    def merit(self, z: Tensor) -> Tensor:
        """``1/2 |z|^2 - psi(z)``: the Moreau envelope of phi, whose gradient is ``z - T(z)``."""
        return half_square(z) - self.potential(z)

    def envelope(self, u: Tensor, alpha: float | Tensor) -> Tensor:
        """The Moreau envelope of phi with parameter ``1 - alpha`` at ``alpha T(u) + (1 - alpha) u``.

        For ``alpha = 1`` that is phi itself at ``T(u)``.
        """
        image = self(u)
        return (
            sum_over_sample(image * u) - self.potential(u) - half_square(image) + (1 - alpha) * half_square(u - image)
        )

    def preimage(self, v: Tensor, alpha: float, tol: float = 1e-12, max_steps: int = 500) -> Tensor:
        """The u with ``alpha T(u) + (1 - alpha) u = v``, for ``alpha < 1``.

        ``u -> v + alpha (u - T(u))`` has it as fixed point and contracts by alpha where T is a prox.
        """
        solver = Anderson(tol=tol, max_steps=max_steps)
        with torch.no_grad():
            outcome = solver.solve(lambda u: v + alpha * (u - self(u)), v)  # type: ignore[operator, arg-type]
        if bool((outcome.codes > 0).any()):
            raise ConvergenceError(
                f"the envelope's preimage was not found (worst residual {float(outcome.residual.max()):.1e} after "
                f"{max_steps} steps); alpha={alpha} is too close to 1, or W is not bounded by sqrt(mu)"
            )
        assert isinstance(outcome.state, Tensor)
        return outcome.state

    def jacobian_at(self, z: Tensor) -> Callable[[Tensor], Tensor]:
        """``v -> W' D W v / mu``, symmetric, with D the activation's derivative at ``z``."""
        local = self.penalty.linearise(self.preactivation(z))
        return lambda v: self.back(local.derivative(self.W(v)))


class BoundOptEq(Hidden):
    """OptEq with its input bound, in closed form."""

    def __init__(self, problem: OptEq, block: Block) -> None:
        self.block = block
        self.penalty = problem.penalty
        self.mu = problem.mu
        self.regularizer = problem.regularizer
        self.gamma = problem.gamma
        if self.regularizer is None:
            self.convex = self.contracts = problem.known_contraction()
            self.structure = Structure.POSITIVE if self.convex else Structure.SYMMETRIC
            self.has_merit = problem.penalty.has_potential
            self.quadratic = True
        else:
            self.coupled = self.regularizer.couples_batch

    def start(self) -> Tensor:
        return torch.zeros_like(self.block.c)

    def features(self, y: State) -> Tensor:
        return self.block.back(single(y))

    def smooth_terms(self, y: State) -> dict[str, Tensor]:
        """``-|W'y|^2 / (2 mu)``, ``-<c, y>`` and, where there is a regulariser, ``mu gamma R(z)``."""
        z = self.features(y)
        terms = {"coupling": -self.mu * half_square(z), "input": -inner(self.block.c, y)}
        if self.regularizer is not None:
            terms["regularizer"] = self.mu * self.gamma * self.regularizer.value(z)
        return terms

    def preactivation(self, y: State) -> State:
        """``W (z - gamma grad R(z)) + c``."""
        return self._preactivation_of(self.features(y))

    def _preactivation_of(self, z: Tensor) -> Tensor:
        moved = z if self.regularizer is None else z - self.gamma * self.regularizer.gradient(z)
        return self.block.preactivation(moved)

    def step_by_step(self, y: State) -> tuple[State, State | None, State | None]:
        z = self.features(y)
        inside = self._preactivation_of(z)
        return self.penalty.prox(inside), inside, z

    def negative_hessian_at(self, y: State) -> Callable[[State], State]:
        """``v -> W (I - gamma hess R(z)) W'v / mu``."""
        block, regularizer, gamma = self.block, self.regularizer, self.gamma
        if regularizer is None:
            return lambda v: block.W(block.back(single(v)))
        z = self.features(y).detach()

        def product(v: State) -> Tensor:
            u = block.back(single(v))
            return block.W(u - gamma * regularizer.curvature(z, u))

        return product

    def linearise(self, y: State, inside: State | None = None) -> SymmetricLinearisation:
        """``J = D M``, with the smaller adjoint system where features are no larger than the state."""
        M, one = self.negative_hessian_at(y), single(y)[:1]
        D = self.penalty.linearise(single(self.preactivation(y) if inside is None else inside))
        local = SymmetricLinearisation(M, D.factor, D.factor_adjoint, D.derivative)  # type: ignore[arg-type]
        if self.regularizer is not None or self.features(one).numel() > one.numel():
            return local
        block, mu = self.block, self.mu

        def restrict(g: State) -> Tensor:
            return block.W.adjoint(D.derivative(single(g)))

        def expand(u: State) -> Tensor:
            carried = block.W(single(u))
            return carried if mu == 1 else carried / mu

        return replace(local, reduction=Reduction(restrict, expand, of_features=True))

    def feature_form(self) -> Formulation:
        """``z <- W' sigma(W z + c) / mu``, begun at zero features."""
        if self.regularizer is not None:
            raise ValueError("a solver that works on features needs OptEq without a regulariser of its own")
        return self._form_from(torch.zeros_like(self.features(self.start())))

    def _form_from(self, start: Tensor) -> Formulation:
        block = self.block
        task = FixedPointTask(lambda z: block(single(z)), start, damping=self.damping, coupled=self.coupled)
        return Formulation(task, lambda z: block.activation(single(z)), self.features)

    def compact_form(self) -> Formulation | None:
        """The problem in its features, where these have no more entries than the state.

        It begins with the step from zero, and its state is half a step further. Only where a step contracts:
        ``y = sigma(W z + c)`` then moves by at most ``L |W| |T(z) - z|`` in a step, and ``|z| <= |W| |y| / mu``. So
        the relative residual of y is at most ``L |W|^2 / mu < 1`` times that of z, which is reported.
        """
        if not self.contracts:
            return None
        start = self.block.back(self.penalty.prox(self.block.c))
        return self._form_from(start) if start.numel() <= self.block.c.numel() else None

    def step_and_merit(self, y: State) -> tuple[State, Tensor]:
        """The step, and the merit ``1/2 |z|^2 - psi(z)`` that plain steps decrease, from the same pre-activation."""
        z = self.features(y)
        inside = self.block.preactivation(z)
        return self.penalty.prox(inside), half_square(z) - self.penalty.potential(inside) / self.mu


def half_square(z: Tensor) -> Tensor:
    """``1/2 |z|^2``, one value per sample."""
    return sum_over_sample(z.to(torch.promote_types(z.dtype, torch.float32)).square()) / 2
