"""A problem with its input bound: what a solver iterates, what a gradient differentiates, what a person reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from opteq.penalties import ElementwisePenalty, Penalty
from opteq.problems.expansion import Expansion
from opteq.problems.linearisation import Linearisation, Structure, SymmetricLinearisation, TapedLinearisation
from opteq.states import State, blocks, inner, map_state


@dataclass(frozen=True)
class FeatureForm:
    """The same fixed-point problem written for the features instead of the state.

    Attributes:
        step: one step on features.
        start: where to begin.
        state: the state that belongs to given features.
        measured: the step with a merit, as :attr:`BoundMap.measured`.
        first: the step at ``start``, where that takes less than a step anywhere else.
        zero_state: whether the problem's own start is zero.
        reads_out: whether a step gives the features of the state that belongs to where it began.
    """

    step: Callable[[State], State]
    start: State
    state: Callable[[State], State]
    measured: Callable[[State], tuple[State, Tensor]] | None = None
    first: Callable[[], State] | None = None
    zero_state: bool = False
    reads_out: bool = False


class BoundMap(ABC):
    """A map with its input bound, whose fixed point is sought. Weights and input terms were computed once, already."""

    structure: Structure = Structure.GENERAL
    """What is known of the Jacobian; see :class:`~opteq.problems.linearisation.Structure`."""

    coupled: bool = False
    """Whether samples depend on each other, so that a batch is one system."""

    damping: float | Tensor = 1.0
    """The damping that makes plain iteration converge, where that is known; one number, or one a sample ``(B,)``."""

    jumps: bool = False
    """Whether the map is discontinuous: a small residual then proves no fixed point, and every solve is diagnosed."""

    has_merit: bool = False
    """Whether there is a merit, a number that plain steps decrease."""

    @property
    def seeks_minimum(self) -> bool:
        """Whether the fixed point should be a minimum of an objective, and nothing proves that it is one."""
        return False

    contracts: bool = False
    """Whether plain steps, damped as recommended, are known to lead to the one fixed point at a linear rate. There is
    no saddle then that a small residual could belong to, so that residuals are guard enough for methods that
    extrapolate, and no merit is computed."""

    interval: tuple[float, float] | None = None
    """The ends between which :meth:`project` clamps every entry, where it does that and no more."""

    aside: ClassVar[tuple[str, ...]] = ()
    """Attributes that no step reads: they stay behind when the map is copied for a solve."""

    reads_out_aside: bool = False
    """Whether :meth:`features` needs one of those."""

    frozen: Any = None
    """What :mod:`opteq.problems.freezing` found out about this map."""

    originals: Sequence[Tensor] = ()
    """The tensors of ``frozen`` as this map holds them, with their tape."""

    def __getstate__(self) -> dict[str, Any]:
        kept_back = (*self.aside, "frozen", "originals")
        return {name: value for name, value in self.__dict__.items() if name not in kept_back}

    @property
    def measured(self) -> Callable[[State], tuple[State, Tensor]] | None:
        """The step together with its merit, where the problem has one."""
        # Not kept as an attribute: a map that holds its own method lives, with all its tensors, until the garbage
        # collector comes by.
        return self._measured if self.has_merit else None

    def _measured(self, y: State) -> tuple[State, Tensor]:
        raise NotImplementedError(f"{type(self).__name__} has no merit")

    @abstractmethod
    def start(self) -> State:
        """Where solvers begin."""

    def template(self) -> State:
        """Tensors with shapes and dtypes of a state, whose values mean nothing; for problems that have some at hand."""
        return self.start()

    @abstractmethod
    def step(self, y: State) -> State:
        """One application of the map."""

    def features(self, y: State) -> State:
        """What the network hands on: the state itself unless the problem says otherwise."""
        return y

    def project(self, y: State) -> State:
        """The nearest state at which the objective is finite; extrapolating solvers may step outside."""
        return y

    def linearise(self, y: State) -> Linearisation | SymmetricLinearisation:
        """The Jacobian of :meth:`step` at ``y``."""
        pull = torch.func.vjp(self.step, y)[1]

        def product(v: State) -> State:
            # u -> J'u is linear, so its own transpose is J: reverse mode twice, which every operation supports.
            back = torch.func.vjp(lambda u: pull(u)[0], map_state(torch.zeros_like, y))[1]
            forward: State = back(v)[0]
            return forward

        return Linearisation(product, lambda v: pull(v)[0])

    def linearise_on_tape(self, y: State, features: State, close: bool = False) -> TapedLinearisation | None:  # noqa: ARG002
        """The same with the tape that gradients of the problem's tensors take; None where there is no such form.

        Args:
            y: the state.
            features: those of y.
            close: whether y was solved for to four digits or more.
        """
        return None

    @property
    def diagnoses(self) -> bool:
        """Whether :meth:`diagnose` may have something to say. To see whether it is asked makes a device wait."""
        return type(self).diagnose is not BoundMap.diagnose

    def diagnose(self, y: State, codes: Tensor) -> Tensor:  # noqa: ARG002
        """The status codes of an unfinished solve, told more precisely where the problem knows its own troubles.

        Called where a sample did not converge, and after every solve of a map that jumps; it may spend a few steps to
        find out why.
        """
        return codes

    def feature_form(self) -> FeatureForm:
        """The problem written for the features, for solvers that work there."""
        return FeatureForm(self.step, self.start(), lambda z: z)

    def compact_form(self) -> FeatureForm | None:
        """The feature form where features have no more entries than the state, and the same equilibria."""
        return None

    def expansion(self) -> Expansion | None:
        """The map on features in a form that lets a CPU do with fewer, cheaper products; None where there is none."""
        return None


class Hidden(BoundMap):
    """``G(y) = sum f(y) + 1/2 |y|^2 + g(y)`` with its input bound, and the step ``T(y) = sigma(-grad g(y))``.

    Subclasses give ``smooth``; everything else follows by autograd. Those that know closed forms override
    :meth:`preactivation` and :meth:`curvature_at`, and tests hold these against the ones here.
    """

    structure = Structure.SYMMETRIC
    penalty: Penalty

    @property
    def seeks_minimum(self) -> bool:
        """True unless the curvature is known to be positive, or the objective has no Hessian."""
        return self.structure is not Structure.POSITIVE and not self.jumps

    @abstractmethod
    def smooth(self, y: State) -> Tensor:
        """g, one number a sample."""

    def preactivation(self, y: State) -> State:
        """``-grad g(y)``: what the activation is applied to."""
        slope: State = torch.func.grad(lambda state: self.smooth(state).sum())(y)
        return map_state(torch.neg, slope)

    def step(self, y: State) -> State:
        """``sigma(-grad g(y))``."""
        return map_state(self.penalty.prox, self.preactivation(y))

    def project(self, y: State) -> State:
        """The nearest point of the penalty's domain."""
        return map_state(self.penalty.project, y)

    @property
    def interval(self) -> tuple[float, float] | None:  # type: ignore[override]
        """The penalty's domain, where it is the same interval for every entry."""
        penalty = self.penalty
        # A penalty that is infinite at the ends of its domain keeps clear of them by a projection of its own.
        if not isinstance(penalty, ElementwisePenalty) or type(penalty).project is not ElementwisePenalty.project:
            return None
        return penalty.domain

    def terms(self, y: State) -> dict[str, Tensor]:
        """The objective term by term, each one number a sample."""
        penalties = torch.stack([self.penalty.total(block) for block in blocks(y)]).sum(dim=0)
        return {"penalty": penalties, "quadratic": inner(y, y) / 2, **self.smooth_terms(y)}

    def smooth_terms(self, y: State) -> dict[str, Tensor]:
        """The terms whose sum is g."""
        return {"smooth": self.smooth(y)}

    def objective(self, y: State) -> Tensor:
        """``G(y)``, one number a sample; infinite where the penalty is."""
        return torch.stack(list(self.terms(y).values())).sum(dim=0)

    def curvature_at(self, y: State) -> Callable[[State], State]:
        """``v -> M v`` with ``M = -hess g(y)``; what can be computed once for all products is."""
        pull = torch.func.vjp(self.preactivation, y)[1]  # M is symmetric, so its transpose will do
        return lambda v: pull(v)[0]

    def curvature(self, y: State, v: State) -> State:
        """``M v``: minus the Hessian of g at ``y``, applied to ``v``."""
        return self.curvature_at(y)(v)

    def linearise(self, y: State) -> SymmetricLinearisation:
        """``J = F F' M``."""
        local = [self.penalty.linearise(block) for block in blocks(self.preactivation(y))]

        def each(name: str) -> Callable[[State], State]:
            parts = [getattr(one, name) for one in local]

            def apply(v: State) -> State:
                pieces = tuple(part(block) for part, block in zip(parts, blocks(v), strict=True))
                return pieces if isinstance(v, tuple) else pieces[0]

            return apply

        return SymmetricLinearisation(self.curvature_at(y), each("factor"), each("factor_adjoint"))


class WrittenHidden(Hidden):
    """A user's problem with its input bound: ``smooth`` is the user's own, all else autograd's."""

    def __init__(
        self,
        penalty: Penalty,
        smooth: Callable[[State], Tensor | dict[str, Tensor]],
        start: State,
        features: Callable[[State], State],
    ) -> None:
        self.penalty = penalty
        self._smooth = smooth
        self._start = start
        self._features = features

    def start(self) -> State:
        return self._start

    def smooth(self, y: State) -> Tensor:
        terms = list(self.smooth_terms(y).values())
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum(dim=0)

    def smooth_terms(self, y: State) -> dict[str, Tensor]:
        values = self._smooth(y)
        terms = values if isinstance(values, dict) else {"smooth": values}
        return checked_terms(terms, blocks(y)[0].shape[0], "smooth(y, x)")

    def features(self, y: State) -> State:
        return self._features(y)


def checked_terms(found: Any, batch: int, who: str) -> dict[str, Tensor]:
    """The terms of an objective if they are what they should be: names, and one number per sample each."""
    if not isinstance(found, dict) or not found:
        got = "an empty dict" if found == {} else type(found).__name__
        raise TypeError(f"{who} should return a dict from names to tensors, one number per sample each; got {got}")
    for name, values in found.items():
        if not isinstance(values, Tensor) or values.shape != (batch,):
            got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            which = "should return" if name == "smooth" else f"{name!r} should be"
            raise ValueError(
                f"{who}: {which} one number per sample, shape ({batch},); got {got}. "
                "Sum over every dimension but the first"
            )
    return found
