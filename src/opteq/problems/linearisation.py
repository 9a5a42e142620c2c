"""The derivative of one step at a state, in the form that a backward pass can solve with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from opteq.states import State

Product = Callable[[State], State]


class Structure(Enum):
    """What is known of ``I - J`` before a single product: it decides which linear solver is the right one."""

    POSITIVE = "symmetric and positive definite after scaling: conjugate gradients"
    SYMMETRIC = "symmetric after scaling: MINRES"
    GENERAL = "no symmetry: GMRES"


@dataclass(frozen=True)
class Linearisation:
    """The Jacobian J of a step, as products."""

    product: Product
    adjoint: Product


@dataclass(frozen=True)
class Reduction:
    """The adjoint system where ``M = B C`` passes through fewer numbers, the features of OptEq for instance.

    With ``u = C F w`` the system ``(I - F' M F) w = F' g`` becomes ``(I - C D B) u = C D g`` with ``v = g + B u``. It
    is symmetric where C is a multiple of ``B'``, and has the same eigenvalues but for ones.

    Attributes:
        product: ``u -> C D B u``.
        restrict: ``g -> C D g``.
        expand: ``u -> B u``.
    """

    product: Product
    restrict: Product
    expand: Product


@dataclass(frozen=True)
class SymmetricLinearisation:
    """``J = F F' M`` with M symmetric, where ``F F'`` is the derivative of the activation.

    The adjoint system ``(I - M F F') v = g`` becomes the symmetric ``(I - F' M F) w = F' g`` with ``v = g + M F w``; it
    needs no inverse of F, so units that a ReLU switched off are no trouble.

    Attributes:
        curvature: ``v -> M v``, minus the Hessian of the smooth part.
        factor: ``w -> F w``.
        factor_adjoint: ``v -> F' v``.
        reduction: a smaller system with the same answer, where there is one.
    """

    curvature: Product
    factor: Product
    factor_adjoint: Product
    reduction: Reduction | None = None

    def product(self, v: State) -> State:
        """``J v``."""
        return self.factor(self.factor_adjoint(self.curvature(v)))

    def adjoint(self, v: State) -> State:
        """``J' v``."""
        return self.curvature(self.factor(self.factor_adjoint(v)))

    def scaled(self, w: State) -> State:
        """``F' M F w``, the symmetric form of J."""
        return self.factor_adjoint(self.curvature(self.factor(w)))
