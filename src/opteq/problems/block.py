"""One layer ``T(z) = W' sigma(W z + c) / mu`` with its input bound, and the convex function that it is the prox of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opteq._errors import ConvergenceError
from opteq.operators import LinearMap
from opteq.operators.anchored import is_anchored
from opteq.operators.base import Around
from opteq.operators.conv import ConvMap
from opteq.operators.recalled import recalled_adjoint
from opteq.penalties import Penalty, ReLU
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
        self._around: Around | None = None
        self._steps: Around | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_around": None, "_steps": None}

    def preactivation(self, z: Tensor) -> Tensor:
        """``W z + c``."""
        return self.W(z) + self.c

    def activation(self, z: Tensor) -> Tensor:
        """``sigma(W z + c)``."""
        if type(self.penalty) is not ReLU:
            return self.penalty.prox(self.preactivation(z))
        # What steps have found out serves here, too.
        return self.W.rectified(z, self.c) if self._steps is None else self._steps.there(z)

    def has_fine_steps(self, z: Tensor) -> bool:
        """Whether :meth:`step` in a captured solve is finer at ``z`` than a product would be by itself."""
        return type(self.penalty) is ReLU and isinstance(self.W, ConvMap) and is_anchored(self.W, z)

    def features(self, y: Tensor) -> Tensor:
        """``W' y / mu`` of activations y."""
        z = self.W.adjoint(y) if self._steps is None else self._steps.back(y)
        return z if self.mu == 1 else z / self.mu

    def back(self, u: Tensor) -> Tensor:
        """``W' u / mu`` of any u."""
        z = self.W.adjoint(u)
        return z if self.mu == 1 else z / self.mu

    def recalled_back(self, y: Tensor, z: Tensor) -> Tensor:
        """:meth:`features` of a constant y, where they are known to be z, on a tape that leads to the weights."""
        back = recalled_adjoint(self.W, y, z)  # of which the derivative counts, not the value
        return back if self.mu == 1 else back / self.mu

    def __call__(self, z: Tensor) -> Tensor:
        """``T(z)``."""
        if type(self.penalty) is not ReLU:
            return self.back(self.activation(z))
        if self._around is None:
            self._around = self.W.rectified_back(self.c)
        image = self._around(z)
        return image if self.mu == 1 else image / self.mu

    def step(self, z: Tensor | None) -> Tensor:
        """``T(z)`` for a solver of ``z = T(z)``, which asks for it again and again; None stands for zero."""
        if type(self.penalty) is not ReLU:
            return self.back(self.penalty.prox(self.c) if z is None else self.activation(z))
        if self._steps is None:
            self._steps = self.W.rectified_back(self.c, solved_for=1 / self.mu)
        image = self._steps(z)
        return image if self.mu == 1 else image / self.mu

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
    """``1/2 |z|^2``, one number a sample."""
    return sum_over_sample(z.to(torch.promote_types(z.dtype, torch.float32)).square()) / 2
