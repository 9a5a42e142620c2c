"""The proximal gradient step of an objective, as a hidden problem."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor

from opteq.common.derivatives import gradient, pullback, values_and_gradient
from opteq.penalties.scaled import ScaledPenalty
from opteq.problems.hidden import Hidden, Structure
from opteq.states import State, inner, map_state, per_row, total


class ProximalGradient(Hidden):
    """``F + h`` with its input bound, and the step ``prox_{t h}(y - t grad F(y))``.

    In the form of all hidden problems it is ``t (F + h)``, with penalty ``t h`` and smooth part ``t F - 1/2 |y|^2``;
    :meth:`terms` and :meth:`objective` give F and h themselves. Subclasses give the terms of F, and closed forms of its
    gradient and Hessian where they know them.

    Attributes:
        length: the step length t, ``(B,)``.
        penalty: ``t h``.
        penalised: whether there is an h; False where it is zero.
    """

    structure = Structure.POSITIVE  # so that conjugate gradients solve the backward system, and say where it is not

    length: Tensor
    penalty: ScaledPenalty  # type: ignore[assignment]
    penalised: bool

    @abstractmethod
    def smooth_parts(self, y: State) -> dict[str, Tensor]:
        """The terms of F, one value per sample each."""

    def value(self, y: State) -> Tensor:
        """F(y), one number per sample."""
        return total(self.smooth_parts(y).values())

    def gradient(self, y: State) -> State:
        """``grad F(y)``."""
        return gradient(self.value, y)

    def value_and_gradient(self, y: State) -> tuple[Tensor, State]:
        """Both in one pass."""
        return values_and_gradient(self.value, y)

    def terms(self, y: State) -> dict[str, Tensor]:
        """The terms of F, and the penalty where there is one; one value per sample each."""
        terms = dict(self.smooth_parts(y))
        if self.penalised:
            name = "penalty" if "penalty" not in terms else "penalty (non-smooth)"
            terms[name] = self._penalty_of(y)
        return terms

    def smooth(self, y: State) -> Tensor:
        """``t F - 1/2 |y|^2``."""
        values = self.value(y)
        return self.length.to(values.dtype) * values - inner(y, y) / 2

    def preactivation(self, y: State) -> State:
        """``y - t grad F(y)``."""
        return self._forward_step(y, self.gradient(y))

    def negative_hessian_at(self, y: State) -> Callable[[State], State]:
        """``v -> v - t H v`` with H the Hessian of F."""
        hessian = self.hessian_at(y)
        return lambda v: self._forward_step(v, hessian(v))

    def hessian_at(self, y: State) -> Callable[[State], State]:
        """``v -> H v`` with H the Hessian of F at y."""
        return pullback(self.gradient, y)[1]  # H is symmetric, so its transpose will do

    def step_and_merit(self, y: State) -> tuple[State, Tensor]:
        values, slope = self.value_and_gradient(y)
        merit = values + self._penalty_of(y) if self.penalised else values
        return self.activate(self._forward_step(y, slope)), merit

    def _forward_step(self, y: State, slope: State) -> State:
        def one(part: Tensor, its_slope: Tensor) -> Tensor:
            return part - per_row(self.length, part) * its_slope

        return map_state(one, y, slope)
