"""The layer: problem + solver + gradient."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from opteq._errors import unknown_name
from opteq._held import HoldsOptions
from opteq._options import NamedOptions
from opteq._untraced import untraced
from opteq._watch import Finding, Watch
from opteq.gradients import Gradient, Implicit
from opteq.problems.base import Problem
from opteq.solution import BackwardSlot, Report, Solution
from opteq.solvers import Anderson, Solver, Status
from opteq.solvers.capture import on
from opteq.states import Layout, State, any_row, apart, blocks, map_state, nan_rows

_ON_FAILURE = ("warn", "raise", "ignore")


class Equilibrium(HoldsOptions, metaclass=NamedOptions):
    """A layer whose output is the equilibrium of a hidden problem.

    Args:
        problem: what is minimised.
        solver: how the equilibrium is found; ``Anderson()`` by default.
        gradient: how it is differentiated; ``Implicit()``, the exact gradient, by default.
        on_failure: what happens when samples do not converge, forward or backward: ``"warn"`` once a layer,
            ``"raise"``, or ``"ignore"``. The best state found is returned in any case but ``"raise"``; it is NaN for a
            sample whose very first step is not finite, because its input is not. Its batch mates are solved as if it
            were not there. On a GPU a warning may come after the call: with its backward pass, or with the next call.
            ``"raise"`` waits for the device in every call.

    ``layer(x)`` gives the features; ``layer.solve(x)`` gives them with the state and how the solve went. Both carry
    gradients, in training and in evaluation alike. ``layer.last`` keeps the reports of the latest call.

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
    ) -> None:
        super().__init__()
        self.problem = _checked(problem, Problem, "problem", "a hidden problem such as opteq.OptEq")
        solver = Anderson() if solver is None else solver
        gradient = Implicit() if gradient is None else gradient
        self.solver: Solver = _checked(solver, Solver, "solver", "a solver such as opteq.Anderson()")
        self.gradient: Gradient = _checked(gradient, Gradient, "gradient", "a gradient such as opteq.Implicit()")
        if on_failure not in _ON_FAILURE:
            raise unknown_name("on_failure", on_failure, _ON_FAILURE)
        self.on_failure = on_failure
        self.last: tuple[Report, BackwardSlot] | None = None
        self._watch = Watch()

    def forward(self, x: State, start: State | None = None) -> State:
        """The features at equilibrium for ``x``."""
        if type(self).solve is not Equilibrium.solve or "solve" in vars(self):  # somebody has put in another one
            return self.solve(x, start).features
        solution: Solution = self._solve(x, start, state_too=False)
        return solution.features

    def solve(self, x: State, start: State | None = None) -> Solution:
        """The equilibrium for ``x`` with all that is known about it.

        Args:
            x: input, batch first; for problems with branches, or a tuple with an input a branch.
            start: a state to begin at, an earlier ``solution.state`` for instance; it changes no gradient.
        """
        solution: Solution = self._solve(x, start, state_too=True)
        return solution

    # A loop whose length depends on the data is run as it is inside a compiled model, not traced.
    @untraced
    def _solve(self, x: State, start: State | None, state_too: bool) -> Solution:
        devices = [part.device for part in blocks(x) if isinstance(part, Tensor)]
        with on(devices[0]) if devices else nullcontext():
            return self._solve_here(x, start, state_too)

    def _solve_here(self, x: State, start: State | None, state_too: bool) -> Solution:
        if not self.gradient.forward_mode:
            self._refuse_forward_mode(x)
        self._watch.catch_up(self.on_failure)
        hidden = self.problem(x)
        layout = Layout.of(hidden.template())
        for part in blocks(x):
            if layout.batch != part.shape[0]:
                raise ValueError(
                    f"the state has batch size {layout.batch}, but the input of shape {tuple(part.shape)} has "
                    f"{part.shape[0]}; the first dimension of both is the batch"
                )
        if start is not None:
            layout.check(start, "start")
            # An earlier state may come from a run in another precision.
            start = layout.typed(map_state(Tensor.detach, start))
        slot = BackwardSlot()

        def record(report: Report) -> None:
            slot.report = report
            self._watch.catch_up(self.on_failure, wait_for="forward")
            self._watch.judge(
                Finding(report, "the gradient's linear system was not solved", "backward"), self.on_failure
            )

        if torch.is_grad_enabled():
            run = self.gradient.run if state_too else self.gradient.run_for_features
            state, outcome = run(hidden, self.solver, start, record)
        else:
            state, outcome = self.gradient.evaluate(hidden, self.solver, start)
        codes = outcome.codes
        # Looking at the codes makes a GPU wait, so it is done only for problems that have more to say about them.
        if hidden.jumps or (hidden.diagnoses and any_row(codes != int(Status.CONVERGED))):
            with torch.no_grad():
                codes = hidden.diagnose(state, codes)
        report = Report(
            type(self.solver).__name__, outcome.residual, outcome.steps, codes, outcome.tol, outcome.history
        )
        self.__dict__["last"] = (report, slot)  # past torch, which would look whether it is a parameter or a module
        self._watch.judge(Finding(report, "no equilibrium within the tolerance", "forward", x), self.on_failure)
        features = hidden.features(state) if outcome.features is None else outcome.features
        # Without a finite step there is no state to speak of: that of the start would pass for an answer.
        lost = (codes == int(Status.NON_FINITE)) & (outcome.steps == 0)
        features, state = nan_rows(features, lost), nan_rows(state, lost)
        # With an identity as activation and nothing to add, a step may hand on the very input.
        return Solution(apart(features, x), apart(state, x), report, slot)

    def extra_repr(self) -> str:
        """Solver and gradient."""
        return f"solver={self.solver}, gradient={self.gradient}, on_failure={self.on_failure!r}"

    def __getstate__(self) -> dict[str, Any]:
        # Reports belong to the process that made them: a copy begins without any, and warns for itself.
        return {**self.__dict__, "last": None, "_watch": Watch()}

    def _refuse_forward_mode(self, x: State) -> None:
        # The solve takes no tangent along, so forward mode would see a constant where there is none.
        if forward_ad._current_level < 0:  # nobody is in forward mode, and there is nothing to be unpacked
            return
        duals = (forward_ad.unpack_dual(t) for t in (*blocks(x), *self.parameters()) if isinstance(t, Tensor))  # type: ignore[no-untyped-call]
        if any(dual.tangent is not None for dual in duals):
            raise RuntimeError(
                f"forward-mode differentiation (torch.func.jvp, jacfwd) does not pass through {self.gradient}; "
                "use reverse mode (vjp, jacrev), or gradient=opteq.Unrolled(steps)"
            )


def _checked(value: Any, kind: type, name: str, wanted: str) -> Any:
    if not isinstance(value, kind):
        hint = f"; did you mean {value.__name__}()?" if isinstance(value, type) and issubclass(value, kind) else ""
        raise TypeError(f"{name} should be {wanted}; got {value!r}{hint}")
    return value
