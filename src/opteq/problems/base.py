"""The base class of all hidden problems, and of those that a user writes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from opteq import engine, penalties
from opteq.common.options import NamedOptions
from opteq.common.registration import HoldsOptions
from opteq.penalties import Penalty
from opteq.problems.certificate import Certificate, existence, for_finite_weights, unknown
from opteq.problems.hidden import BoundMap
from opteq.problems.written import WrittenHidden
from opteq.solvers.base import Solver
from opteq.states import State


class Problem(HoldsOptions, metaclass=NamedOptions):
    """Something whose fixed points are sought once an input is bound: ``problem(x)`` binds it."""

    takes_tuples: ClassVar[bool] = False
    """Whether the input may be a tuple of tensors, one per branch."""

    @abstractmethod
    def bind(self, x: Any) -> BoundMap:
        """The problem with ``x`` bound. All work that depends on ``x`` and the weights alone is done here, once."""

    def forward(self, x: State) -> BoundMap:
        """Check ``x``, a tensor (for problems with branches, or a tuple with one per branch), then bind it."""
        for part in x if self.takes_tuples and isinstance(x, tuple) and x else (x,):
            self._check_input(part)
        with engine.bounded_weights(self):
            return self.bind(x)

    def default_solver(self) -> Solver | None:
        """The solver of a layer that was told none; None leaves it to the layer."""
        return None

    def default_gradient_steps(self) -> int | None:
        """Products that the backward solve of a layer may take that was told no gradient; None for the usual number."""
        return None

    def certificate(self) -> Certificate:
        """What is guaranteed, from the weights as they are now."""
        return unknown(f"{type(self).__name__} declares nothing to conclude this from")

    def _check_input(self, x: Any) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"the input should be a tensor with the batch first; got {type(x).__name__}")
        if x.ndim < 1:
            raise ValueError("the input should have a batch dimension; got a single number")
        if not x.is_floating_point():
            raise TypeError(f"the input should be floating point; got {x.dtype}. Convert it, e.g. x.float()")
        weight = next((p for p in self.parameters() if p.is_floating_point()), None)
        if weight is None:
            return
        if weight.device != x.device:
            raise ValueError(f"the input is on {x.device} but the weights are on {weight.device}; move one of them")
        if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"the input is {x.dtype} but the weights are {weight.dtype}; convert one of them, or use torch.autocast"
            )


class HiddenProblem(Problem):
    """A network defined by what it minimises: ``G(y; x) = sum f(y) + 1/2 |y|^2 + g(y; x)``.

    Write the penalty f and the smooth part g; the step ``sigma(-grad g)``, the objective, curvature products and the
    implicit gradient follow by autograd.

    - ``penalty``: an activation's name or a :class:`~opteq.penalties.Penalty`; the activation is its prox.
    - ``smooth(y, x)``: one value per sample, or a dict of several with names, whose sum it is.
    - ``start(x)``: where solvers begin, which also says what shape the state has; zeros like ``x`` by default.
    - ``features(y)``: what the network hands on; ``y`` by default.

    >>> import torch, opteq
    >>> class Denoiser(opteq.HiddenProblem):
    ...     penalty = "relu"
    ...     def smooth(self, y, x):
    ...         rough = (y[:, 1:] - y[:, :-1]).square().sum(1)   # neighbours should agree
    ...         return 0.1 * rough - (x * y).sum(1)              # and y should look like x
    >>> hidden = Denoiser()(torch.tensor([[1.0, -1.0, 2.0]]))
    >>> hidden.step(torch.zeros(1, 3))
    tensor([[1., 0., 2.]])
    """

    penalty: str | Penalty

    @abstractmethod
    def smooth(self, y: State, x: Tensor) -> Tensor | dict[str, Tensor]:
        """g(y; x), one value per sample; or a dict of terms, each with one value per sample, whose sum it is."""

    def start(self, x: Tensor) -> State:
        """The starting state for input ``x``."""
        return torch.zeros_like(x)

    def features(self, y: State) -> State:
        """What the network hands on."""
        return y

    def bind(self, x: Tensor) -> BoundMap:
        """The problem with ``x`` bound, everything by autograd."""
        return WrittenHidden(self._activation(), self, x, self.start(x))

    @for_finite_weights
    def certificate(self) -> Certificate:
        """Existence where the activation's range is bounded; the rest needs bounds that only the author knows."""
        exists, unique, reasons = existence(None, self._activation().bounded)
        why = "no bound on the curvature of smooth is known; override certificate() to state one"
        return Certificate(exists, unique, None, None, {**reasons, "contraction": why, "lipschitz": why})

    def _activation(self) -> Penalty:
        penalty = getattr(self, "penalty", None)
        if penalty is None:
            raise TypeError(
                f"{type(self).__name__} should set `penalty`: the name of an activation or an opteq.penalties.Penalty"
            )
        return penalties.get(penalty)
