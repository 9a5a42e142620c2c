"""One layer, trained by us and by torchdeq: the same weights, bound and input term, each library's own solvers."""

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
from opteq_bench.cases import ASKED, Precision, plain_map, settled_weight

MAX_STEPS = 50

Said = dict[str, float | None]
"""What solvers say of their own work: mean steps and worst relative residual, forward and backward."""


@dataclass(frozen=True)
class Contender:
    """A layer that can be trained, for the mean square of its features.

    Attributes:
        problem: holds the parameters.
        precision: of the forward pass.
        features: the layer itself, with a gradient.
        said: what its solvers say after a step.
        arriving: the gradient that arrives at the features, once it is known.
    """

    problem: OptEq
    precision: Precision
    features: Callable[[Tensor], Tensor]
    said: Callable[[], Said]
    arriving: list[Tensor] = field(default_factory=list)

    def step(self, x: Tensor) -> Tensor:
        """Forward and backward; gradients are left in ``x`` and in the parameters. Returns the features.

        With the same input as before. The loss is no part of either library, nor of what is timed: its gradient is that
        of the first step.
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
        """Of the input and of every parameter, after the third step: the first two rehearse and capture."""
        for _ in range(steps):
            self.arriving.clear()  # so that it is that of these features, to the last digit
            self.step(x)
        held = {"x": x.grad, **{name: part.grad for name, part in self.problem.named_parameters()}}
        return {name: grad.clone() for name, grad in held.items() if grad is not None}


def ours(
    problem: OptEq, precision: Precision, solver: Solver | None = None, gradient: Gradient | None = None
) -> Contender:
    """Our layer; to :data:`~opteq_bench.cases.ASKED` forward and backward unless told otherwise."""
    solver = solver or Anderson(tol=ASKED, max_steps=MAX_STEPS)
    gradient = gradient or Implicit(tol=ASKED, max_steps=MAX_STEPS)
    layer = Equilibrium(problem, solver, gradient, on_failure="ignore")

    def said() -> Said:
        assert layer.last is not None
        forward, slot = layer.last
        return {**_read("forward", forward), **_read("backward", slot.report)}

    return Contender(problem, precision, lambda x: single(layer(x)), said)


def torchdeq(problem: OptEq, precision: Precision, backward: str) -> Contender:
    """Torchdeq's layer, Anderson forward.

    Its states are in float32, since its Anderson has no small solves in bfloat16; the map computes in the precision,
    and it is asked for what our solvers settle for there, not for digits that the map does not have.
    """
    deq = rivals.Rival("anderson", backward, MAX_STEPS, precision.tol).build().train()
    last: dict[str, Mapping[str, Tensor]] = {}

    def features(x: Tensor) -> Tensor:
        assert problem.U is not None
        weight, c = settled_weight(problem).to(precision.dtype), problem.U(x)
        step = plain_map(weight, c.to(precision.dtype))
        rows = rivals.Rows(x)
        with torch.autocast(precision.device.type, enabled=False):
            points, last["forward"] = deq(
                rows.on_rows(lambda z: step(single(z).to(precision.dtype))),
                torch.zeros_like(rows.flat(x.detach())),
                backward_writer=lambda info: last.update(backward=info),
            )
        return single(rows.state(points[-1]))

    def said() -> Said:
        told: Said = {}
        for way, info in last.items():
            told[f"{way}_steps"] = float(info["nstep"].float().mean())
            told[f"{way}_residual"] = float(info["rel_lowest"].max())
        return told

    return Contender(problem, precision, features, said)


def shared(problem: OptEq, precision: Precision, x: Tensor) -> None:
    """What both libraries pay for outside their solvers: W's bound and the input term, forward and backward."""
    assert problem.U is not None
    problem.zero_grad(set_to_none=True)
    x.grad = None
    with precision.autocast():
        weight, c = settled_weight(problem), problem.U(x)
    (weight.square().mean() + c.float().square().mean()).backward()


def reference(problem: OptEq, precision: Precision, x: Tensor) -> dict[str, Tensor]:
    """The gradients in float64, to ten digits."""
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
