"""The way back on features: where a solve has left all that is known of the map at its answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opteq.gradients.attach import refuse_hidden_batches, refuse_second_derivative
from opteq.gradients.base import Record
from opteq.problems.expansion import Expansion, Known
from opteq.solution import Report
from opteq.solvers.linear import LinearSolver
from opteq.solvers.loop import drive
from opteq.solvers.refined import RefinedRun
from opteq.states import Layout, single


class FeatureSystem:
    """``(I - J) u = g`` for the gradient g of the features, with ``J = W' D W / mu`` symmetric.

    The features are the fixed point here, so their gradient is the right side as it comes, and the answer goes straight
    to the weight and the input term of one step whose products are all known. The state hangs on the features by half a
    step.

    Args:
        expansion: the map.
        known: its evaluation at the answer.
        linear: solves the system.
    """

    def __init__(self, expansion: Expansion, known: Known, linear: LinearSolver) -> None:
        self.expansion = expansion
        self.known = known
        self.linear = linear

    def attached(self, record: Record) -> tuple[Tensor, Tensor]:
        """Features and state with their gradients; ``record`` is told how the system was solved."""
        expansion = self.expansion
        if not (expansion.W.weight.requires_grad or expansion.c.requires_grad):
            return self.known[-1], expansion.activation(self.known)
        features: Tensor = _Features.apply(self, record, expansion.W.weight, expansion.c)  # type: ignore[no-untyped-call]
        return features, expansion.state(self.known, features)

    def solve(self, gradient: Tensor) -> tuple[Tensor, Report]:
        """The adjoint vector and how its system was solved."""
        vector, _, report = self.solve_and_carry(gradient, self.expansion.slope(self.known))
        return vector, report

    def solve_and_carry(self, gradient: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Report]:
        """The adjoint vector u, ``W u``, and how the system was solved."""
        expansion, layout = self.expansion, Layout.of(self.known[0])
        rough = slope.to(torch.bfloat16)
        carried = torch.empty_like(slope)

        def product(vectors: Tensor, rows: Tensor | None) -> Tensor:
            nonlocal carried
            if rows is None:
                image, carried = expansion.product(slope, single(layout.unpack(vectors)))
                return layout.pack(image)
            some = layout.of_batch(len(rows))
            image, part = expansion.product(slope[rows], single(some.unpack(vectors)))
            carried = carried.index_copy(0, rows, part)
            return some.pack(image)

        def coarse(vectors: Tensor) -> Tensor:
            return layout.pack(expansion.coarse_product(rough, single(layout.unpack(vectors))))

        eps, error = torch.finfo(gradient.dtype).eps, expansion.error
        session = self.linear.open_refined(
            product, None if error is None else coarse, error or 0.0, layout.pack(gradient), eps
        )
        drive(session.run)
        finish = session.finish()
        report = Report(
            method=f"adjoint by {type(self.linear).__name__}",
            residual=finish.residual,
            steps=finish.steps,
            codes=finish.codes,
            tol=max(self.linear.tol, eps),
            history=finish.trace,
        )
        vector = single(layout.restore(finish.point))
        # A refined run ends with a product by its answer, which is of length one then.
        if session.scale is not None and isinstance(session.run, RefinedRun):
            return vector, carried * session.scale[:, :, None, None], report
        return vector, expansion.W(vector), report


class _Features(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, system: FeatureSystem, record: Record, weight: Tensor, c: Tensor) -> Tensor:
        ctx.system, ctx.record = system, record
        # Saved though the system has them too: so autograd notices a weight that was changed in between.
        ctx.save_for_backward(weight, c)
        # A copy: what is handed out may be changed in place, and what is known is needed on the way back.
        return system.known[-1].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        refuse_hidden_batches(gradients)
        originals = ctx.saved_tensors
        system = ctx.system
        wanted = ctx.needs_input_grad[2:]
        with torch.no_grad():
            slope = system.expansion.slope(system.known)
            vector, carried, report = system.solve_and_carry(gradients[0], slope)
            ctx.record(report)
            found = system.expansion.pull(system.known, slope, vector, carried, wanted)
        if torch.is_grad_enabled():  # a second derivative may be asked for
            there = [each for each in found if each is not None]
            guarded = iter(refuse_second_derivative(there, originals))
            found = tuple(None if each is None else next(guarded) for each in found)
        return (None, None, *found)
