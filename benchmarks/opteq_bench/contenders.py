"""One layer in opteq and in torchdeq: the same weights, bound and input term, each with its own solvers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from opteq.equilibrium import Equilibrium
from opteq.gradients import Gradient, Implicit
from opteq.problems import OptEq
from opteq.solution import Report
from opteq.solvers import Anderson, Solver
from opteq.states import single, working_dtype
from opteq_bench import rivals
from opteq_bench.cases import TOL, Precision, bounded_weight, plain_map

MAX_STEPS = 50

SolverStats = dict[str, float | None]
"""Mean steps and worst relative residual, forward and backward."""


@dataclass(frozen=True)
class Contender:
    """A layer that can be trained, for the mean square of its features.

    Attributes:
        problem: holds the parameters.
        precision: of the forward pass.
        features: the layer itself, with a gradient.
        solver_stats: steps and residuals of the latest solves.
        arriving: the cotangent of the features, from the first step on.
    """

    problem: OptEq
    precision: Precision
    features: Callable[[Tensor], Tensor]
    solver_stats: Callable[[], SolverStats]
    arriving: list[Tensor] = field(default_factory=list)

    def step(self, x: Tensor) -> Tensor:
        """Forward and backward; gradients are left in ``x`` and in the parameters. Returns the features.

        The input is the same in every step. The loss is not timed: the cotangent is that of the first step.
        """
        self.problem.zero_grad(set_to_none=True)
        x.grad = None
        with self.precision.autocast():
            features = self.features(x)
        if not self.arriving:
            known = features.detach().to(working_dtype(features.dtype))
            self.arriving.append((known * (2 / known.numel())).to(features.dtype))
        features.backward(self.arriving[0])  # type: ignore[no-untyped-call]
        return features.detach()

    def gradients(self, x: Tensor, steps: int = 3) -> dict[str, Tensor]:
        """Gradients of the input and of every parameter, after the third step: the second one is captured."""
        for _ in range(steps):
            self.arriving.clear()  # so that it belongs to these features
            self.step(x)
        held = {"x": x.grad, **{name: part.grad for name, part in self.problem.named_parameters()}}
        return {name: grad.clone() for name, grad in held.items() if grad is not None}


def ours(
    problem: OptEq, precision: Precision, solver: Solver | None = None, gradient: Gradient | None = None
) -> Contender:
    """Our layer; to :data:`~opteq_bench.cases.TOL` forward and backward by default."""
    solver = solver or Anderson(tol=TOL, max_steps=MAX_STEPS)
    gradient = gradient or Implicit(tol=TOL, max_steps=MAX_STEPS)
    layer = Equilibrium(problem, solver, gradient, on_failure="ignore")

    def solver_stats() -> SolverStats:
        assert layer.last is not None
        forward, slot = layer.last
        return {**_read("forward", forward), **_read("backward", slot.report)}

    return Contender(problem, precision, lambda x: single(layer(x)), solver_stats)


def torchdeq(problem: OptEq, precision: Precision, backward: str) -> Contender:
    """Torchdeq's layer, Anderson forward.

    Its states are in float32, since its Anderson fails in bfloat16; the map computes in the precision, and the
    tolerance is the one that our solvers apply there.
    """
    deq = rivals.Rival("anderson", backward, MAX_STEPS, precision.tol).build().train()
    last: dict[str, Mapping[str, Tensor]] = {}

    def features(x: Tensor) -> Tensor:
        assert problem.U is not None
        weight, c = bounded_weight(problem).to(precision.dtype), problem.U(x)
        step = plain_map(weight, c.to(precision.dtype))
        rows = rivals.RowLayout(x)
        with torch.autocast(precision.device.type, enabled=False):
            points, last["forward"] = deq(
                rows.as_row_map(lambda z: step(single(z).to(precision.dtype))),
                torch.zeros_like(rows.flat(x.detach())),
                backward_writer=lambda info: last.update(backward=info),
            )
        return single(rows.state(points[-1]))

    def solver_stats() -> SolverStats:
        stats: SolverStats = {}
        for way, info in last.items():
            stats[f"{way}_steps"] = float(info["nstep"].float().mean())
            stats[f"{way}_residual"] = float(info["rel_lowest"].max())
        return stats

    return Contender(problem, precision, features, solver_stats)


def shared(problem: OptEq, precision: Precision, x: Tensor) -> None:
    """Forward and backward of what both libraries share: W's bound and the input term."""
    assert problem.U is not None
    problem.zero_grad(set_to_none=True)
    x.grad = None
    with precision.autocast():
        weight, c = bounded_weight(problem), problem.U(x)
    (weight.square().mean() + c.float().square().mean()).backward()


def reference(problem: OptEq, precision: Precision, x: Tensor) -> dict[str, Tensor]:
    """The gradients in float64, solved to 1e-10."""
    double: OptEq = copy.deepcopy(problem).double()
    contender = ours(
        double,
        Precision("float32", precision.device),
        Anderson(tol=1e-10, max_steps=1000),
        Implicit(tol=1e-10, max_steps=1000),
    )
    return contender.gradients(x.detach().double().requires_grad_(), steps=1)


def _read(way: str, report: Report | None) -> dict[str, Any]:
    if report is None:
        return {}
    return {f"{way}_steps": float(report.steps.float().mean()), f"{way}_residual": float(report.residual.max())}
