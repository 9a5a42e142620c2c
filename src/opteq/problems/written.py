"""A user's problem with its input bound: the user writes values, autograd does the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from opteq.common.returns import advice_on_batch_norms, check_layer_features, check_start, check_terms, try_once
from opteq.operators import LinearMap, Operator, use_prepared
from opteq.penalties import Penalty
from opteq.problems.hidden import BoundMap, Hidden, Structure
from opteq.states import State, blocks


class BoundModule:
    """A user's module with its input bound. The maps of its operators are prepared once, with their bounds."""

    def __init__(self, module: nn.Module, x: State) -> None:
        self.module: Any = module
        self.x: Any = x
        self.maps: Mapping[Operator, LinearMap] = {
            part: part.prepare() for part in module.modules() if isinstance(part, Operator)
        }

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the user's function of this name."""
        try:
            with use_prepared(self.maps):
                return getattr(self.module, name)(*arguments)
        except RuntimeError as error:
            kept, changed = "ADInterpreters" in str(error), "mutate a captured Tensor" in str(error)
            if not (kept or changed):
                raise
            does = "uses a tensor that an earlier call kept" if kept else "changes a tensor that it keeps"
            advice = changed * advice_on_batch_norms(self.module)
            raise ValueError(
                f"{type(self.module).__name__}.{name} {does}. It is called inside of derivatives, whose tensors end "
                f"with them: compute in start(x) what changes from call to call{advice}"
            ) from error


class WrittenMap(BoundMap):
    """A user's problem with its input bound: its start and its features are the user's, and are checked."""

    def __init__(self, problem: nn.Module, x: Any) -> None:
        self.bound = BoundModule(problem, x)
        self._start: State = check_start(self.bound.module.start(x), x, type(problem).__name__)
        self.tensors_read = (*self.bound.module.parameters(), *blocks(x))

    def start(self) -> State:
        return self._start

    def features(self, y: State) -> State:
        features: State = self.bound.call("features", y)
        return check_layer_features(features, y, type(self.bound.module).__name__)


class WrittenHidden(WrittenMap, Hidden):
    """A user's problem with its input bound: ``smooth`` is the user's own, all else autograd's.

    The adjoint system of a strict minimiser is positive definite. Where a state turns out to be none, conjugate
    gradients notice (``NOT_A_MINIMUM``).
    """

    structure = Structure.POSITIVE

    def __init__(self, penalty: Penalty, problem: nn.Module, x: Tensor) -> None:
        super().__init__(problem, x)
        self.penalty = penalty
        self.has_merit = penalty.has_total
        try_once(problem, self.smooth_terms, self._start, "smooth(y, x)", differentiable=True)

    def smooth_terms(self, y: State) -> dict[str, Tensor]:
        """The user's terms by name, or one called "smooth"."""
        values = self.bound.call("smooth", y, self.bound.x)
        terms = values if isinstance(values, dict) else {"smooth": values}
        return check_terms(terms, blocks(y)[0].shape[0], "smooth(y, x)")
