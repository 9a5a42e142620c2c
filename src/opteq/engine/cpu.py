"""A user's objective on a CPU: its gradient and its Hessian products by traced graphs, its solve by the plain solver.

The first calls run on the plain path: few calls are not worth a trace.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from opteq.engine.flatten import flatten
from opteq.engine.log import note
from opteq.engine.settings import settings
from opteq.engine.traced import form_of, is_written, with_traced_functions
from opteq.engine.values_read import NotFlattenableError
from opteq.gradients.adjoint import AdjointSystem
from opteq.gradients.base import find
from opteq.gradients.implicit import attach_system
from opteq.problems.hidden import BoundMap, Hidden
from opteq.solution import Report
from opteq.solvers import Outcome, Solver
from opteq.solvers.linear import LinearSolver
from opteq.states import State, blocks


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
    return attach_system(hidden, state, outcome, partial(AdjointSystem, traced, state, linear), record)


def _traced(hidden: BoundMap, direction: str) -> Hidden | None:
    """``hidden`` with a traced gradient and traced curvature products; None, and a note why, for the plain path."""
    observed = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    observed = observed or _get_current_dispatch_mode() is not None or torch._C._are_functorch_transforms_active()
    if observed or not isinstance(hidden, Hidden) or not is_written(hidden):
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
    form = form_of(flat)
    form.calls += direction == "forward"
    early = form.calls <= settings.calls_before_tracing
    reason = f"the first {settings.calls_before_tracing} calls are not traced" if early else form.reason
    note(direction, reason, "traced gradient and curvature, plain solver")
    if reason is not None:
        return None
    traced = with_traced_functions(flat, flat.tensors, form)
    assert isinstance(traced, Hidden)
    return traced
