"""A user's problem with its input bound: the user writes values, autograd does the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from opteq.common.returns import check_features, check_start, check_terms
from opteq.operators import LinearMap, Operator, use_prepared
from opteq.penalties import Penalty
from opteq.problems.hidden import Hidden, Structure
from opteq.states import State, blocks


class BoundModule:
    """A user's module with its input bound. The maps of its operators are prepared once, with their bounds."""

    def __init__(self, module: nn.Module, x: State) -> None:
        self.module: Any = module
        self.x: Any = x
        self.maps: Mapping[Operator, LinearMap] = {
            part: part.prepare() for part in module.modules() if isinstance(part, Operator)
        }

    def is_new(self) -> bool:
        """Whether the module is bound for the first time.

        Its functions are called once then, before derivatives are taken: a tensor that they keep for later calls would
        otherwise be one of torch.func's, which has no meaning outside.
        """
        new = "_was_bound" not in vars(self.module)
        self.module._was_bound = True
        return new

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the user's function of this name."""
        with use_prepared(self.maps):
            return getattr(self.module, name)(*arguments)


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
        if self.bound.is_new():
            self.smooth_terms(start)

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
