"""A user's problem with its input bound: the user writes values, autograd does the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from opteq.common.derivatives import without_saved_tensor_hooks
from opteq.common.returns import check_apart, check_features, check_start, check_terms
from opteq.operators import LinearMap, Operator, use_prepared
from opteq.penalties import Penalty
from opteq.problems.hidden import BoundMap, Hidden, Structure
from opteq.states import State, blocks, may_branch_on_values


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
            raise ValueError(
                f"{type(self.module).__name__}.{name} {does}. It is called inside of derivatives, whose tensors end "
                f"with them: compute in start(x) what changes from call to call{changed * self.batch_norms()}"
            ) from error

    def batch_norms(self) -> str:
        """What to do about those that take statistics of a batch, in words."""
        norms = [name for name, part in self.module.named_modules() if isinstance(part, _BatchNorm) and part.training]
        advice = "is in training mode: use a GroupNorm, keep it in evaluation mode, or apply it to x in start(x)"
        return f". Batch normalisation ({', '.join(norms)}) {advice}" if norms else ""


_tried: WeakKeyDictionary[nn.Module, set[tuple[bool, bool]]] = WeakKeyDictionary()
"""Whether modules were in training mode where they were tried, and whether there was a second sample to keep apart."""


class WrittenMap(BoundMap):
    """A user's problem with its input bound: its start and its features are the user's, and are checked."""

    def __init__(self, problem: nn.Module, x: Any) -> None:
        self.bound = BoundModule(problem, x)
        self._start: State = check_start(self.bound.module.start(x), x, type(problem).__name__)

    def try_once(self, function: Callable[[State], Mapping[str, Tensor]], name: str) -> None:
        """Call a function of the module where it is bound for the first time, and check that it keeps samples apart.

        Tensors that it keeps for later calls are then made outside of derivatives: inside, they would be torch.func's.
        """
        module, first = self.bound.module, blocks(self._start)[0]
        looks = may_branch_on_values(torch.empty(0, device="cpu")) and not torch.is_inference_mode_enabled()
        case, tried = (module.training, looks and len(first) > 1), _tried.setdefault(module, set())
        if case in tried:
            return
        who = f"{type(module).__name__}.{name}"
        with (
            without_saved_tensor_hooks(),  # a checkpoint would count this call
            torch.random.fork_rng([first.device] if first.is_cuda else []),
        ):
            function(self._start)
            depends = not case[1] or check_apart(function, self._start, who, self.bound.batch_norms())
        if not depends and isinstance(self, Hidden):
            raise ValueError(f"{who} has no gradient by y: it should not use detach, no_grad, data or numpy")
        tried.add(case)

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
        self.try_once(self.smooth_terms, "smooth(y, x)")

    def smooth_terms(self, y: State) -> dict[str, Tensor]:
        """The user's terms by name, or one called "smooth"."""
        values = self.bound.call("smooth", y, self.bound.x)
        terms = values if isinstance(values, dict) else {"smooth": values}
        return check_terms(terms, blocks(y)[0].shape[0], "smooth(y, x)")
