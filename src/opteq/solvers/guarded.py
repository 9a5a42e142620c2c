"""The fixed-point iteration that all methods share: propose, evaluate, and refuse what makes things worse."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.solvers.loop import relative
from opteq.solvers.method import Method, Task
from opteq.solvers.status import Status
from opteq.states import choose_rows, row_norms


class GuardedIteration:
    """A :class:`~opteq.solvers.loop.Process` that moves a batch of points towards ``y = T(y)``.

    Extrapolating methods can overshoot. A proposal is taken where it is a plain step, or does not raise the merit (a
    small residual alone does not count: saddles have one); without a merit, where ``|T(y) - y|`` is at most a few times
    its least value. That length is not divided by ``|T(y)|`` as the stopping rule does: far out along a direction that
    T hardly shrinks the quotient is small, and a row that was drawn there would be kept from coming back.

    A refused row stays where it is and forgets its history, so that its next step is plain. Plain steps count: they
    decrease a merit by its definition, and without one there is nothing better to do. Only where a plain step raises
    both the merit and ``|T(y) - y|``, because the curvature is larger there than the problem knew, it is taken back and
    the next ones are shorter, for methods that can do that.
    """

    def __init__(self, task: Task, method: Method, floor: float) -> None:
        self.evaluate = task.evaluate
        self.admissible = task.admissible
        self.point = task.start
        self.image, self.merit = task.known
        self.method = method
        self.floor = floor
        self.eps = task.eps
        self.codes: Tensor | None = None

    def first(self) -> tuple[Tensor, Tensor]:
        """The start and its residual."""
        self.change, self.gap, residual = self._measured(self.point, self.image)
        self.least = self.gap
        return self.point, residual

    def advance(self, active: Tensor) -> tuple[Tensor, Tensor]:
        """One proposal, judged."""
        proposal = self.admissible(self.method.propose(self.point, self.image, self.change, active))
        image, merit = self.evaluate(proposal)
        change, gap, residual = self._measured(proposal, image)
        finite = torch.isfinite(residual)
        plain = self.method.plain()
        self.codes = torch.where(finite if plain is None else finite | ~plain, 0, int(Status.NON_FINITE))
        if plain is None:
            self.point, self.image, self.merit, self.change = proposal, image, merit, change
        else:
            harmless = self._harmless(gap, merit)
            taken = active & finite & (plain | harmless)
            if merit is not None and self.method.shortens:
                # Plain steps decrease the merit unless the problem's step length is too large for it here.
                long = active & plain & ~harmless & (gap > 1.01 * self.gap)
                taken = taken & ~long
                self.method.shorten(long)
            self.method.restart(active & ~taken)
            self.gap = torch.where(taken, gap, self.gap)
            self.point = choose_rows(taken, proposal, self.point)
            self.image = choose_rows(taken, image, self.image)
            self.change = choose_rows(taken, change, self.change)
            if merit is not None and self.merit is not None:
                self.merit = torch.where(taken, merit, self.merit)
        self.least = torch.fmin(self.least, gap)
        return proposal, residual

    def breakdowns(self) -> Tensor | None:
        """Rows where even a plain step is not finite."""
        return self.codes

    def _harmless(self, gap: Tensor, merit: Tensor | None) -> Tensor:
        if merit is None or self.merit is None:
            return gap <= self.method.growth * self.least
        # Close to the solution the merit changes by less than it is rounded; that is no reason to refuse.
        rounding = 64 * self.eps * self.merit.abs()
        return merit <= self.merit + rounding

    def _measured(self, point: Tensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``image - point``, its length, and that relative to the length of the image."""
        change = image - point
        gap = row_norms(change)
        return change, gap, relative(gap, row_norms(image), self.floor)
