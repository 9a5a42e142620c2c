"""A bound problem whose functions are traced graphs, in the variable of a bottleneck where there is one.

Autograd derives steps and products from what a user wrote. It also computes values that no solver asks for, terms that
do not depend on the state, and copies of layouts; on a CPU its overhead is most of the time of a small problem. So both
backends trace the functions, and solve with the graphs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import proxy

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from opteq.engine.flatten import Flattened
from opteq.problems.hidden import BoundMap, Formulation, Hidden, Linearisation, SymmetricLinearisation
from opteq.problems.written import BoundModule
from opteq.states import Autocast, State, blocks, like

if TYPE_CHECKING:
    from opteq.engine.bottleneck import Bottleneck
    from opteq.engine.trace import Function, Traced

kept: OrderedDict[Hashable, Traces] = OrderedDict()
_MOST_KEPT = 64
_lock = RLock()


class Traces:
    """What was traced of problems of one form, or why nothing can be.

    Args:
        compile_functions: whether Inductor compiles the graphs.

    Attributes:
        calls: how many calls of the form there were.
        reason: why a function could not be traced; None where all could.
    """

    def __init__(self, compile_functions: bool) -> None:
        self.compile_functions = compile_functions
        self.calls = 0
        self.reason: str | None = None
        self._traced: dict[Hashable, Traced] = {}
        self._known: dict[Hashable, Any] = {}

    def curvature(self, flat: Flattened, tensors: Sequence[Tensor]) -> tuple[bool, bool]:
        """Whether a step of a user's problem contracts, and whether g is concave, for all weights."""
        from opteq.engine.bottleneck import known_curvature  # loads a part of torch's compiler

        found: tuple[bool, bool] = self._found_once("curvature", lambda: known_curvature(flat, tensors))
        return found

    def bind(self, name: str, function: Function, fixed: list[Tensor]) -> Callable[[State], Sequence[Tensor]]:
        """A function of fixed and varying tensors as one of the varying ones, by a graph for each of their layouts."""
        by_layout: dict[Hashable, Callable[[Sequence[Tensor]], Sequence[Tensor]]] = {}

        def call(varying: State) -> Sequence[Tensor]:
            parts = blocks(varying)
            layout = _looks(parts)
            if layout not in by_layout:
                by_layout[layout] = self.bind_at(name, function, fixed, varying)
            return by_layout[layout](parts)

        return call

    def bind_at(
        self, name: str, function: Function, fixed: list[Tensor], example: State
    ) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        """The same by one graph, for varying tensors like ``example``; what can be computed once is, at once."""
        parts = list(blocks(example))
        traced = self._trace(name, function, fixed, parts)
        return (lambda varying: function(fixed, list(varying))) if traced is None else traced.bind(fixed)

    def bottleneck(self, name: str, function: Function, fixed: list[Tensor], y: State) -> Bottleneck | None:
        """A function by its bottleneck; None where its argument ``y`` is a tuple, or where it can't be traced."""
        from opteq.engine.bottleneck import Bottleneck

        if isinstance(y, tuple):
            return None
        y = torch.zeros_like(y)  # in a dense layout
        if (traced := self._trace(name, function, fixed, [y])) is None:
            return None
        found: Bottleneck = self._found_once(traced, lambda: Bottleneck(traced, [*fixed, y]))
        return found

    def has_same_gradients(self, name: str, function: Function, fixed: list[Tensor], y: State) -> bool:
        """Whether a graph may take the function's place where autograd differentiates it."""
        from opteq.engine.bottleneck import has_same_gradients

        parts = list(blocks(y))
        if (traced := self._trace(name, function, fixed, parts)) is None:
            return False
        return bool(self._found_once((name, traced), lambda: has_same_gradients(traced, function, fixed, parts)))

    def _found_once(self, key: Hashable, find: Callable[[], Any]) -> Any:
        with _disable_current_modes():  # that watch a capture, which need not see this
            return self._known[key] if key in self._known else self._known.setdefault(key, find())

    def _trace(self, name: str, function: Function, fixed: Any, varying: Any) -> Traced | None:
        key = name, _looks(fixed), _looks(varying)
        if key not in self._traced and self.reason is None:
            from opteq.engine.trace import Traced

            fixed = [tensor.detach() for tensor in fixed]
            try:
                with _lock, _disable_current_modes():
                    self._traced[key] = Traced(function, fixed, varying, self.compile_functions and name not in _ONCE)
            except Exception as error:  # a user's code may raise anything
                why = (str(error) or type(error).__name__).splitlines()[0]
                why = "a tensor's value decides what it computes, in Python" if "_local_scalar_dense" in why else why
                self.reason = f"it could not be traced: {why}"
        return self._traced.get(key)


def traces_of(flat: Flattened, compile_functions: bool = False) -> Traces:
    """What was traced of problems like this one, with all modes of torch as they are now."""
    device = flat.tensors[0].device if flat.tensors else torch.device("cpu")
    modes = Autocast.current(device), torch.get_default_dtype(), torch.is_inference_mode_enabled()
    key = flat.structure, _looks(flat.tensors), device, modes, compile_functions
    with _lock:
        kept[key] = traces = kept.pop(key, None) or Traces(compile_functions)
        if len(kept) > _MOST_KEPT:
            kept.popitem(last=False)
    return traces


def is_written(hidden: BoundMap) -> bool:
    """Whether a user has written the functions of a problem."""
    return isinstance(getattr(hidden, "bound", None), BoundModule)


def with_traced_functions(flat: Flattened, traces: Traces, tensors: Sequence[Tensor] | None = None) -> BoundMap:
    """The problem with these tensors, or its own as constants: its step, its merit and its derivatives by graphs."""
    tensors = flat.tensors if tensors is None else tensors
    hidden = flat.with_tensors(tensors)
    if not is_written(hidden):
        return hidden
    functions = _Functions(flat, list(tensors), traces, hidden)
    if isinstance(hidden, Hidden):
        hidden.contracts, hidden.concave = traces.curvature(flat, tensors)
        functions.contracts = hidden.contracts
        hidden.preactivation = functions.by_graph("preactivation")  # type: ignore
        hidden.negative_hessian_at = partial(functions.at, "negative_hessian")  # type: ignore[method-assign]
        hidden.linearise, hidden.compact_form = functions.linearise, functions.compact_form  # type: ignore
    else:
        hidden.linearise = functions.linearise_freely  # type: ignore[method-assign]
    if traces.compile_functions or not isinstance(hidden, Hidden):  # the activation with what it is applied to
        hidden.step = functions.by_graph("step")  # type: ignore
    if hidden.has_merit:
        hidden.step_and_merit = functions.step_and_merit  # type: ignore[method-assign]
    return hidden


def with_traced_step(flat: Flattened, traces: Traces, state: State, tensors: Sequence[Tensor]) -> BoundMap:
    """The problem with these tensors: autograd differentiates a graph of its step once, not twice."""
    fixed = list(tensors)
    hidden = flat.with_tensors(fixed)
    if is_written(hidden) and isinstance(hidden, Hidden):
        functions = _Functions(flat, fixed, traces, hidden)
        if traces.has_same_gradients("preactivation", functions.of_tensors("preactivation"), fixed, state):
            hidden.preactivation = functions.by_graph("preactivation")  # type: ignore
    return hidden


class _Functions:
    """Functions of a bound problem by graphs, to be put in the place of its methods."""

    def __init__(self, flat: Flattened, fixed: list[Tensor], traces: Traces, hidden: BoundMap) -> None:
        self.flat, self.fixed, self.traces = flat, fixed, traces
        self.start = hidden.start()
        # A problem that holds itself would live until the garbage collector comes by.
        self.hidden, self.plain = proxy(hidden), type(hidden)
        self.contracts = False
        self.both = traces.bind("merit", self.of_tensors("merit"), fixed)

    def by_graph(self, name: str) -> Callable[[State], State]:
        """A function from states to states."""
        call = self.traces.bind(name, self.of_tensors(name), self.fixed)
        return lambda y: like(y, tuple(call(y)))

    def step_and_merit(self, y: State) -> tuple[State, Tensor]:
        *image, merit = self.both(y)
        return like(y, tuple(image)), merit

    def linearise(self, y: State, inside: State | None = None) -> SymmetricLinearisation:
        """As the problem's, in the variable of a bottleneck where the Hessian has one."""
        local: SymmetricLinearisation = self.plain.linearise(self.hidden, y, inside)  # type: ignore
        fixed = [*self.fixed, *blocks(y)]
        narrow = self.traces.bottleneck("negative_hessian", self.of_tensors("negative_hessian"), fixed, y)
        return replace(local, reduction=narrow.reduce(local, fixed)) if narrow and narrow.symmetric else local

    def linearise_freely(self, y: State, inside: State | None = None) -> Linearisation:  # noqa: ARG002
        """The same for a map without an objective."""
        return Linearisation(
            lambda v: self.flat.with_tensors(self.fixed).linearise(y).product(v), self.at("adjoint", y)
        )

    def compact_form(self) -> Formulation | None:
        """The problem in the variable of a bottleneck, where its steps contract."""
        if not self.contracts:
            return None
        narrow = self.traces.bottleneck("step", self.of_tensors("step"), self.fixed, self.start)
        return narrow.formulate(self.hidden, self.start, self.fixed) if narrow and narrow.homogeneous else None

    def at(self, name: str, y: State) -> Callable[[State], State]:
        """A function of a vector, and of the state ``y``."""
        # Bound at once: where a product runs first is not where a captured graph begins.
        call = self.traces.bind_at(name, self.of_tensors(name), [*self.fixed, *blocks(y)], y)
        return lambda v: like(v, tuple(call(blocks(v))))

    def of_tensors(self, name: str) -> Function:
        """A function of the problem and one or two states, as one of tensors."""
        evaluate, flat, start, count = _FUNCTIONS[name], self.flat, self.start, len(self.fixed)

        def function(fixed: list[Tensor], varying: list[Tensor]) -> list[Tensor]:
            at = fixed[count:] or blocks(start)
            return tree_leaves(
                evaluate(flat.with_tensors(fixed[:count]), like(start, tuple(varying)), like(start, tuple(at)))
            )

        return function


_ONCE = {"preactivation"}
"""Functions that a solve evaluates once: these are not worth compiling."""

_FUNCTIONS: dict[str, Callable[[Any, State, State], Any]] = {
    "step": lambda problem, y, _: problem.step(y),
    "preactivation": lambda problem, y, _: problem.preactivation(y),
    "merit": lambda problem, y, _: problem.step_and_merit(y),
    "negative_hessian": lambda problem, v, y: problem.negative_hessian_at(y)(v),
    "adjoint": lambda problem, v, y: problem.linearise(y).adjoint(v),
}


def _looks(tensors: Sequence[Tensor]) -> Hashable:
    return tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
