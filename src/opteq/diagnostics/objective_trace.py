"""The terms of an objective along a solve, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opteq.problems.hidden import BoundMap, Hidden
from opteq.solvers import Solver
from opteq.solvers.loop import Loop
from opteq.states import State, any_row


@torch.no_grad()
def trace_terms(hidden: BoundMap, solver: Solver, start: State | None) -> dict[str, Tensor]:
    """Every term at the point that each sample stands at after each step, ``(steps + 1, B)``.

    These are points that the solver has taken, within the domain of the penalty; proposals that were refused do not
    count. A finished sample keeps the value of its answer.
    """
    if not isinstance(hidden, Hidden):
        raise TypeError(f"trace_objective needs a problem with an objective; {type(hidden).__name__} has none")
    if solver.works_on_features:
        raise TypeError(f"trace_objective needs a solver that works on the state; {type(solver).__name__} does not")
    task = hidden.state_form().task
    solve = solver.open(task if start is None else replace(task, start=start))
    loop, layout = solve.iteration, solve.layout
    assert isinstance(loop, Loop)
    process: Any = loop.process  # that of a fixed-point solver, which stands at a point
    traces: dict[str, list[Tensor]] = {}

    def note() -> None:
        point = torch.where(loop.unfinished()[:, None], process.point, loop.best)
        state = hidden.project(layout.unpack(point))
        for name, values in hidden.terms(state).items():
            traces.setdefault(name, []).append(values)

    with solve.caller.off():
        loop.begin()
        note()
        for _ in range(loop.rule.max_steps):
            if not any_row(loop.unfinished()):
                break
            loop.advance()
            note()
    return {name: torch.stack(values) for name, values in traces.items()}
