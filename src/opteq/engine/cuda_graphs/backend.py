"""The backend: bound problems solved, and differentiated, by captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from opteq.engine.cuda_graphs import cache
from opteq.engine.cuda_graphs.adjoint import AdjointByGraph, attach_adjoint
from opteq.engine.cuda_graphs.bounds import Job, scales_by_graph
from opteq.engine.cuda_graphs.operations import FastOperations, SideEffectCheck, SideEffectError, WithOperations
from opteq.engine.flatten import flatten, structure_of
from opteq.engine.log import note
from opteq.engine.traced import traces_of, with_traced_functions
from opteq.engine.triton.solvers import open_fixed_point
from opteq.engine.values_read import NotFlattenableError
from opteq.gradients.base import find, formulate
from opteq.operators import Conv2d, Dense, SeparableConv2d
from opteq.operators.spectral.bound import known_scales
from opteq.problems.hidden import BoundMap
from opteq.solution import Report
from opteq.solvers import SAM, Outcome, Solver, Status
from opteq.solvers.base import Solve
from opteq.solvers.linear import LinearSolver
from opteq.solvers.loop import Finish, Iteration
from opteq.states import Autocast, State, any_row, blocks, like, map_state

_MOST_STEPS = 400
"""A graph holds every step that a solve may take. Where more are allowed, and needed, the others run plainly."""


def solve(hidden: BoundMap, solver: Solver, start: State | None, same_steps: bool) -> Outcome | None:
    """The equilibrium of a bound problem by a captured graph; None where the plain path should find it."""
    if solver.max_steps > _MOST_STEPS:
        return _solve_in_two(hidden, solver, start, same_steps)
    try:
        flat, method = flatten(hidden), structure_of(solver)
    except NotFlattenableError as error:
        note("forward", str(error))
        return None
    count = len(flat.tensors)
    inputs = [*flat.tensors, *([] if start is None else blocks(start))]
    if (reason := cache.unusable(inputs)) is not None:
        note("forward", reason)
        return None
    autocast = Autocast.current(inputs[0].device)

    def open_solve(tensors: list[Tensor]) -> _ForwardSolve:
        begin = None if start is None else like(start, tuple(tensors[count:]))
        # In the caller's precision: a capture may happen inside a region without autocast.
        with autocast.entered():
            problem = with_traced_functions(flat, traces_of(flat, hidden.compile_functions), tensors[:count])
            return _ForwardSolve(problem, solver, begin, same_steps)

    key = ("forward", flat.structure, method, start is None, same_steps, autocast, hidden.compile_functions)
    with autocast.off():
        answer = cache.run(key, inputs, open_solve)
    if isinstance(answer, str):
        note("forward", answer)
        return None
    note("forward", None)
    (*found, residual, steps, codes, history), facts = answer
    assert isinstance(facts, tuple)
    form, tol = facts
    state, *beside = tree_unflatten(found, form)
    return Outcome(state, residual, steps, codes, history, tol, features=beside[0] if beside else None)


def _solve_in_two(hidden: BoundMap, solver: Solver, start: State | None, same_steps: bool) -> Outcome | None:
    """A captured solve of as many steps as a graph holds, continued plainly where samples need more."""
    # Where every step counts, the last one is the answer; a network of so many steps is not one of fewer, begun anew.
    if solver.tol == 0 or same_steps or isinstance(solver, SAM):
        note("forward", f"more than {_MOST_STEPS} steps are not captured; max_steps is {solver.max_steps}")
        return None
    first = solve(hidden, replace(solver, max_steps=_MOST_STEPS), start, same_steps)
    if first is None:
        return None
    unfinished = first.codes == int(Status.MAX_STEPS)
    if not any_row(unfinished):
        return first
    note("forward", f"{_MOST_STEPS} steps are captured, and samples needed more")
    rest = find(hidden, replace(solver, max_steps=solver.max_steps - _MOST_STEPS), first.state, same_steps)

    def chosen(one: Tensor, other: Tensor) -> Tensor:
        return torch.where(unfinished.reshape(-1, *[1] * (one.ndim - 1)), one, other)

    return Outcome(
        map_state(chosen, rest.state, first.state), chosen(rest.residual, first.residual),
        first.steps + chosen(rest.steps, torch.zeros_like(rest.steps)), chosen(rest.codes, first.codes),
        lambda: torch.cat([first.trace, rest.trace[1:]]), first.tol,
    )  # fmt: skip


def differentiate(
    hidden: BoundMap, state: State, outcome: Outcome, linear: LinearSolver, record: Callable[[Report], None]
) -> tuple[State, Outcome] | None:
    """``state`` and its features with the implicit gradient, which a captured graph computes."""
    try:
        flat = flatten(hidden)
        hash(linear)
    except (NotFlattenableError, TypeError) as error:
        note("backward", str(error))
        return None
    reason = cache.unusable([*flat.tensors, *blocks(state)])
    if reason is not None:
        note("backward", reason)
        return None
    features = outcome.features
    if features is None:
        try:
            with torch.no_grad(), SideEffectCheck(flat.tensors):
                features = distinct_features(hidden, state)
        except SideEffectError:  # the backward pass computes them again, and has to find the same: autograd keeps them
            features = None
    adjoint = AdjointByGraph(flat, state, linear, hidden.coupled, hidden.compile_functions, _MOST_STEPS)
    attached = attach_adjoint(adjoint, features, record)
    return attached[0], replace(outcome, features=attached[1])


def bounded_weights(module: nn.Module) -> AbstractContextManager[None] | None:
    """The bounds of all operators inside ``module`` by one graph."""
    jobs: list[Job] = []
    for part in module.modules():
        if isinstance(part, Dense | Conv2d) and part.bound is not None:
            jobs.append((part.bound, (part.weight,)))
        elif isinstance(part, SeparableConv2d) and part.bound is not None:
            jobs.append((part.bound, (part.pointwise, part.depthwise.transpose(0, 1))))
    scales = scales_by_graph(jobs) if jobs else None
    return None if scales is None else _with_scales(jobs, scales)


@contextmanager
def _with_scales(jobs: Sequence[Job], scales: Sequence[Tensor]) -> Iterator[None]:
    # The jobs are kept as long as scales are found by the identity of a weight: one that is parametrised is made anew
    # at every look, and may be given the identity of another one that is gone.
    found = {id(tensors[0]): scale for (_, tensors), scale in zip(jobs, scales, strict=True)}
    token = known_scales.set({**(known_scales.get() or {}), **found})
    try:
        yield
    finally:
        known_scales.reset(token)


def distinct_features(hidden: BoundMap, state: State) -> State | None:
    """The features of a state; None where they are the state itself."""
    features = hidden.features(state)
    same = [id(part) for part in blocks(features)] == [id(part) for part in blocks(state)]
    return None if same else features


class _ForwardSolve:
    """A forward solve under way, to be captured."""

    def __init__(self, hidden: BoundMap, solver: Solver, start: State | None, same_steps: bool) -> None:
        self.hidden = hidden
        operations = FastOperations()
        with operations:
            self.formulation = formulate(hidden, solver, start, same_steps)
            self.solve: Solve = open_fixed_point(hidden, solver, self.formulation.task)
        self.iteration: Iteration = WithOperations(self.solve.iteration, operations)
        self.facts: object = None  # the form of state and features, if there are any, and the tolerance

    def tensors(self, finish: Finish) -> list[Tensor]:
        """State, features, residual, steps, codes, history."""
        outcome = self.solve.outcome(finish)
        # Operations of its own: this part of the graph is captured before the steps, and runs after them.
        with self.solve.caller.entered(), FastOperations():
            state = self.formulation.state(outcome.state)
            features = distinct_features(self.hidden, state)
        parts, form = tree_flatten((state,) if features is None else (state, features))
        self.facts = form, self.solve.tol
        return [*parts, outcome.residual, outcome.steps, outcome.codes, outcome.trace]
