"""A user's problem with its input bound: the user writes values, autograd does the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from opteq.common.returns import check_features, check_start, check_terms
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

    def try_once(self, function: Callable[[State], object], start: State) -> None:
        """Call a function of the module where it is bound for the first time.

        Tensors that it keeps for later calls are then made outside of derivatives: inside, they would be torch.func's.
        """
        if "_was_bound" not in vars(self.module):
            with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):  # a checkpoint would count this call
                function(start)
            vars(self.module)["_was_bound"] = True

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the user's function of this name."""
        try:
            with use_prepared(self.maps):
                return getattr(self.module, name)(*arguments)
        except RuntimeError as error:
            if "ADInterpreters" not in str(error):
                raise
            raise ValueError(
                f"{type(self.module).__name__}.{name} uses a tensor that an earlier call kept. It is called inside of "
                "derivatives, whose tensors end with them: compute in start(x) what changes from call to call"
            ) from error


class WrittenMap(BoundMap):
    """A user's problem with its input bound: its start and its features are the user's, and are checked."""

    def __init__(self, problem: nn.Module, x: Any) -> None:
        self.bound = BoundModule(problem, x)
        self._start: State = check_start(self.bound.module.start(x), x, type(problem).__name__)

    def start(self) -> State:
        return self._start

    def features(self, y: State) -> State:
        features: State = self.bound.call("features", y)
        return check_features(features, y, type(self.bound.module).__name__)


class WrittenHidden(WrittenMap, Hidden):
    """A user's problem with its input bound: ``smooth`` is the user's own, all else autograd's.

    The adjoint system of a strict minimiser is positive definite. Where a state turns out to be none, conjugate
    gradients notice (``NOT_A_MINIMUM``).
    """

    structure = Structure.POSITIVE

    def __init__(self, penalty: Penalty, problem: nn.Module, x: Tensor) -> None:
        super().__init__(problem, x)
        self.penalty = penalty
        self.bound.try_once(self.smooth_terms, self._start)

    def smooth_terms(self, y: State) -> dict[str, Tensor]:
        """The user's terms by name, or one called "smooth"."""
        values = self.bound.call("smooth", y, self.bound.x)
        terms = values if isinstance(values, dict) else {"smooth": values}
        return check_terms(terms, blocks(y)[0].shape[0], "smooth(y, x)")
