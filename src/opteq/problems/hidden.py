"""A problem with its input bound: its step, its Jacobian, and its objective with terms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from opteq.common.derivatives import gradient, pullback, values_and_gradient
from opteq.penalties import Penalty
from opteq.solvers.base import FixedPointTask
from opteq.states import State, blocks, inner, like, map_state, sample_rows, total

Product = Callable[[State], State]


class Structure(Enum):
    """The structure of ``I - J``, which decides which linear solver is used."""

    POSITIVE = "symmetric after scaling, and positive definite at a strict minimum: conjugate gradients"
    SYMMETRIC = "symmetric after scaling: MINRES"
    GENERAL = "no symmetry: GMRES"


@dataclass(frozen=True)
class Linearisation:
    """The Jacobian J of a step, as products."""

    product: Product
    adjoint: Product


@dataclass(frozen=True)
class Reduction:
    """The adjoint system ``(I - B C) v = g`` as ``(I - C B) u = C g`` with ``v = g + B u``.

    Attributes:
        restrict: ``g -> C g``.
        expand: ``u -> B u``.
        of_features: whether B is the transpose of the features' derivative. A gradient h of theirs, ``g = B h``, then
            needs no C: ``(I - C B) u = h`` and ``v = B u``.
    """

    restrict: Product
    expand: Product
    of_features: bool = False

    def product(self, u: State) -> State:
        """``C B u``."""
        return self.restrict(self.expand(u))


@dataclass(frozen=True)
class SymmetricLinearisation:
    """``J = F F' M`` with M symmetric, where ``D = F F'`` is the derivative of the activation.

    The adjoint system ``(I - M D) v = g`` becomes the symmetric ``(I - F' M F) w = F' g`` with ``v = g + M F w``; it
    needs no inverse of F, so units that a ReLU switched off are no trouble. Where ``M = B C`` passes through fewer
    numbers, the features of OptEq for instance, and C is a multiple of ``B'``, ``(I - C D B) u = C D g`` is smaller.

    Attributes:
        negative_hessian: ``v -> M v``, minus the Hessian of the smooth part.
        factor: ``w -> F w``.
        factor_adjoint: ``v -> F' v``.
        derivative: ``v -> D v``.
        reduction: the smaller system, where there is one.
    """

    negative_hessian: Product
    factor: Product
    factor_adjoint: Product
    derivative: Product
    reduction: Reduction | None = None

    @property
    def system(self) -> Reduction:
        """The symmetric form of the adjoint system, the smaller one where there is one."""
        return self.reduction or Reduction(self.factor_adjoint, lambda w: self.negative_hessian(self.factor(w)))

    def product(self, v: State) -> State:
        """``J v``."""
        return self.derivative(self.negative_hessian(v))

    def adjoint(self, v: State) -> State:
        """``J' v``."""
        return self.negative_hessian(self.derivative(v))

    def scaled(self, w: State) -> State:
        """``F' M F w``, the symmetric form of J."""
        return self.factor_adjoint(self.negative_hessian(self.factor(w)))


def _itself(y: State) -> State:
    return y


@dataclass(frozen=True)
class Formulation:
    """The fixed-point problem for a variable that determines the state: the state itself, or the features for instance.

    Attributes:
        task: in that variable, from the problem's own start.
        state: gives the state of a variable.
        of_state: gives the variable of a state.
    """

    task: FixedPointTask
    state: Product = _itself
    of_state: Product = _itself


class BoundMap(ABC):
    """A map with its input bound, whose fixed point is sought. Weights and input terms were computed once, already."""

    structure: Structure = Structure.GENERAL
    """The structure of the Jacobian; see :class:`~opteq.problems.hidden.Structure`."""

    coupled: bool = False
    """Whether samples depend on each other, so that a batch is one system."""

    damping: float | Tensor = 1.0
    """The damping that makes plain iteration converge, where that is known; one number, or one per sample ``(B,)``."""

    jumps: bool = False
    """Whether the map is discontinuous: a small residual then proves no fixed point, and every solve is diagnosed."""

    has_merit: bool = False
    """Whether :meth:`step_and_merit` gives a merit: a value per sample that plain steps decrease."""

    contracts: bool = False
    """Whether plain steps, damped as recommended, are known to lead to the one fixed point at a linear rate. There is
    no saddle then that a small residual could belong to, so that residuals are guard enough for methods that
    extrapolate, and no merit is computed."""

    compile_functions: bool = False
    """Whether a user's functions may be compiled, see ``Equilibrium(compile=True)``."""

    tensors_read: tuple[Tensor, ...] = ()
    """The tensors that products with derivatives may read by way of torch.func, besides the state."""

    @property
    def seeks_minimum(self) -> bool:
        """Whether the fixed point should be a minimum of an objective, and nothing proves that it is one."""
        return False

    @abstractmethod
    def start(self) -> State:
        """Where solvers begin."""

    @abstractmethod
    def step(self, y: State) -> State:
        """One application of the map."""

    def step_and_merit(self, y: State) -> tuple[State, Tensor]:
        """The step and the merit at ``y``, one value per sample, where :attr:`has_merit`."""
        raise NotImplementedError(f"{type(self).__name__} has no merit")

    def step_by_step(self, y: State) -> tuple[State, State | None, State | None]:
        """The step, and the pre-activation and the features where they are computed on the way."""
        return self.step(y), None, None

    def features(self, y: State) -> State:
        """The output of the layer: the state itself by default."""
        return y

    def project(self, y: State) -> State:
        """The nearest state at which the objective is finite; extrapolating solvers may step outside."""
        return y

    def linearise(self, y: State, inside: State | None = None) -> Linearisation | SymmetricLinearisation:  # noqa: ARG002
        """The Jacobian of :meth:`step` at ``y``; ``inside`` is the pre-activation there, where one is known."""
        vjp = pullback(self.step, y)[1]

        def product(v: State) -> State:
            # u -> J'u is linear, so its own transpose is J: reverse mode twice, which every operation supports.
            return pullback(vjp, map_state(torch.zeros_like, y))[1](v)

        return Linearisation(product, vjp)

    def objective(self, y: State) -> Tensor:  # noqa: ARG002
        """The value that an equilibrium minimises, one per sample; an error where there is none."""
        name = type(self).__name__
        raise ValueError(f"{name.removeprefix('Bound') or name} has no objective")

    def terms(self, y: State) -> dict[str, Tensor]:
        """The objective term by term, each one value per sample; an error where there is none."""
        return {"objective": self.objective(y)}

    def diagnose(self, y: State, codes: Tensor) -> Tensor:  # noqa: ARG002
        """The status codes of an unfinished solve, made more precise where the problem knows the cause.

        Called where a sample did not converge, and after every solve of a map that jumps; it may spend a few steps to
        find out why.
        """
        return codes

    def state_form(self) -> Formulation:
        """The problem for the state itself, with what guards methods that extrapolate."""
        merit = self.step_and_merit if self.has_merit and not self.contracts else None
        return Formulation(FixedPointTask(self.step, self.start(), merit, self.project, self.damping, self.coupled))

    def feature_form(self) -> Formulation:
        """The problem for the features, for solvers that work there."""
        start = self.start()
        if self.features(start) is not start:
            name = type(self).__name__.removeprefix("Bound")
            raise ValueError(
                f"a solver that works on features can't solve {name}, whose features do not determine its state"
            )
        return Formulation(FixedPointTask(self.step, start, damping=self.damping, coupled=self.coupled))

    def compact_form(self) -> Formulation | None:
        """The problem for a variable with no more entries than the state, with the same equilibria."""
        return None


class Hidden(BoundMap):
    """``G(y) = sum f(y) + 1/2 |y|^2 + g(y)`` with its input bound, and the step ``T(y) = sigma(-grad g(y))``.

    Subclasses give ``smooth`` or its terms; everything else follows by autograd. Those that know closed forms override
    :meth:`preactivation` and :meth:`negative_hessian_at`, and tests hold these against the ones here.
    """

    structure = Structure.SYMMETRIC
    penalty: Penalty

    quadratic: bool = False
    """Whether g is known to be quadratic, so that its Hessian is the same everywhere."""

    convex: bool = False
    """Whether the objective is known to be convex, so that every stationary point is a minimum."""

    concave: bool = False
    """Whether g is known to be concave, so that plain steps never raise the objective."""

    @property
    def seeks_minimum(self) -> bool:
        """True unless the objective is known to be convex, or has no Hessian."""
        return not (self.convex or self.jumps)

    def penalties(self, y: State) -> list[Penalty]:
        """The penalty of every tensor of a state."""
        return [self.penalty] * len(blocks(y))

    def smooth(self, y: State) -> Tensor:
        """g, one value per sample: the sum of :meth:`smooth_terms`."""
        return total(self.smooth_terms(y).values())

    def preactivation(self, y: State) -> State:
        """``-grad g(y)``: what the activation is applied to."""
        return map_state(torch.neg, gradient(self.smooth, y))

    def step_by_step(self, y: State) -> tuple[State, State | None, State | None]:
        inside = self.preactivation(y)
        return self.activate(inside), inside, None

    def step(self, y: State) -> State:
        """``sigma(-grad g(y))``."""
        return self.activate(self.preactivation(y))

    def step_and_merit(self, y: State) -> tuple[State, Tensor]:
        """The step and the objective."""
        values, slope = values_and_gradient(self.smooth, y)
        return self.activate(map_state(torch.neg, slope)), self._penalty_of(y) + inner(y, y) / 2 + values

    def activate(self, inside: State) -> State:
        """``sigma`` of a pre-activation."""
        parts = zip(self.penalties(inside), blocks(inside), strict=True)
        return like(inside, tuple(penalty.prox(block) for penalty, block in parts))

    def project(self, y: State) -> State:
        parts = zip(self.penalties(y), blocks(y), strict=True)
        return like(y, tuple(penalty.project(block) for penalty, block in parts))

    def terms(self, y: State) -> dict[str, Tensor]:
        return {"penalty": self._penalty_of(y), "quadratic": inner(y, y) / 2, **self.smooth_terms(y)}

    def _penalty_of(self, y: State) -> Tensor:
        return total(penalty.total(block) for penalty, block in zip(self.penalties(y), blocks(y), strict=True))

    def smooth_terms(self, y: State) -> dict[str, Tensor]:
        """The terms whose sum is g."""
        return {"smooth": self.smooth(y)}

    def distance_to_kink(self, y: State) -> Tensor | None:
        """How far the nearest pre-activation of a sample is from a kink, ``(B,)``; None where sigma has other pieces.

        While none crosses a kink, a piecewise linear sigma acts as a linear map.
        """
        parts = zip(self.penalties(y), blocks(self.preactivation(y)), strict=True)
        distances = [penalty.distance_to_kink(block) for penalty, block in parts]
        known = [sample_rows(apart).amin(dim=1) for apart in distances if apart is not None]
        return torch.stack(known).amin(dim=0) if len(known) == len(distances) else None

    def objective(self, y: State) -> Tensor:
        """``G(y)``, one value per sample; infinite where the penalty is."""
        return total(self.terms(y).values())

    def negative_hessian_at(self, y: State) -> Callable[[State], State]:
        """``v -> M v`` with ``M = -hess g(y)``; what can be computed once for all products is."""
        return pullback(self.preactivation, y)[1]  # M is symmetric, so its transpose will do

    def linearise(self, y: State, inside: State | None = None) -> SymmetricLinearisation:
        """``J = F F' M``; ``inside`` is the pre-activation at ``y``, where it is known."""
        inside = self.preactivation(y) if inside is None else inside
        local = [one.linearise(block) for one, block in zip(self.penalties(y), blocks(inside), strict=True)]

        def each(name: str) -> Callable[[State], State]:
            parts = [getattr(one, name) for one in local]
            return lambda v: like(v, tuple(part(block) for part, block in zip(parts, blocks(v), strict=True)))

        return SymmetricLinearisation(
            self.negative_hessian_at(y), each("factor"), each("factor_adjoint"), each("derivative")
        )
