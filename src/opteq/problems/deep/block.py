"""One layer ``T(z) = W' sigma(W z + c) / mu`` with its input bound, and the convex function that it is the prox of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opteq.common.errors import ConvergenceError
from opteq.operators import LinearMap
from opteq.penalties import Penalty
from opteq.solvers import Anderson
from opteq.states import sum_over_sample


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
        return lambda v: self.back(local.factor(local.factor_adjoint(self.W(v))))


def half_square(z: Tensor) -> Tensor:
    """``1/2 |z|^2``, one value per sample."""
    return sum_over_sample(z.to(torch.promote_types(z.dtype, torch.float32)).square()) / 2
