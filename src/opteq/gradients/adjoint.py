"""The way back: the linear system of the implicit gradient, by captured graphs where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq._autocast import Autocast
from opteq.problems.freezing import freeze
from opteq.problems.hidden import BoundMap
from opteq.problems.linearisation import Linearisation, Product, SymmetricLinearisation
from opteq.solution import Report
from opteq.solvers.graphs import staged, usable
from opteq.solvers.linear import CG, MINRES, LinearSolver
from opteq.solvers.linear.base import LinearSession
from opteq.solvers.loop import Run, drive
from opteq.states import Layout, State, blocks, like, map_state


@dataclass(frozen=True)
class _AdjointSolve:
    """An adjoint solve under way: its linear solve, and what becomes of that one's answer."""

    session: LinearSession
    layout: Layout
    answer: Callable[[State], State]

    @property
    def run(self) -> Run:
        """What advances."""
        return self.session.run

    @property
    def facts(self) -> None:
        """Nothing that the system does not know itself."""
        return

    def tensors(self) -> list[Tensor]:
        """The adjoint vector and how its system was solved, the history last."""
        finish, layout = self.session.finish(), self.layout
        vector = self.answer(layout.restore(finish.point))
        numbers = [layout.per_sample(number) for number in (finish.residual, finish.steps, finish.codes)]
        return [*blocks(vector), *numbers, finish.trace]


class AdjointSystem:
    """``(I - J') v = g`` at a state, products in the precision of the way forward.

    What it needs is noted on the way forward: by the time of the backward pass a user's module may hold other weights
    (``torch.func.functional_call`` puts them in for the forward pass only). A problem that can be frozen is, and its
    derivative is taken when a gradient arrives; any other is linearised at once.
    """

    def __init__(self, hidden: BoundMap, state: State, linear: LinearSolver) -> None:
        self.state = state
        self.linear = linear
        self.layout = Layout.of(state, hidden.coupled)
        self.autocast = Autocast.current(self.layout.device)
        lowest = [*self.layout.dtypes]
        if self.autocast.enabled and self.autocast.dtype:
            lowest.append(self.autocast.dtype)
        self.eps = max(torch.finfo(dtype).eps for dtype in lowest)
        self.frozen = freeze(hidden) if linear.capturable and usable(blocks(state)) else None
        self.local = self._linearise(hidden, state) if self.frozen is None else None

    def solve(self, gradient: State) -> tuple[State, Report]:
        """The adjoint vector and how its system was solved."""
        with self.autocast.off(), torch.no_grad():
            answer = self._by_graphs(gradient)
            if answer is None:
                solve = self._open(self._local(), gradient)
                drive(solve.run)
                answer = solve.tensors()
        *parts, residual, steps, codes, trace = answer
        report = Report(
            method=f"adjoint by {type(self.linear).__name__}",
            residual=residual,
            steps=steps,
            codes=codes,
            tol=max(self.linear.tol, self.eps),
            trace=trace,
        )
        return like(gradient, tuple(parts)), report

    def _local(self) -> Linearisation | SymmetricLinearisation:
        if self.local is None:
            assert self.frozen is not None
            self.local = self._linearise(self.frozen.thaw(self.frozen.tensors), self.state)
        return self.local

    def _linearise(self, hidden: BoundMap, state: State) -> Linearisation | SymmetricLinearisation:
        with torch.no_grad(), self.autocast.entered():
            local = hidden.linearise(state)
        if isinstance(local, Linearisation) and isinstance(self.linear, CG | MINRES):
            raise ValueError(
                f"{type(self.linear).__name__} needs a symmetric system, and this problem's Jacobian has no symmetry; "
                "use Implicit(linear=GMRES()) or leave the choice to Implicit()"
            )
        return local

    def _by_graphs(self, gradient: State) -> list[Tensor] | None:
        if self.frozen is None:
            return None
        frozen = self.frozen
        held, states = len(frozen.tensors), len(blocks(self.state))
        inputs = [*frozen.tensors, *blocks(self.state), *blocks(gradient)]

        def open_solve(tensors: list[Tensor]) -> _AdjointSolve:
            hidden = frozen.thaw(tensors[:held])
            state = like(self.state, tuple(tensors[held : held + states]))
            return self._open(self._linearise(hidden, state), like(gradient, tuple(tensors[held + states :])))

        answer = staged(("adjoint", frozen.structure, self.linear, self.autocast), inputs, open_solve)
        return None if answer is None else answer[0]

    def _open(self, local: Linearisation | SymmetricLinearisation, gradient: State) -> _AdjointSolve:
        if isinstance(local, Linearisation):
            return self._session(local.adjoint, gradient, lambda v: v)
        reduction = local.reduction
        if reduction is not None:

            def expand(u: State) -> State:
                return map_state(torch.add, gradient, self._in(reduction.expand, u))

            return self._session(reduction.product, self._in(reduction.restrict, gradient), expand)

        def recover(w: State) -> State:
            return map_state(torch.add, gradient, self._in(lambda w: local.curvature(local.factor(w)), w))

        return self._session(local.scaled, self._in(local.factor_adjoint, gradient), recover)

    def _session(self, product: Product, target: State, answer: Callable[[State], State]) -> _AdjointSolve:
        layout = Layout.of(target, self.layout.coupled)
        session = self.linear.open_states(lambda v: self._in(product, v), target, layout, self.eps)
        return _AdjointSolve(session, layout, answer)

    def _in(self, product: Product, v: State) -> State:
        with self.autocast.entered():
            return product(v)
