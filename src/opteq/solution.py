"""What a solve reports: one report for the forward pass, one for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from opteq.solvers.status import Status
from opteq.states import State, blocks


@dataclass(frozen=True, repr=False)
class Report:
    """How a solve went, per sample.

    Attributes:
        method: what was used, in words.
        residual: relative residual of the answer, ``(B,)``; NaN where no system was solved. Where a problem was solved
            in the smaller variable of its features, theirs, which is at least that of the state.
        steps: steps taken, ``(B,)``.
        codes: a :class:`~opteq.solvers.status.Status` as an integer, ``(B,)``.
        tol: the tolerance that was applied.
        history: residual after every step, or a function that waits for it: :attr:`trace` reads it.
    """

    method: str
    residual: Tensor
    steps: Tensor
    codes: Tensor
    tol: float
    history: Tensor | Callable[[], Tensor] | None = None

    @property
    def trace(self) -> Tensor | None:
        """Residual after every step, ``(steps + 1, B)``."""
        return self.history if self.history is None or isinstance(self.history, Tensor) else self.history()

    @property
    def pending(self) -> bool:
        """Whether the solve may still be running on the device, so that reading a value waits for it."""
        return self.history is not None and not isinstance(self.history, Tensor)

    @property
    def converged(self) -> Tensor:
        """Which samples reached the tolerance, ``(B,)``."""
        return self.codes == int(Status.CONVERGED)

    @property
    def status(self) -> tuple[Status, ...]:
        """A status per sample; :attr:`Status.message` says what to try."""
        return tuple(Status(code) for code in self.codes.tolist())

    def __str__(self) -> str:
        counts = ", ".join(f"{self.status.count(one)} {one.name}" for one in dict.fromkeys(self.status))
        if not self.residual.numel():
            return f"{self.method}: no samples"
        return (
            f"{self.method}: {counts}; at most {int(self.steps.max())} steps, worst relative residual "
            f"{float(self.residual.max()):.1e}, tolerance {self.tol:.1e}"
        )

    __repr__ = __str__  # tensors of a whole batch would be all that is seen

    def failures(self) -> Tensor:
        """Which samples ended without what was asked for."""
        fine = (Status.CONVERGED, Status.APPROXIMATE, Status.FIXED_STEPS)
        return torch.stack([self.codes != int(status) for status in fine]).all(dim=0)

    def describe_failures(self, what: str) -> str:
        """One message about all samples that failed: how many, how far off, and what to try."""
        failed = self.failures()
        residuals = self.residual[failed]
        finite = residuals[torch.isfinite(residuals)]
        worst = f"worst relative residual {float(finite.max()):.1e}" if finite.numel() else "no finite residual"
        lines = [
            f"{int(failed.sum())} of {failed.numel()} samples: {what} "
            f"({self.method}, {worst}, tolerance {self.tol:.1e}, at most {int(self.steps.max())} steps taken)"
        ]
        for code in sorted(set(self.codes[failed].tolist())):
            count = int((self.codes == code).sum())
            lines.append(f"  {count}x {Status(code).name}: {Status(code).message}.")
        return "\n".join(lines)


@dataclass
class BackwardSlot:
    """Where the backward pass leaves its report: it runs after the solution was handed out."""

    report: Report | None = None


@dataclass(frozen=True, repr=False)
class Solution:
    """The equilibrium of a batch.

    Attributes:
        features: what the network hands on, with its gradient attached.
        state: the equilibrium itself, with its gradient attached. Features need not hang on it: either may be
            differentiated by inputs and weights, not one by the other.
        report: how the solve went; its fields can be read here directly.
        term_traces: where they were asked for, the terms of the objective at the points of the solve, each
            ``(steps + 1, B)``.
    """

    features: State
    state: State
    report: Report
    slot: BackwardSlot = field(default_factory=BackwardSlot, repr=False)
    term_traces: dict[str, Tensor] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        features, state = (", ".join(str(tuple(t.shape)) for t in blocks(one)) for one in (self.features, self.state))
        return f"Solution(features {features}; state {state}; {self.report})"

    @property
    def objective_trace(self) -> Tensor | None:
        """The objective at the points of the solve, ``(steps + 1, B)``; None where it was not asked for."""
        return None if self.term_traces is None else torch.stack(list(self.term_traces.values())).sum(dim=0)

    @property
    def residual(self) -> Tensor:
        """Relative residual of the state, ``(B,)``."""
        return self.report.residual

    @property
    def steps(self) -> Tensor:
        """Steps taken, ``(B,)``."""
        return self.report.steps

    @property
    def converged(self) -> Tensor:
        """Which samples reached the tolerance, ``(B,)``."""
        return self.report.converged

    @property
    def status(self) -> tuple[Status, ...]:
        """A status per sample."""
        return self.report.status

    @property
    def trace(self) -> Tensor | None:
        """Residual after every step, ``(steps + 1, B)``."""
        return self.report.trace

    @property
    def backward(self) -> Report | None:
        """How the backward pass went; None until it has run."""
        return self.slot.report
