"""A user's objective on a CPU: its gradient and its Hessian products by traced graphs instead of autograd.

Other results of autograd (the objective's value, terms that do not depend on the state, copies of layouts) are dropped,
and so is its overhead, most of the time of a small problem. Graphs are kept by structure, shapes, strides and dtypes of
a problem. The first calls run on the plain path: few calls are not worth a trace.
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
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from opteq.engine.flatten import Flattened, flatten
from opteq.engine.log import note
from opteq.engine.settings import settings
from opteq.engine.values_read import NotFlattenableError
from opteq.gradients.adjoint import AdjointSystem
from opteq.gradients.base import find
from opteq.gradients.implicit import attach_system
from opteq.problems.hidden import BoundMap, FeatureForm, Hidden, SymmetricLinearisation
from opteq.problems.written import BoundModule
from opteq.solution import Report
from opteq.solvers import Outcome, Solver
from opteq.solvers.linear import LinearSolver
from opteq.states import Autocast, State, blocks, like

if TYPE_CHECKING:
    from opteq.engine.bottleneck import Bottleneck
    from opteq.engine.trace import Function, Traced

forms: OrderedDict[Hashable, _Form] = OrderedDict()
_lock = RLock()


def solve(hidden: BoundMap, solver: Solver, start: State | None, same_steps: bool) -> Outcome | None:
    """The equilibrium by the plain solver, with traced steps; None where the plain path should find it."""
    traced = _traced(hidden, "forward")
    return None if traced is None else find(traced, solver, start, same_steps)


def attach(
    hidden: BoundMap, state: State, outcome: Outcome, linear: LinearSolver, record: Callable[[Report], None]
) -> tuple[State, Outcome] | None:
    """``state`` with the implicit gradient, by traced products."""
    traced = _traced(hidden, "backward")
    if traced is None:
        return None
    return attach_system(hidden, state, partial(AdjointSystem, traced, state, linear), record), outcome


class _Form:
    """What was traced of problems of one form, or why nothing can be."""

    def __init__(self) -> None:
        self.calls = 0
        self.reason: str | None = None
        self.contracts: bool | None = None
        self._traced: dict[Hashable, Traced] = {}
        self._bottlenecks: dict[Hashable, Bottleneck] = {}

    def bind(self, name: str, function: Function, fixed: list[Tensor]) -> Callable[[State], Sequence[Tensor]]:
        """A function of fixed and varying tensors as one of the varying ones, by a graph for each of their layouts."""
        by_layout: dict[Hashable, Callable[[list[Tensor]], Sequence[Tensor]]] = {}

        def call(varying: State) -> Sequence[Tensor]:
            parts = list(blocks(varying))
            layout = _looks(parts)
            if layout not in by_layout:
                traced = self._trace((name, _looks(fixed), layout), function, fixed, parts)
                by_layout[layout] = partial(function, fixed) if traced is None else traced.bind(fixed)
            return by_layout[layout](parts)

        return call

    def bottleneck(self, name: str, function: Function, fixed: list[Tensor], y: State) -> Bottleneck | None:
        """A function by its bottleneck; None where its argument ``y`` is a tuple, or where it can't be traced."""
        if isinstance(y, tuple):
            return None
        y = torch.zeros_like(y)  # in a dense layout
        key = name, _looks(fixed), _looks([y])
        traced = self._trace(key, function, fixed, [y])
        if traced is not None and key not in self._bottlenecks:
            from opteq.engine.bottleneck import Bottleneck

            self._bottlenecks[key] = Bottleneck(traced, [*fixed, y])
        return self._bottlenecks.get(key)

    def _trace(self, key: Hashable, function: Function, fixed: Any, varying: Any) -> Traced | None:
        if key not in self._traced and self.reason is None:
            from opteq.engine.trace import Traced  # loads a part of torch's compiler

            try:
                with _lock:
                    self._traced[key] = _checked(Traced(function, fixed, varying, compile_functions=False))
            except Exception as error:  # a user's code may raise anything
                self.reason = f"it could not be traced: {(str(error) or type(error).__name__).splitlines()[0]}"
        return self._traced.get(key)


def _traced(hidden: BoundMap, direction: str) -> Hidden | None:
    """``hidden`` with a traced gradient and traced curvature products; None, and a note why, for the plain path."""
    observed = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    observed = observed or _get_current_dispatch_mode() is not None or torch._C._are_functorch_transforms_active()
    if observed or not isinstance(hidden, Hidden) or not isinstance(getattr(hidden, "bound", None), BoundModule):
        if blocks(hidden.start())[0].device.type == "cpu":  # elsewhere another backend has noted its reason
            plain = "on a CPU only objectives that a user has written are traced"
            note(direction, "a transformation or a mode of torch is active" if observed else plain)
        return None
    try:
        flat = flatten(hidden)
    except NotFlattenableError as error:
        note(direction, str(error))
        return None
    if any(tensor.device.type != "cpu" for tensor in flat.tensors):
        return None
    form = _form_of(flat)
    form.calls += direction == "forward"
    early = form.calls <= settings.calls_before_tracing
    reason = f"the first {settings.calls_before_tracing} calls are not traced" if early else form.reason
    note(direction, reason, "traced gradient and curvature, plain solver")
    return _replaced(flat, form) if reason is None else None


def _form_of(flat: Flattened) -> _Form:
    modes = Autocast.current(torch.device("cpu")), torch.get_default_dtype(), torch.is_inference_mode_enabled()
    key = flat.structure, _looks(flat.tensors), modes
    with _lock:
        forms[key] = form = forms.pop(key, None) or _Form()
        if len(forms) > 64:
            forms.popitem(last=False)
    return form


def _looks(tensors: Sequence[Tensor]) -> Hashable:
    return tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)


def _replaced(flat: Flattened, form: _Form) -> Hidden:
    """The problem with its gradient, merit and curvature products by graphs, in the variable of a bottleneck."""
    hidden = flat.with_tensors(flat.tensors)
    assert isinstance(hidden, Hidden)
    start, count = hidden.start(), len(flat.tensors)
    if form.contracts is None:
        from opteq.engine.bottleneck import known_contraction  # loads a part of torch's compiler

        form.contracts = known_contraction(flat)
    hidden.contracts = form.contracts
    # A problem that holds itself would live until the garbage collector comes by.
    itself, linearise_plainly = proxy(hidden), type(hidden).linearise

    def of_tensors(evaluate: Callable[[Any, State, State], Any]) -> Function:
        def function(fixed: list[Tensor], varying: list[Tensor]) -> list[Tensor]:
            given = like(start, tuple(varying)), like(start, tuple(fixed[count:]) or blocks(start))
            return tree_leaves(evaluate(flat.with_tensors(fixed[:count]), *given))

        return function

    step = of_tensors(lambda problem, y, _: problem.step(y))
    curvature = of_tensors(lambda problem, v, at: problem.curvature_at(at)(v))
    inside = form.bind("preactivation", of_tensors(lambda problem, y, _: problem.preactivation(y)), flat.tensors)
    both = form.bind("merit", of_tensors(lambda problem, y, _: problem._step_and_merit(y)), flat.tensors)

    def step_and_merit(y: State) -> tuple[State, Tensor]:
        *image, merit = both(y)
        return like(y, tuple(image)), merit

    def curvature_at(y: State) -> Callable[[State], State]:
        products = form.bind("curvature", curvature, [*flat.tensors, *blocks(y)])
        return lambda v: like(v, tuple(products(v)))

    def linearise(y: State) -> SymmetricLinearisation:
        local = linearise_plainly(itself, y)
        fixed = [*flat.tensors, *blocks(y)]
        narrow = form.bottleneck("curvature", curvature, fixed, y)
        return local if not (narrow and narrow.symmetric) else replace(local, reduction=narrow.reduce(local, fixed))

    def compact_form() -> FeatureForm | None:
        narrow = form.bottleneck("step", step, flat.tensors, start) if form.contracts else None
        return narrow.formulate(start, flat.tensors) if narrow and narrow.homogeneous else None

    hidden.preactivation = lambda y: like(y, tuple(inside(y)))  # type: ignore[method-assign]
    hidden._step_and_merit, hidden.curvature_at = step_and_merit, curvature_at  # type: ignore[method-assign]
    hidden.linearise, hidden.compact_form = linearise, compact_form  # type: ignore[method-assign]
    return hidden


def _checked(traced: Traced) -> Traced:
    """The same, unless its graph would not repeat the function faithfully."""
    literal = torch.ops.aten.lift_fresh_copy.default  # made by the function, torch.tensor(2.0) for instance
    for node in (*traced.once.graph.nodes, *traced.each.graph.nodes):
        if node.op == "get_attr" and any(user.target is not literal for user in node.users):
            raise ValueError("it reads a tensor that is neither a parameter, a buffer nor an input")
        if isinstance(node.target, torch._ops.OpOverload):
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                raise ValueError(f"it draws random numbers ({node.target})")
            if node.target._schema.is_mutable:
                raise ValueError(f"it writes to a tensor ({node.target})")
    return traced
