"""The layer: problem + solver + gradient."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.hooks import RemovableHandle

from opteq.common.dynamo import constant
from opteq.common.options import NamedOptions
from opteq.common.registration import HoldsOptions
from opteq.common.validate import check_choice, check_kind
from opteq.diagnostics.convergence_monitor import ConvergenceMonitor, FailureCheck
from opteq.diagnostics.minimum import mark_non_minima
from opteq.diagnostics.objective_trace import trace_terms
from opteq.gradients import Gradient, Implicit
from opteq.gradients.base import attach, wants_gradient
from opteq.problems.base import Problem, WrittenProblem
from opteq.problems.hidden import BoundMap, Hidden
from opteq.solution import BackwardSlot, Report, Solution
from opteq.solvers import Anderson, Outcome, Solver, Status
from opteq.states import Layout, State, any_row, blocks, copy_if_shared, map_state, nan_rows

_PARTS: dict[str, tuple[type, str]] = {
    "problem": (Problem, "a hidden problem such as opteq.OptEq"),
    "solver": (Solver, "a solver such as opteq.Anderson()"),
    "gradient": (Gradient, "a gradient such as opteq.Implicit()"),
    "compile_functions": (bool, "True or False, as the option compile"),
}
"""The parts of a layer, which are checked whenever they are assigned: their class, and what they should be."""

Observer = Callable[[BoundMap, State], None]
Function = TypeVar("Function", bound=Callable[..., Any])
_DISABLED = "_opteq_disabled"
"""Where a function keeps what the compiler makes of it. (Not in a cache of functools, which the compiler warns of.)"""
_REASON = (
    "the number of solver steps depends on the data: compile without fullgraph, or export a model with a fixed number "
    "of steps (opteq export --format exported), which compiles as one graph"
)


def dynamo_disable(function: Function) -> Function:
    """``torch.compiler.disable(function)``, from the first call on for which torch's compiler is loaded.

    ``torch.compiler.disable`` itself loads all of torch's compiler, several times what torch takes to load.
    """

    @functools.wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        # A compiled model has loaded the compiler before it is called.
        if "torch._dynamo" not in sys.modules:
            return function(*given, **named)
        _disable(function)
        return getattr(function, _DISABLED)(*given, **named)

    return called  # type: ignore[return-value]


@constant  # the compiler calls it and does not trace it: its very first call meets the reason
def _disable(function: Callable[..., Any]) -> bool:
    if _DISABLED not in vars(function):
        # torch 2.6 takes no reason.
        known = "reason" in inspect.signature(torch.compiler.disable).parameters
        said = {"reason": _REASON} if known else {}
        setattr(function, _DISABLED, torch.compiler.disable(function, **said))  # type: ignore[no-untyped-call]
    return True


class Equilibrium(HoldsOptions, metaclass=NamedOptions):
    """A layer whose output is the equilibrium of a hidden problem.

    Args:
        problem: the problem to solve.
        solver: the fixed-point solver; ``Anderson()`` by default, ``FISTA`` for objectives.
        gradient: how the equilibrium is differentiated; ``Implicit()``, the exact gradient, by default.
        on_failure: what happens when samples do not converge, forward or backward: ``"warn"`` (and warn again when it
            gets clearly worse), ``"raise"``, or ``"ignore"``. The best state so far is returned unless an error is
            raised. It is NaN for a sample whose first step is not finite, because its input is not; other samples of
            the batch are not affected. On a GPU a warning may come after the call: with its backward pass, or with the
            next call. ``"raise"`` waits for the device in every call.
        compile: compile the functions of a user-written problem by torch.compile, in captured solves on a GPU.
            The first calls then take some seconds longer.

    ``layer(x)`` returns the features; ``layer.solve(x)`` returns a :class:`Solution` with features, state and report.
    Both are differentiable, in training and in evaluation mode. ``layer.last`` keeps the reports of the latest call.
    Functions given to ``layer.register_observer`` are called with the bound problem and the state of every solve.

    >>> import torch, opteq
    >>> W = opteq.operators.Dense(4, 8, bound=0.9)
    >>> layer = opteq.Equilibrium(opteq.OptEq(W, U=torch.nn.Linear(3, 8)))
    >>> solution = layer.solve(torch.randn(2, 3))
    >>> solution.features.shape, bool(solution.converged.all())
    (torch.Size([2, 4]), True)
    """

    def __init__(
        self,
        problem: Problem,
        solver: Solver | None = None,
        gradient: Gradient | None = None,
        on_failure: str = "warn",
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.problem: Problem = problem  # checked first: the defaults come from it
        solver = problem.default_solver() or Anderson() if solver is None else solver
        steps = problem.default_gradient_steps()
        gradient = (Implicit() if steps is None else Implicit(max_steps=steps)) if gradient is None else gradient
        self.solver: Solver = solver
        self.gradient: Gradient = gradient
        self.on_failure = on_failure
        if compile is True and not isinstance(problem, WrittenProblem):
            raise ValueError(
                f"compile=True compiles functions that you have written; {type(problem).__name__} has none"
            )
        self.compile_functions = compile
        self.last: tuple[Report, BackwardSlot] | None = None
        self._observers: OrderedDict[int, Observer] = OrderedDict()
        self._monitor = ConvergenceMonitor()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "on_failure":
            check_choice(name, value, ("warn", "raise", "ignore"))
        kind, wanted = _PARTS.get(name, (object, ""))
        super().__setattr__(name, check_kind(name, value, kind, wanted))

    def forward(self, x: State, start: State | None = None) -> State:
        """The features at equilibrium for ``x``."""
        if type(self).solve is not Equilibrium.solve or "solve" in vars(self):  # it is overridden
            return self.solve(x, start).features
        if _on_meta(x):  # shapes without values: one step has those of the equilibrium
            hidden = self.problem(x)
            features: State = hidden.features(hidden.step(hidden.start()))
            return features
        solution: Solution = self._solve(x, start, check_minimum=False)
        return solution.features

    def solve(self, x: State, start: State | None = None, trace_objective: bool = False) -> Solution:
        """The equilibrium for ``x``, with residuals, steps and a status per sample.

        If the problem has an objective that is not known to be convex, Lanczos steps check the curvature at the
        solution: a maximum or a saddle gets the status ``NOT_A_MINIMUM``.

        Args:
            x: input, batch first; problems with branches also take a tuple with one input per branch.
            start: the initial state, an earlier ``solution.state`` for instance; it does not change gradients.
            trace_objective: record the terms of the objective step by step, by a second solve in the state's variable:
                ``solution.objective_trace`` and ``solution.term_traces``.
        """
        solution: Solution = self._solve(x, start, check_minimum=True)
        return replace(solution, term_traces=self._traced(x, start)) if trace_objective else solution

    @dynamo_disable
    def _traced(self, x: State, start: State | None) -> dict[str, Tensor]:
        with torch.no_grad():
            return trace_terms(self.problem(x), self.solver, start)

    # A loop whose length depends on the data is run as it is inside a compiled model, not traced.
    @dynamo_disable
    def _solve(self, x: State, start: State | None, check_minimum: bool) -> Solution:
        self._check_call(x)
        if self._monitor.pending:
            self._monitor.catch_up(self.on_failure)
        hidden = self.problem(x)
        hidden.compile_functions = self.compile_functions
        begin = hidden.start()
        start = _checked_start(start, begin, x)
        slot = BackwardSlot()
        if torch.is_grad_enabled():
            record = functools.partial(self._record, hidden, slot)
            state, outcome = self.gradient.run(hidden, self.solver, start, record)
        else:
            state, outcome = self.gradient.evaluate(hidden, self.solver, start)
        codes = outcome.codes
        if hidden.jumps:
            with torch.no_grad():
                codes = hidden.diagnose(state, codes)
        if check_minimum and hidden.seeks_minimum:
            codes = mark_non_minima(hidden, state, codes, self.solver.floor)
        report = Report(
            type(self.solver).__name__, outcome.residual, outcome.steps, codes, outcome.tol, outcome.history
        )
        self.__dict__["last"] = (report, slot)  # past torch, which would look whether it is a parameter or a module
        if self.on_failure != "ignore" and (report.pending or any_row(report.failures())):
            failure = FailureCheck(report, "no equilibrium within the tolerance", "forward", x)
            self._monitor.check(failure, self.on_failure)
        for observer in self._observers.values():
            observer(hidden, state)
        features = _attached_features(hidden, state, outcome)
        # Without a finite step there is no state to speak of: that of the start would pass for an answer.
        lost = (codes == int(Status.NON_FINITE)) & (outcome.steps == 0)
        features, state = nan_rows(features, lost), nan_rows(state, lost)
        # An identity with nothing to add hands on the very input; a solve without steps, its start.
        given = *blocks(x), *blocks(begin if start is None else start)
        return Solution(copy_if_shared(features, given), copy_if_shared(state, given), report, slot)

    def _check_call(self, x: State) -> None:
        """Raise where no solve can run: on the meta device, under torch.export, in most forward-mode derivatives."""
        if _on_meta(x):
            raise RuntimeError("there is nothing to solve on the meta device; layer(x) gives the features' shape there")
        if torch.compiler.is_compiling():  # torch.export calls what the compiler is told to leave alone
            raise RuntimeError(f"torch.export can't take an equilibrium as it is: {_REASON}")
        # A solve takes no tangent along: forward mode would see a constant where there is none.
        if self.gradient.forward_mode or forward_ad._current_level < 0:  # below 0, no forward mode is active
            return
        duals = (forward_ad.unpack_dual(t) for t in (*blocks(x), *self.parameters()) if isinstance(t, Tensor))  # type: ignore[no-untyped-call]
        if any(dual.tangent is not None for dual in duals):
            raise RuntimeError(
                f"forward-mode differentiation (torch.func.jvp, jacfwd) does not pass through {self.gradient}; "
                "use reverse mode (vjp, jacrev), or gradient=opteq.Unrolled(steps)"
            )

    def _record(self, hidden: BoundMap, slot: BackwardSlot, report: Report) -> None:
        """Keep the report of a backward pass, and warn of samples that failed there."""
        if hidden.seeks_minimum:  # conjugate gradients met negative curvature: no minimum of an objective
            indefinite = report.codes == int(Status.INDEFINITE)
            report = replace(report, codes=torch.where(indefinite, int(Status.NOT_A_MINIMUM), report.codes))
        slot.report = report
        self._monitor.catch_up(self.on_failure, wait_for="forward")
        failure = FailureCheck(report, "the gradient's linear system was not solved", "backward")
        self._monitor.check(failure, self.on_failure)

    def register_observer(self, observer: Observer) -> RemovableHandle:
        """Call ``observer(hidden, state)`` after every solve, beside others, until the handle's ``remove()``."""
        handle = RemovableHandle(self._observers)
        self._observers[handle.id] = observer
        return handle

    def extra_repr(self) -> str:
        return f"solver={self.solver}, gradient={self.gradient}, on_failure={self.on_failure!r}"

    def __getstate__(self) -> dict[str, Any]:
        # Reports belong to the process that made them: a copy begins without any, and warns for itself.
        fresh = {"last": None, "_observers": OrderedDict[int, Observer]()}
        return {**self.__dict__, **fresh, "_monitor": ConvergenceMonitor()}


def _checked_start(start: State | None, begin: State, x: State) -> State | None:
    """``start`` as a constant in the form of the problem's own start ``begin``; both have the batch size of ``x``."""
    layout = Layout.of(begin)
    for part in blocks(x):
        if layout.batch != part.shape[0]:
            raise ValueError(
                f"the state has batch size {layout.batch}, but the input of shape {tuple(part.shape)} has "
                f"{part.shape[0]}; the first dimension of both is the batch"
            )
    if start is None:
        return None
    layout.check(start, "start")
    # An earlier state may come from a run in another precision.
    return layout.typed(map_state(Tensor.detach, start))


def _attached_features(hidden: BoundMap, state: State, outcome: Outcome) -> State:
    """The features of ``state``, with its gradient."""
    features = outcome.features
    # A solve without autograd may have computed them: as constants, unless the gradient was attached to them.
    if features is None or (torch.is_grad_enabled() and not wants_gradient(features)):
        features = hidden.features(state)
    # Features other than those of the form sum f + 1/2 |y|^2 + g may cut off a NaN on its way back.
    return features if isinstance(hidden, Hidden) else attach(features, features)


def _on_meta(x: State) -> bool:
    return any(isinstance(part, Tensor) and part.is_meta for part in blocks(x))
