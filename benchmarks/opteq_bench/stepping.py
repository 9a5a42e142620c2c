"""The cost of a solver step compared with its map, and the residuals that all solvers reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from opteq import engine
from opteq.gradients.base import find_no_grad
from opteq.solvers import Anderson, Picard, Solver
from opteq.states import State, map_state
from opteq_bench import floor, rivals
from opteq_bench.cases import Case
from opteq_bench.exact import ExactAnderson, ExactPicard
from opteq_bench.timing import Clock, Timing, Work, built_at_first_call, reason

STEPS = 20
MEMORY = 5

# Residuals are measured by the plain map, whose rounding differs from the solver's.
SLACK = 1.5
_LONG = 300


def measure(case: Case, clock: Clock, peak: floor.Peak | None) -> dict[str, Any]:
    """Milliseconds per step of the map, our solvers and torchdeq's, with lower bounds, ratios and residuals."""
    works: dict[str, Work] = {
        "map": built_at_first_call(lambda: captured(case)),
        "anderson": ours(case, ExactAnderson(memory=MEMORY, max_steps=STEPS)),
        "picard": ours(case, ExactPicard(max_steps=STEPS)),
    }
    if rivals.version() is not None:
        works |= {f"torchdeq {name}": rival(case, rivals.Rival(name, max_steps=STEPS)) for name in rivals.SOLVERS}
        if case.precision.name == "bf16":
            works["torchdeq anderson, float32 state"] = rival(
                case, rivals.Rival("anderson", max_steps=STEPS), wide=True
            )
    floors = _floors(case)
    times = clock.interleaved(works)
    own = times["map"]
    unit = own.median if isinstance(own, Timing) else None
    return {
        "case": case.name,
        "precision": case.precision.name,
        "steps": STEPS,
        "figures": {name: _figure(time, unit, floors.get(name), peak, case) for name, time in times.items()},
        "answers": check_residuals(case),
    }


def captured(case: Case) -> Work:
    """The plain map, :data:`STEPS` times: one CUDA graph on a GPU, calls one after the other elsewhere."""

    def chain() -> State:
        point = case.start
        for _ in range(STEPS):
            point = case.step(point)
        return point

    def plain() -> State:
        with torch.no_grad():
            return chain()

    if case.precision.device.type != "cuda":
        return plain
    side = torch.cuda.Stream(case.precision.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(case.precision.device))
    with torch.cuda.stream(side):  # libraries set themselves up outside the capture
        for _ in range(2):
            plain()
    torch.cuda.current_stream(case.precision.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        kept = chain()

    def replay() -> State:
        graph.replay()
        return kept

    return replay


def ours(case: Case, solver: Solver) -> Callable[[], State]:
    """Our solver as a layer calls it, in the case's precision."""

    def work() -> State:
        with torch.no_grad(), case.precision.autocast():
            return find_no_grad(case.hidden, solver, None)[0]

    return work


def rival(case: Case, solver: rivals.Rival, wide: bool = False) -> Callable[[], State]:
    """Torchdeq on the same map; ``wide`` keeps its states in float32 where the map computes in bfloat16."""
    if not wide:
        return solver.search(case.step, case.start)

    def step(point: State) -> State:
        return case.step(map_state(lambda part: part.to(case.precision.dtype), point))

    return solver.search(step, map_state(Tensor.float, case.start))


def check_residuals(case: Case) -> dict[str, Any]:
    """The residual that every solver reaches for the same tolerance, measured by the plain map.

    ``agree`` covers our solvers: the fast path, the plain path and plain iteration.
    """
    tol = case.tol
    wide = case.precision.name == "bf16"
    anderson = Anderson(tol=case.asked, max_steps=_LONG, memory=MEMORY)
    found: dict[str, dict[str, Any]] = {}

    def check(name: str, answer: Callable[[], State]) -> None:
        try:
            residual = case.residual(answer())
        except Exception as error:  # reported, not fatal
            found[name] = {"residual": None, "within": False, "fails": reason(error)}
        else:
            found[name] = {"residual": residual, "within": residual <= SLACK * tol, "fails": None}

    def replayed(work: Callable[[], State]) -> Callable[[], State]:
        # The first call of a solve runs as it is, the second captures it, the third replays.
        return lambda: [work() for _ in range(3)][-1]

    def on_plain_path() -> State:
        with engine.off():
            return ours(case, anderson)()

    check("anderson", replayed(ours(case, anderson)))
    check("anderson, plain path", on_plain_path)
    check("picard", replayed(ours(case, Picard(tol=case.asked, max_steps=_LONG))))
    agree = all(entry["within"] for entry in found.values())
    if rivals.version() is not None:
        search = rival(case, rivals.Rival("anderson", max_steps=_LONG, tol=tol), wide)
        check("torchdeq anderson", lambda: case.state(search()))
    return {"tol": tol, "slack": SLACK, "agree": agree, "found": found}


def _floors(case: Case) -> dict[str, floor.Floor]:
    width = case.precision.width
    return {
        "map": case.floor,
        "anderson": floor.anderson(case.floor, case.entries, width, MEMORY, 2),
        "picard": floor.picard(case.floor, case.entries, width),
    }


def _figure(
    time: Timing | str, unit: float | None, least: floor.Floor | None, peak: floor.Peak | None, case: Case
) -> dict[str, Any]:
    if isinstance(time, str):
        return {"ms": None, "fails": time}
    figure: dict[str, Any] = {
        "ms": time.median / STEPS,
        "low": time.low / STEPS,
        "high": time.high / STEPS,
        "repeats": time.repeats,
        "calls": time.calls,
        "ratio": None if unit is None else time.median / unit,
        "fails": None,
    }
    if least is not None:
        figure |= {"floor": asdict(least), "floor_ms": least.milliseconds(peak, case.precision.name)}
    return figure
