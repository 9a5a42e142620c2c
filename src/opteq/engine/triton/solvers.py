"""Solves by Triton kernels, where they have the method, and by the plain loop where they do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch

from opteq.engine.triton.launch import may_launch
from opteq.penalties import ElementwisePenalty
from opteq.problems.branches.parallel import BoundParallel
from opteq.problems.hidden import BoundMap, Hidden
from opteq.problems.proximal import ProximalGradient
from opteq.problems.written import WrittenHidden
from opteq.solvers import Anderson, Solver
from opteq.solvers.base import Evaluation, FixedPointTask, Solve
from opteq.solvers.linear import CG, LinearSolver
from opteq.solvers.linear.base import LinearSolve, usable_scale
from opteq.states import Autocast, Layout, State, blocks

_MOST_COLUMNS = 8
"""Differences that the Anderson kernels can remember: their small system is one tile of a program."""


def open_fixed_point(hidden: BoundMap, solver: Solver, task: FixedPointTask) -> Solve:
    """A solve of a bound problem, by a task of its, that has evaluated the map at its start and not begun."""
    own = type(solver)._method is Anderson._method  # a subclass may change when it stops, not what it does
    if task.step_and_merit is not None and _may_overshoot(hidden):
        own = False  # a step that increases the merit is undone and shortened, which kernels do not do
    if not (isinstance(solver, Anderson) and own and solver.memory <= _MOST_COLUMNS and solver.tol != 0):
        return solver.open(task)
    if torch.is_grad_enabled() or not may_launch(*blocks(task.start)):
        return solver.open(task)
    from opteq.engine.triton.fixed_point import MANY_PROGRAMS, FusedAnderson
    from opteq.engine.triton.row_state import Blocks

    layout = Layout.of(task.start, task.coupled)
    caller = Autocast.current(layout.device)
    evaluate = Evaluation(task.step, task.step_and_merit, layout, caller)
    with caller.off():
        known = evaluate.state(task.start)
        memory = Blocks(blocks(known[0]), layout.rows, many=MANY_PROGRAMS)
        if not memory.fits:
            return solver.open(task)
        interval = None if task.project is None else _interval(hidden, task.start)
        anderson = FusedAnderson(solver, task, evaluate, known, interval, memory)
        return Solve(anderson, layout, anderson.rule.tol, caller)


def open_linear(
    linear: LinearSolver, product: Callable[[State], State], rhs: State, layout: Layout, eps: float
) -> LinearSolve:
    """A solve of ``(I - S) v = rhs`` that has not begun."""
    if type(linear)._process is not CG._process or torch.is_grad_enabled() or not may_launch(*blocks(rhs)):
        return linear.open_states(product, rhs, layout, eps)
    from opteq.engine.triton.conjugate_gradients import FusedConjugateGradients
    from opteq.engine.triton.row_state import Blocks

    memory = Blocks(blocks(rhs), layout.rows)
    if not memory.fits:
        return linear.open_states(product, rhs, layout, eps)
    # Squares of float64 may be too large for any number.
    lengths = _lengths(rhs, layout.coupled) if torch.float64 in layout.dtypes else None
    rule = linear.rule(layout.dtype, layout.device, eps)
    return LinearSolve(FusedConjugateGradients(product, rhs, lengths, memory, rule, layout.dtype), None)


def _may_overshoot(hidden: BoundMap) -> bool:
    """Whether a plain step may increase the merit: where the curvature is a user's, estimated or not known."""
    if isinstance(hidden, BoundParallel):
        return any(map(_may_overshoot, hidden.parts))
    return isinstance(hidden, ProximalGradient) or (isinstance(hidden, WrittenHidden) and not hidden.concave)


def _interval(hidden: BoundMap, state: State) -> tuple[float, float] | None:
    """The interval to which a projection clamps every entry, where it does that and no more."""
    domains = set()
    for penalty in hidden.penalties(state) if isinstance(hidden, Hidden) else ():
        # A penalty that is infinite at the ends of its domain keeps clear of them by a projection of its own.
        if not isinstance(penalty, ElementwisePenalty) or type(penalty).project is not ElementwisePenalty.project:
            return None
        domains.add(penalty.domain)
    return domains.pop() if len(domains) == 1 else None


def _lengths(state: State, coupled: bool) -> torch.Tensor:
    """The norm of every sample, or of the whole batch ``(1,)``, in float64."""
    norms = []
    for part in blocks(state):
        dims = tuple(range(0 if coupled else 1, part.ndim))
        largest = usable_scale(part.abs().amax(dim=dims, keepdim=True)) if dims else torch.ones_like(part)
        scaled = part / largest
        norm = torch.linalg.vector_norm(scaled, dim=dims, dtype=torch.float64) if dims else scaled.abs().double()
        norms.append(norm * largest.reshape(norm.shape))
    return reduce(torch.hypot, norms).reshape(-1)
