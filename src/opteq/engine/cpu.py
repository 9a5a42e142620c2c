"""A user's objective on a CPU: its gradient and its Hessian products by traced graphs, its solve by the plain solver.

The first calls run on the plain path: few calls are not worth a trace.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from opteq.engine.flatten import Flattened, flatten
from opteq.engine.log import note
from opteq.engine.settings import settings
from opteq.engine.traced import Traces, is_written, traces_of, with_traced_functions, with_traced_step
from opteq.engine.values_read import NotFlattenableError
from opteq.gradients.base import find
from opteq.gradients.implicit import AdjointSystem, attach_system
from opteq.problems.hidden import BoundMap, Hidden
from opteq.solution import Report
from opteq.solvers import Outcome, Solver
from opteq.solvers.linear import LinearSolver
from opteq.states import State, blocks


def solve(hidden: BoundMap, solver: Solver, start: State | None, same_steps: bool) -> Outcome | None:
    """The equilibrium by the plain solver, with traced steps; None where the plain path should find it."""
    found = _traces_of(hidden, "forward")
    return None if found is None else find(with_traced_functions(*found), solver, start, same_steps)


def differentiate(
    hidden: BoundMap, state: State, outcome: Outcome, linear: LinearSolver, record: Callable[[Report], None]
) -> tuple[State, Outcome] | None:
    """``state`` with the implicit gradient, by traced products."""
    if (found := _traces_of(hidden, "backward")) is None:
        return None
    # A checkpoint may have seen the plain path, and what is saved the second time has to be the same.
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    step = hidden if hooked else with_traced_step(*found, state, found[0].originals)
    system_at = partial(AdjointSystem, with_traced_functions(*found), state, linear)
    return attach_system(step, state, outcome, system_at, record)


def _traces_of(hidden: BoundMap, direction: str) -> tuple[Flattened, Traces] | None:
    """A user's objective taken apart, and its traces; None, and a note why, for the plain path."""
    observed = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    observed = observed or _get_current_dispatch_mode() is not None or torch._C._are_functorch_transforms_active()
    if observed or not isinstance(hidden, Hidden) or not is_written(hidden):
        if blocks(hidden.start())[0].device.type == "cpu":  # elsewhere another backend has noted its reason
            plain = "on a CPU only a HiddenProblem or an Objective of your own is traced"
            note(direction, "a transformation or a mode of torch is active" if observed else plain)
        return None
    try:
        flat = flatten(hidden)
    except NotFlattenableError as error:
        note(direction, str(error))
        return None
    if any(tensor.device.type != "cpu" for tensor in flat.tensors):
        return None
    traces = traces_of(flat)
    traces.calls += direction == "forward"
    first = settings.calls_before_tracing
    early = f"the first {first} calls are not traced; where an attribute changes, calls are counted anew"
    reason = early if traces.calls <= first else traces.reason
    note(direction, reason, "traced gradient and curvature, plain solver")
    return (flat, traces) if reason is None else None
