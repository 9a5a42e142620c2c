"""A training step of one layer to a tolerance: time, residuals reached, error of the gradients, memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import Tensor

from opteq.gradients import Implicit
from opteq.problems import OptEq
from opteq_bench import floor, rivals
from opteq_bench.cases import Case, Precision, Shape, layer_case, layer_problem, random_images
from opteq_bench.contenders import MAX_STEPS, Contender, ours, reference, shared, torchdeq
from opteq_bench.exact import ExactAnderson, ExactCG
from opteq_bench.stepping import SLACK
from opteq_bench.timing import Clock, Timing, Work


def measure(shape: Shape, batch: int, precision: Precision, clock: Clock, peak: floor.Peak | None) -> dict[str, Any]:
    """Our training step and torchdeq's with its best backward solver."""
    problem = layer_problem(shape, precision.device)
    size = (shape.channels, shape.side, shape.side)
    x = random_images(batch, size, precision.device).requires_grad_()
    case = layer_case(shape, batch, precision)
    contenders = {"opteq": ours(problem, precision)}
    best, tried = _best_rival(problem, precision, x, clock)
    if best is not None:
        contenders["torchdeq"] = torchdeq(problem, precision, best)
    works: dict[str, Work] = {name: _Step(each, x) for name, each in contenders.items()}
    times = clock.interleaved(works | {"shared": lambda: shared(problem, precision, x)})
    figures = {name: _figure(each, times[name], x, case) for name, each in contenders.items()}
    true = reference(problem, precision, x)
    for name, each in contenders.items():
        if figures[name]["fails"] is None:
            memory = clock.memory(_Step(each, x))
            figures[name]["memory"] = None if memory is None else asdict(memory)
            # On the batch that is timed: the choice of kernels depends on its size.
            figures[name]["gradient_error"] = _errors(each.gradients(x), true)
    own = figures["opteq"]
    if own["fails"] is None:
        steps = own["forward_steps"], own["backward_steps"]
        least = floor.training(shape.channels, shape.hidden, shape.side, batch, precision.width, *steps)
        own |= {"floor": asdict(least), "floor_ms": least.milliseconds(peak, precision.name)}
    return {
        "case": str(shape),
        "precision": precision.name,
        "tol": precision.tol,
        "max_steps": MAX_STEPS,
        "figures": figures,
        "shared_ms": times["shared"].median if isinstance(times["shared"], Timing) else None,
        "torchdeq_backward": best,
        "tried": tried,
        "speedup": _speedup(figures),
        "memory_by_steps": _memory_by_steps(problem, precision, x, clock),
        "agree": own["fails"] is None and own["residual"] <= SLACK * precision.tol,
    }


class _Step:
    """A training step as work without arguments."""

    def __init__(self, contender: Contender, x: Tensor) -> None:
        self.contender = contender
        self.x = x

    def __call__(self) -> None:
        self.contender.step(self.x)


def _figure(contender: Contender, time: Timing | str, x: Tensor, case: Case) -> dict[str, Any]:
    if isinstance(time, str):
        return {"ms": None, "fails": time}
    residual = case.residual(case.state(contender.step(x)))
    return {
        "ms": time.median,
        "low": time.low,
        "high": time.high,
        "repeats": time.repeats,
        "calls": time.calls,
        "fails": None,
        "residual": residual,
        **contender.solver_stats(),
    }


def _best_rival(problem: OptEq, precision: Precision, x: Tensor, clock: Clock) -> tuple[str | None, dict[str, Any]]:
    """The fastest backward solver that reaches the tolerance, or else the one with the smallest residual."""
    tried: dict[str, Any] = {}
    if rivals.version() is None:
        return None, tried
    quick = Clock(clock.device, repeats=min(3, clock.repeats), warm_up=1)
    for name in rivals.SOLVERS:
        contender = torchdeq(problem, precision, name)
        time = quick.interleaved({name: _Step(contender, x)})[name]
        if isinstance(time, Timing):
            residual = contender.solver_stats()["backward_residual"]
            assert residual is not None
            tried[name] = {"ms": time.median, "residual": residual, "reached": residual <= precision.tol, "fails": None}
        else:
            tried[name] = {"ms": None, "residual": None, "reached": False, "fails": time}
    ran = [name for name, entry in tried.items() if entry["fails"] is None]
    reached = [name for name in ran if tried[name]["reached"]]
    if reached:
        return min(reached, key=lambda name: float(tried[name]["ms"])), tried
    return min(ran, key=lambda name: float(tried[name]["residual"]), default=None), tried


def _memory_by_steps(problem: OptEq, precision: Precision, x: Tensor, clock: Clock) -> dict[str, Any] | None:
    """Our memory at two fixed numbers of steps, forward and backward, which should be equal."""
    if precision.device.type != "cuda":
        return None
    found = {}
    for steps in (20, 40):
        solver = ExactAnderson(max_steps=steps)
        contender = ours(problem, precision, solver, Implicit(linear=ExactCG(max_steps=steps)))
        memory = clock.memory(_Step(contender, x))
        assert memory is not None
        found[str(steps)] = asdict(memory)
    return found


def _errors(found: dict[str, Tensor], true: dict[str, Tensor]) -> dict[str, float]:
    """``|gradient - true| / |true|`` of the input and of every parameter."""
    return {name: float((found[name].double() - whole).norm() / whole.norm()) for name, whole in true.items()}


def _speedup(figures: dict[str, dict[str, Any]]) -> float | None:
    own, other = figures["opteq"]["ms"], figures.get("torchdeq", {}).get("ms")
    return None if own is None or other is None else float(other / own)
