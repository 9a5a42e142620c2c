"""Linear maps: a product, its exact adjoint, and a certified bound on its norm."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from opteq.common.curvature.bounds import Bounds
from opteq.common.options import NamedOptions
from opteq.common.validate import check_positive


class LinearMap(ABC):
    """A linear map with prepared weights: ``A(v)`` and ``A.adjoint(u)``, with ``<A v, u> = <v, A' u>``.

    A plain object, not a module. It is used for one batch: :meth:`Operator.prepare` creates it once, and a solver
    applies it many times, so the weights are computed only once.
    """

    @abstractmethod
    def __call__(self, v: Tensor) -> Tensor:
        """The product ``A v``."""

    @abstractmethod
    def adjoint(self, u: Tensor) -> Tensor:
        """The product ``A' u`` with the exact adjoint."""


_prepared: ContextVar[Mapping[Operator, LinearMap] | None] = ContextVar("_prepared", default=None)


@contextmanager
def use_prepared(maps: Mapping[Operator, LinearMap]) -> Iterator[None]:
    """Inside, operators that are called apply these maps, so that no bound is computed again."""
    token = _prepared.set({**(_prepared.get() or {}), **maps})
    try:
        yield
    finally:
        _prepared.reset(token)


class Operator(nn.Module, metaclass=NamedOptions):
    """A linear map with parameters, an exact adjoint and, on request, a bounded spectral norm.

    ``bound=b`` keeps the spectral norm at or below ``b`` at every moment, for all values that an optimiser or a
    checkpoint writes into the parameters: the weight that acts is ``weight * min(1, b / s(weight))``, where ``s`` is a
    certified upper bound of the norm (see :mod:`opteq.operators.spectral.norms`). ``bound=None`` uses the weight as it
    is.

    The bounded weight is a function of the parameters alone. There are no buffers, so training, evaluation,
    checkpoints, copies and ``torch.func`` transformations all see the same map. (Where the bound acts, it differs
    between dtypes for rounding: by up to 0.05 % in float32, in 16 bits by some percent.) The weight is not cached
    either, since a cache would not notice writes through ``parameter.data``. Where one weight serves many products,
    call :meth:`prepare` once and keep its result; a layer does so for every operator of its problem.
    """

    bound: float | None = None

    keeps_shape = False
    """Whether ``A v`` has the shape of v, for every v; certificates use it."""

    @abstractmethod
    def prepare(self) -> LinearMap:
        """The map with its (bounded) weights computed, once; differentiable with respect to the parameters."""

    @abstractmethod
    def norm(self) -> Tensor:
        """A certified upper bound of the spectral norm of the map that acts, for every image size.

        A scalar without gradient. It lies at most 0.5 % above the supremum over image sizes, unless the class says
        otherwise.
        """

    def forward(self, v: Tensor) -> Tensor:
        """The product ``A v``."""
        return v.through(self._largest_norm(), self, False) if isinstance(v, Bounds) else self._current()(v)

    def adjoint(self, u: Tensor) -> Tensor:
        """The product ``A' u``."""
        return u.through(self._largest_norm(), self, True) if isinstance(u, Bounds) else self._current().adjoint(u)

    def _largest_norm(self) -> float:
        """The norm, or on the meta device, where weights have no values, what it can't exceed for any."""
        kept = (value for value in vars(self).values() if isinstance(value, Tensor))
        if any(tensor.is_meta for tensor in (*self.parameters(), *self.buffers(), *kept)):
            return math.inf if self.bound is None else self.bound
        return float(self.norm())

    def _current(self) -> LinearMap:
        return (_prepared.get() or {}).get(self) or self.prepare()


def is_observer_hook(hook: Any) -> bool:
    """Whether a hook changes nothing: torchinfo.summary writes sizes down (of a call of W, which never comes, none)."""
    return getattr(hook, "__module__", "").partition(".")[0] == "torchinfo"


def initial_norm(bound: float | None) -> float:
    """The norm that weights are scaled to at construction.

    Just within the bound: at the bound itself ``min(1, bound / norm)`` has a kink, and no derivative. Without a bound
    0.9, so that an equilibrium exists at the start of training.
    """
    return 0.9 if bound is None else 0.98 * bound


def check_bound(value: object) -> float | None:
    """``value`` as a float if it is positive and finite, or None; otherwise an error."""
    return None if value is None else check_positive("bound (None for none)", value)


def wrong_shape(who: str, expected: str, got: Tensor) -> ValueError:
    """The error for an input of the wrong shape."""
    return ValueError(f"{who} expects an input of shape {expected}; got {tuple(got.shape)}")
