"""The base class of fixed-point solvers: frozen options, and one entry point, :meth:`Solver.solve`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from opteq.common.options import NamedOptions
from opteq.common.validate import not_negative, positive, share, whole
from opteq.solvers.loop import (
    Finish,
    GuardedIteration,
    Iteration,
    Loop,
    Method,
    Process,
    RowTask,
    Rule,
    iterate,
)
from opteq.solvers.status import SUCCESSES, Status
from opteq.states import Autocast, Layout, LowestPrecision, State, blocks

Step = Callable[[State], State]
StepAndMerit = Callable[[State], tuple[State, Tensor]]


@dataclass(frozen=True)
class Outcome:
    """The answer of a solver.

    Attributes:
        state: the best state found, shaped like the start.
        residual, steps, codes, history: as in :class:`Report`.
        tol: the tolerance that was applied: the one asked for, or the rounding of the map's dtype where that is larger.
        inverse_adjoint: applies the transpose of the solver's estimate of ``(I - J)^-1``, where it keeps one.
        features: the features of the state, where they are known already.
    """

    state: State
    residual: Tensor
    steps: Tensor
    codes: Tensor
    history: Tensor | Callable[[], Tensor]
    tol: float
    inverse_adjoint: Callable[[Tensor], Tensor] | None = None
    features: State | None = None

    @property
    def trace(self) -> Tensor:
        """Residual after each step, ``(steps + 1, B)``."""
        return self.history if isinstance(self.history, Tensor) else self.history()


@dataclass(frozen=True, repr=False)
class Report:
    """The outcome of a solve, per sample.

    Attributes:
        method, steps: the method in words, and the number of steps ``(B,)``.
        residual: relative residual of the result, ``(B,)``; NaN where no system was solved. Where a problem was solved
            in its features, it is theirs, which is at least that of the state.
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
        """Which samples failed, ``(B,)``."""
        return torch.stack([self.codes != int(status) for status in SUCCESSES]).all(dim=0)

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


@dataclass(frozen=True)
class FixedPointTask:
    """``y = step(y)``, to be solved from ``start``.

    Attributes:
        step: the map; it keeps the shape of its argument.
        start: a tensor or a tuple of tensors, batch first.
        step_and_merit: the same map together with a merit, one value per sample that plain steps decrease. It guards
            methods that extrapolate.
        project: the nearest state at which the objective is finite, for methods that extrapolate.
        damping: the damping that the problem recommends; a number, or one per sample ``(B,)``.
        coupled: whether samples depend on each other, so that the batch is solved as one.
    """

    step: Step
    start: State
    step_and_merit: StepAndMerit | None = None
    project: Step | None = None
    damping: float | Tensor = 1.0
    coupled: bool = False


@dataclass(frozen=True, kw_only=True)
class Solver(metaclass=NamedOptions):
    """Finds ``y = T(y)`` for a batch at once, each sample by itself.

    To write one, derive a frozen dataclass and define ``_method``, which returns a new
    :class:`~opteq.solvers.loop.Method` for every solve. The loop does the rest: it evaluates T, refuses steps that make
    things worse, stops each sample by itself and keeps its best point. ``docs/solvers.md`` has an example.

    Args:
        tol: relative residual ``|T(y) - y| / max(|T(y)|, floor)`` at which a sample is finished. 0 takes exactly
            ``max_steps`` steps for every sample, and is no failure.
        max_steps: updates at most. Each costs one evaluation of the map, and one more is spent on the start.
        floor: norm below which a state counts as zero, so that a fixed point at zero can be reached.
        check_every: steps between two checks of the host whether all samples have finished; None means every step on a
            CPU and every fourth on an accelerator, where a check synchronises.
    """

    tol: float = 1e-4
    max_steps: int = 50
    floor: float = 1e-12
    check_every: int | None = None

    works_on_features: ClassVar[bool] = False
    """Whether the solver iterates on a problem's features instead of its state."""

    takes_every_step: ClassVar[bool] = False
    """Whether no proposal is ever refused, so that a merit would be computed for nothing."""

    def __post_init__(self) -> None:
        not_negative(self, "tol")
        positive(self, "floor")
        whole(self, "max_steps")
        if self.check_every is not None:
            whole(self, "check_every")

    def solve(
        self, step: Step, start: State, *, step_and_merit: StepAndMerit | None = None, project: Step | None = None,
        damping: float | Tensor = 1.0, coupled: bool = False,
    ) -> Outcome:  # fmt: skip
        """Solve ``y = step(y)`` from ``start``; the arguments are those of :class:`FixedPointTask`."""
        return self.run(FixedPointTask(step, start, step_and_merit, project, damping, coupled))

    def run(self, task: FixedPointTask) -> Outcome:
        """Solve ``task``."""
        solve = self.open(task)
        with solve.caller.off():
            iterate(solve.iteration)
            return solve.outcome()

    def open(self, task: FixedPointTask) -> Solve:
        """A solve that has evaluated the map at its start and not begun."""
        start = task.start
        layout = Layout.of(start, task.coupled or self.couples_batch)
        caller = Autocast.current(layout.device)
        evaluate = Evaluation(task.step, None if self.takes_every_step else task.step_and_merit, layout, caller)
        with caller.off():
            image, merit = evaluate.state(start)
            first, packed = layout.pack(start), layout.pack(image)
            if torch._C._are_functorch_transforms_active() or packed.requires_grad:
                # The same numbers, but batched, and on the tape, where the image is: a start may not know of either.
                first = torch.where(torch.zeros_like(packed, dtype=torch.bool), packed, first)

            def admissible(rows: Tensor) -> Tensor:
                # By way of the state's own dtype: a residual then belongs to a point that can be returned.
                state = layout.unpack(rows)
                there = state if task.project is None else task.project(state)
                return rows if there is state and layout.exact else layout.pack(there)

            damping = task.damping
            if isinstance(damping, Tensor):
                damping = damping.to(layout.dtype)[:, None]
                if layout.coupled:  # solved as one: the least of all samples
                    damping = damping.amin(dim=0, keepdim=True)
            rows = RowTask(evaluate.rows, admissible, first, (packed, merit), layout, damping, evaluate.eps)
            method, process = self._process(rows)
            rule = self.rule(layout.device, evaluate.eps)
        return Solve(Loop(process, rule), layout, rule.tol, caller, method)

    def rule(self, device: torch.device, eps: float) -> Rule:
        """When to stop, for a map on ``device`` that is rounded to ``eps``."""
        every = self.check_every or (1 if device.type == "cpu" else 4)
        if self.tol == 0:
            return Rule(0.0, self.max_steps, self.max_steps + 1, to_the_end=True)
        return Rule(max(self.tol, eps), self.max_steps, every)

    @property
    def couples_batch(self) -> bool:
        """Whether the solver itself ties samples together."""
        return False

    def _process(self, task: RowTask) -> tuple[Method | None, Process]:
        method = self._method(task)
        rule = self.rule(task.layout.device, task.eps)
        return method, GuardedIteration(task, method, self.floor, None if rule.to_the_end else rule.tol)

    def _method(self, task: RowTask) -> Method:
        """A fresh method for one solve."""
        raise NotImplementedError(f"{type(self).__name__} should define _method or _process")


@dataclass(frozen=True, kw_only=True)
class DampedSolver(Solver):
    """A solver that takes a share ``damping`` of a step; None takes what the problem recommends, else 1."""

    damping: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.damping is not None:
            share(self, "damping")

    def _damping(self, task: RowTask) -> float | Tensor:
        return task.damping if self.damping is None else self.damping


class Evaluation:
    """The map in the caller's precision, on states and on matrices, checked and with its rounding noted."""

    def __init__(self, step: Step, step_and_merit: StepAndMerit | None, layout: Layout, caller: Autocast) -> None:
        self.step = step
        self.step_and_merit = step_and_merit
        self.layout = layout
        self.caller = caller
        self.eps = 0.0

    def state(self, state: State) -> tuple[State, Tensor | None]:
        """Image and merit of a state."""
        if not self.eps and self.caller.enabled:
            with LowestPrecision() as lowest:  # type: ignore[no-untyped-call]  # torch's
                outcome = self._state(state)
            self.eps = max(self.eps, lowest.eps)
            return outcome
        return self._state(state)

    def _state(self, state: State) -> tuple[State, Tensor | None]:
        with self.caller.entered():
            image, merit = (self.step(state), None) if self.step_and_merit is None else self.step_and_merit(state)
        self.layout.check(image, "what the map returns")
        self.eps = max(self.eps, *(torch.finfo(part.dtype).eps for part in blocks(image)))
        if merit is not None and self.layout.coupled:
            merit = merit.sum(dim=0, keepdim=True)
        return image, merit

    def rows(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Image and merit of a matrix."""
        image, merit = self.state(self.layout.unpack(rows))
        return self.layout.pack(image), merit


@dataclass(frozen=True)
class Solve:
    """A solve under way: its iteration, and how the iteration's rows become an answer."""

    iteration: Iteration
    layout: Layout
    tol: float
    caller: Autocast
    method: Method | None = None

    def outcome(self, finish: Finish | None = None) -> Outcome:
        """Where the solve stands, as an answer; or stood, at a ``finish`` of its iteration."""
        layout = self.layout
        finish = (self.iteration.finish() if finish is None else finish).per_sample(layout)
        codes = finish.codes
        if self.tol == 0:  # a fixed number of steps was asked for, and taken: also where they end at a fixed point
            taken = (codes == int(Status.MAX_STEPS)) | (codes == int(Status.CONVERGED))
            codes = torch.where(taken, int(Status.FIXED_STEPS), codes)
        return Outcome(
            state=layout.restore(finish.point),
            residual=finish.residual,
            steps=finish.steps,
            codes=codes,
            history=finish.trace,
            tol=self.tol,
            inverse_adjoint=None if self.method is None else self.method.inverse_adjoint,
        )
