"""A user's problem with its input bound: the user writes values, autograd does the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from opteq.common.returns import check_features, check_start, check_terms
from opteq.operators import LinearMap, Operator, use_prepared
from opteq.penalties import Penalty
from opteq.problems.hidden import Hidden, Structure
from opteq.problems.reuse import InputOnly
from opteq.states import State, blocks


class BoundModule:
    """A user's module with its input bound.

    The maps of its operators are prepared once, and so is everything that depends on the input and the weights alone:
    ``self.U(x)`` inside a user's function is computed here, not in every step.
    """

    def __init__(self, module: nn.Module, x: State) -> None:
        self.module: Any = module
        self.x: Any = x
        self.maps: Mapping[Operator, LinearMap] = {
            part: part.prepare() for part in module.modules() if isinstance(part, Operator)
        }
        self.reused = InputOnly([*blocks(x), *module.parameters(), *module.buffers(), *_weights(self.maps.values())])

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the user's function of this name; operations on known tensors are reused."""
        with use_prepared(self.maps), self.reused:
            return getattr(self.module, name)(*arguments)


def _weights(maps: Iterable[LinearMap]) -> list[Tensor]:
    """The tensors that prepared maps hold."""
    return [value for linear in maps for value in vars(linear).values() if isinstance(value, Tensor)]


class WrittenHidden(Hidden):
    """A user's problem with its input bound: ``smooth`` is the user's own, all else autograd's.

    The adjoint system of a strict minimiser is positive definite. Where a state turns out to be none, conjugate
    gradients say so (``INDEFINITE``).
    """

    structure = Structure.POSITIVE

    @property
    def seeks_minimum(self) -> bool:
        """True: nothing is known of the curvature."""
        return True

    def __init__(self, penalty: Penalty, problem: nn.Module, x: Tensor, start: State) -> None:
        self.penalty = penalty
        self.bound = BoundModule(problem, x)
        self._start = check_start(start, x, type(problem).__name__)
        self.smooth(start)  # what depends on the input alone is computed here, differentiably

    def start(self) -> State:
        return self._start

    def smooth_terms(self, y: State) -> dict[str, Tensor]:
        """The user's terms by name, or one called "smooth"."""
        values = self.bound.call("smooth", y, self.bound.x)
        terms = values if isinstance(values, dict) else {"smooth": values}
        return check_terms(terms, blocks(y)[0].shape[0], "smooth(y, x)")

    def features(self, y: State) -> State:
        features: State = self.bound.call("features", y)
        return check_features(features, y, type(self.bound.module).__name__)
