"""What every fixed-point solver is: a frozen set of options, and one entry, :meth:`Solver.solve`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from opteq._autocast import Autocast
from opteq._options import NamedOptions
from opteq._validate import positive, whole
from opteq.solvers.guarded import GuardedIteration
from opteq.solvers.loop import Finish, PlainRun, Process, Rule, Run, drive
from opteq.solvers.method import InverseEstimate, Method, StateTask, Task
from opteq.solvers.refined import KnowingRun, Known, Refinable, RefinedIteration, RefinedRun
from opteq.solvers.trace import Trace, read_trace
from opteq.states import Layout, State, blocks

Step = Callable[[State], State]
MeasuredStep = Callable[[State], tuple[State, Tensor]]


@dataclass(frozen=True)
class Outcome:
    """The answer of a solver.

    Attributes:
        state: the best state found, shaped like the start.
        residual: its relative residual, one number a sample.
        steps: updates taken, a sample.
        codes: a :class:`~opteq.solvers.status.Status` a sample, as integers.
        history: residual after each step, ``(steps + 1, B)``, or where they will be.
        tol: the tolerance that was applied: the one asked for, or the rounding of the map's dtype where that is larger.
        inverse: the solver's estimate of the inverse Jacobian, where it keeps one.
        known: the map at the state, all of it, where the solve was one of :meth:`Solver.open_refined`.
        features: the features of the state, where whoever asked for the solve has them already.
    """

    state: State
    residual: Tensor
    steps: Tensor
    codes: Tensor
    history: Trace
    tol: float
    inverse: InverseEstimate | None = None
    known: Known | None = None
    features: State | None = None

    @property
    def trace(self) -> Tensor:
        """Residual after each step, ``(steps + 1, B)``."""
        return read_trace(self.history)


@dataclass(frozen=True, kw_only=True)
class Solver(metaclass=NamedOptions):
    """Finds ``y = T(y)`` for a batch at once, each sample by itself.

    Args:
        tol: relative residual ``|T(y) - y| / max(|T(y)|, floor)`` at which a sample is finished.
        max_steps: updates at most. Each costs one evaluation of the map, and one more is spent on the start.
        floor: norm below which a state counts as zero, so that a fixed point at zero can be reached.
        check_every: steps between two looks of the host at the residuals; None means every step on a CPU and
            every fourth on an accelerator, where looking makes the device wait.
    """

    tol: float = 1e-4
    max_steps: int = 50
    floor: float = 1e-12
    check_every: int | None = None

    takes_every_step: ClassVar[bool] = False
    """Whether no proposal is ever refused, so that a merit would be computed for nothing."""

    works_on_features: ClassVar[bool] = False
    """Whether the solver iterates on a problem's features instead of its state."""

    def __post_init__(self) -> None:
        positive(self, "tol")
        positive(self, "floor")
        whole(self, "max_steps")
        if self.check_every is not None:
            whole(self, "check_every")

    def solve(
        self,
        step: Step,
        start: State,
        *,
        measured: MeasuredStep | None = None,
        project: Step | None = None,
        interval: tuple[float, float] | None = None,
        damping: float | Tensor = 1.0,
        coupled: bool = False,
        keep_inverse: bool = True,
    ) -> Outcome:
        """Solve ``y = step(y)`` from ``start``.

        Args:
            step: the map; it keeps the shape of its argument.
            start: a tensor or a tuple of tensors, batch first.
            measured: the same map together with a merit, one number a sample that plain steps decrease.
                It guards methods that extrapolate.
            project: brings a state to where it makes sense, for methods that extrapolate.
            interval: the ends between which ``project`` clamps every entry, where it does just that.
            damping: the damping that the problem recommends, for solvers that were not told one; a number, or one a
                sample ``(B,)``.
            coupled: whether samples depend on each other, so that the batch is solved as one.
            keep_inverse: whether the outcome needs the solver's estimate of the inverse Jacobian. The fused steps of a
                GPU keep none.
        """
        session = self.open(
            step,
            start,
            measured=measured,
            project=project,
            interval=interval,
            damping=damping,
            coupled=coupled,
            keep_inverse=keep_inverse,
        )
        with session.caller.off():
            drive(session.run)
            return session.outcome()

    def open(
        self,
        step: Step,
        start: State,
        *,
        measured: MeasuredStep | None = None,
        project: Step | None = None,
        interval: tuple[float, float] | None = None,
        damping: float | Tensor = 1.0,
        coupled: bool = False,
        keep_inverse: bool = True,
        at_start: Callable[[], State] | None = None,
        keep_image: bool = False,
    ) -> Session:
        """A solve that has evaluated the map at its start and not begun; arguments as for :meth:`solve`.

        ``at_start`` gives the map at ``start`` where that takes less than evaluating it; a merit is not among it.
        ``keep_image`` tells that the image of the answer is of use, where it is at hand.
        """
        coupled = coupled or self.couples_batch
        layout = Layout.of(start, coupled)
        caller = Autocast.current(layout.device)
        evaluate = _Evaluation(step, None if self.takes_every_step else measured, layout, caller)
        with caller.off():
            known = evaluate.state(start, at_start)
            tol = max(self.tol, evaluate.eps)
            rule = self._rule(tol, layout.device)
            if not keep_inverse:
                task = StateTask(
                    evaluate.state, project, interval, start, known, layout, damping, evaluate.eps, keep_image
                )
                fused = self._fused(task, rule)
                if fused is not None:
                    return Session(fused, layout, tol, caller, None)
            first, image = layout.pack(start), layout.pack(known[0])
            # The same numbers, but batched where the image is: under vmap a start may not know of the batching.
            first = torch.where(torch.zeros_like(image, dtype=torch.bool), image, first)

            def admissible(rows: Tensor) -> Tensor:
                if project is None and layout.exact:
                    return rows
                # By way of the state's own dtype: a residual then belongs to a point that can be returned.
                state = layout.unpack(rows)
                return layout.pack(state if project is None else project(state))

            column = _by_row(damping, layout)
            rows_task = Task(evaluate.rows, admissible, first, (image, known[1]), layout, column, evaluate.eps)
            method, process = self._process(rows_task)
        return Session(PlainRun(process, rule), layout, tol, caller, method)

    @property
    def refines(self) -> bool:
        """Whether the solver can work on rough images, by :meth:`open_refined`: it goes by the shared iteration."""
        return type(self)._process is Solver._process and not self.couples_batch

    def open_refined(self, refinable: Refinable, known: Known, damping: float | Tensor = 1.0) -> Session:
        """A solve of a map without a merit that can be evaluated roughly, on a CPU and without a tape.

        Args:
            refinable: the map.
            known: its evaluation at the start.
            damping: as for :meth:`solve`.
        """
        start, image = known[0], known[-1]
        layout = Layout.of(start)
        eps = torch.finfo(image.dtype).eps
        tol = max(self.tol, eps)

        def evaluate(rows: Tensor) -> tuple[Tensor, Tensor | None]:
            state = layout.unpack(rows)
            assert isinstance(state, Tensor)
            return layout.pack(refinable.exact(state)[-1]), None

        rows = layout.pack(start), (layout.pack(image), None)
        task = Task(evaluate, lambda rows: rows, *rows, layout, _by_row(damping, layout), eps)
        rule = self._rule(tol, layout.device)
        run = self._looked(task, refinable, known, rule) if refinable.error is None else None
        if run is not None:
            return Session(run, layout, tol, Autocast.current(layout.device), None)
        method = self._method(task)
        process = RefinedIteration(task, method, self.floor, refinable, known, rule.tol)
        return Session(RefinedRun(process, rule), layout, tol, Autocast.current(layout.device), None)

    @property
    def couples_batch(self) -> bool:
        """Whether the solver itself ties samples together."""
        return False

    def _rule(self, tol: float, device: torch.device) -> Rule:
        every = self.check_every or (1 if device.type == "cpu" else 4)
        return Rule(tol, self.max_steps, every)

    def _process(self, task: Task) -> tuple[Method | None, Process]:
        method = self._method(task)
        return method, GuardedIteration(task, method, self.floor)

    def _fused(self, task: StateTask, rule: Rule) -> Run | None:  # noqa: ARG002
        """The solve in fused kernels, where the method has them and they can be used here."""
        return None

    def _looked(self, task: Task, refinable: Refinable, known: Known, rule: Rule) -> KnowingRun | None:  # noqa: ARG002
        """A solve on a CPU that looks at every number on its way, where the method has one and it suits the task."""
        return None

    def _method(self, task: Task) -> Method:
        """A fresh method for one solve."""
        raise NotImplementedError(f"{type(self).__name__} should define _method or _process")


def _by_row(damping: float | Tensor, layout: Layout) -> float | Tensor:
    """A damping a sample as a column beside the matrix; samples that are solved as one share the least."""
    if not isinstance(damping, Tensor):
        return damping
    column = damping.to(layout.dtype)[:, None]
    return column.amin(dim=0, keepdim=True) if layout.coupled else column


class _Evaluation:
    """The map in the caller's precision, on states and on matrices, checked and with its rounding noted."""

    def __init__(self, step: Step, measured: MeasuredStep | None, layout: Layout, caller: Autocast) -> None:
        self.step = step
        self.measured = measured
        self.layout = layout
        self.caller = caller
        self.eps = torch.finfo(caller.dtype).eps if caller.enabled and caller.dtype else 0.0

    def state(self, state: State, quick: Callable[[], State] | None = None) -> tuple[State, Tensor | None]:
        """Image and merit of a state; the image by ``quick`` where that knows it, and no merit is wanted."""
        with self.caller.entered():
            if self.measured is not None:
                image, merit = self.measured(state)
            else:
                image, merit = self.step(state) if quick is None else quick(), None
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
class Session:
    """A solve under way: what runs, and how its rows become an answer."""

    run: Run
    layout: Layout
    tol: float
    caller: Autocast
    method: Method | None

    def outcome(self, finish: Finish | None = None) -> Outcome:
        """Where the solve stands, as an answer; or stood, at a ``finish`` of its run."""
        layout = self.layout
        finish = self.run.finish() if finish is None else finish
        knowing = self.run.process if isinstance(self.run, RefinedRun) else self.run
        return Outcome(
            state=layout.restore(finish.point),
            residual=layout.per_sample(finish.residual),
            steps=layout.per_sample(finish.steps),
            codes=layout.per_sample(finish.codes),
            history=finish.trace.expand(-1, layout.batch) if layout.coupled else finish.trace,
            tol=self.tol,
            inverse=None if self.method is None else self.method.inverse(),
            known=knowing.known if isinstance(knowing, RefinedIteration | KnowingRun) else None,
        )
