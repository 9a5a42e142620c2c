"""The way back on features: where a solve has left all that is known of the map at its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opteq._room import room
from opteq.gradients.attach import refuse_hidden_batches, refuse_second_derivative
from opteq.gradients.base import Record
from opteq.problems.expansion import Expansion, Known
from opteq.solution import Report
from opteq.solvers.linear import LinearSolver
from opteq.solvers.loop import drive
from opteq.solvers.parts import Gathered, joined
from opteq.solvers.refined import RefinedRun
from opteq.states import Layout, rows_of, single, with_rows


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
        self.known = known[:-1]
        self._image: Tensor | None = known[-1]
        self.linear = linear

    def attached(self, record: Record, state_too: bool = True) -> tuple[Tensor, Tensor]:
        """Features and state with their gradients; ``record`` is told how the system was solved.

        Without ``state_too`` nobody is to see the state, which has no gradient then.
        """
        expansion = self.expansion
        if not (expansion.W.weight.requires_grad or expansion.c.requires_grad):
            return self.hand_out(), expansion.activation(self.known)
        features: Tensor = _Features.apply(self, record, expansion.W.weight, expansion.c)  # type: ignore[no-untyped-call]
        return features, expansion.state(self.known, features) if state_too else expansion.activation(self.known)

    def hand_out(self) -> Tensor:
        """The features, once: who gets them may change them in place, and what holds a tape is not to be held by it."""
        image, self._image = self._image, None
        assert image is not None
        return image.clone() if image._is_view() else image

    def pull(self, gradient: Tensor, wanted: Sequence[bool]) -> tuple[tuple[Tensor | None, Tensor | None], Report]:
        """What a gradient of the features gives to the weight and to c, where it is wanted, and how that was found."""
        gathered, reports = Gathered(len(gradient)), []
        with room() as mine:
            whole = self.expansion.solved_to(self.linear.tol, mine)
            total = whole.products.weight_sum() if wanted[0] else None
            for rows in whole.parts():
                part, known = whole.part(rows), tuple(whole.taken(each[rows]) for each in self.known)
                slope = part.slope(known)
                vector, carried, report = self._solve(part, known, gradient[rows], slope)
                reports.append(report)
                through = part.pull(slope, vector, carried)
                if total is not None:
                    part.pull_weight(total, known, vector, through)
                if wanted[1]:
                    gathered.put(rows, [part.given(through)])
            weight = None if total is None else total.result()
        return (weight, gathered.tensors[0] if wanted[1] else None), joined(reports)

    def _solve(
        self, expansion: Expansion, known: Known, gradient: Tensor, slope: Tensor
    ) -> tuple[Tensor, Tensor | None, Report]:
        """The adjoint vector u of a batch or of a part of it, ``W u`` where it was found on the way, and a report."""
        layout = Layout.of(known[0])
        rough = slope if expansion.error is None else slope.to(torch.bfloat16)
        carried: Tensor | None = None

        def product(vectors: Tensor, rows: Tensor | None) -> Tensor:
            nonlocal carried
            if rows is None:
                image, carried = expansion.product(slope, single(layout.unpack(vectors)))
                return layout.pack(image)
            some = layout.of_batch(len(rows))
            image, part = expansion.product(rows_of(slope, rows), single(some.unpack(vectors)))
            if part is not None:
                carried = with_rows(torch.empty_like(slope) if carried is None else carried, rows, part)
            return some.pack(image)

        def coarse(vectors: Tensor) -> Tensor:
            return layout.pack(expansion.coarse_product(rough, single(layout.unpack(vectors))))

        eps, error = torch.finfo(gradient.dtype).eps, expansion.error
        session = self.linear.open_refined(
            product, None if error is None else coarse, error or 0.0, layout.pack(gradient), eps, expansion.room
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
        nothing = finish.residual == torch.inf
        if bool(nothing.any()):
            # A gradient that is not finite has no answer, and zeros would hide that from whoever looks for it.
            vector = torch.where(nothing[:, None, None, None], torch.nan, vector)
        # A refined run ends with a product by its answer, which is of length one then.
        if carried is not None and session.scale is not None and isinstance(session.run, RefinedRun):
            return vector, carried * session.scale[:, :, None, None], report
        return vector, None, report


class _Features(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, system: FeatureSystem, record: Record, weight: Tensor, c: Tensor) -> Tensor:
        ctx.system, ctx.record = system, record
        # Saved though the system has them too: so autograd notices a weight that was changed in between.
        ctx.save_for_backward(weight, c)
        return system.hand_out()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        refuse_hidden_batches(gradients)
        originals = ctx.saved_tensors
        with torch.no_grad():
            found, report = ctx.system.pull(gradients[0], ctx.needs_input_grad[2:])
            ctx.record(report)
        if torch.is_grad_enabled():  # a second derivative may be asked for
            there = [each for each in found if each is not None]
            guarded = iter(refuse_second_derivative(there, originals))
            found = tuple(None if each is None else next(guarded) for each in found)
        return (None, None, *found)
