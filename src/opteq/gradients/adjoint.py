"""The way back: the linear system of the implicit gradient, by captured graphs where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq._autocast import Autocast
from opteq.gradients.replay import Gradients, Replay, Steps, gradients_through, packed, unpacked
from opteq.problems.freezing import Frozen, freeze
from opteq.problems.hidden import BoundMap
from opteq.problems.linearisation import Linearisation, Product, SymmetricLinearisation
from opteq.solution import Report
from opteq.solvers.graphs import staged, usable
from opteq.solvers.linear import CG, MINRES, LinearSolver
from opteq.solvers.linear.base import LinearSession
from opteq.solvers.loop import Run, drive
from opteq.states import Layout, State, blocks, like, map_state

Pull = Callable[[State], Gradients]


@dataclass
class _AdjointSolve:
    """An adjoint solve under way: its linear solve, and what becomes of that one's answer.

    With ``pull`` it goes on to the gradients of the problem's tensors; ``facts`` are then the places of those that
    have one.
    """

    session: LinearSession
    layout: Layout
    answer: Callable[[State], State]
    pull: Pull | None = None
    facts: object = None

    @property
    def run(self) -> Run:
        """What advances."""
        return self.session.run

    def tensors(self) -> list[Tensor]:
        """The adjoint vector, or the gradients that it gives, and how its system was solved, the history last."""
        finish, layout = self.session.finish(), self.layout
        vector = self.answer(layout.restore(finish.point))
        numbers = [layout.per_sample(number) for number in (finish.residual, finish.steps, finish.codes)]
        if self.pull is None:
            return [*blocks(vector), *numbers, finish.trace]
        gradients, self.facts = packed(self.pull(vector))
        return [*gradients, *numbers, finish.trace]


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
        parts, _, report = self._run(gradient, None)
        return like(gradient, tuple(parts)), report

    def pull(self, gradient: State, replayed: Replay) -> tuple[Gradients, Report]:
        """What the adjoint vector gives to every tensor of the problem through ``replayed``, with the solve's report.

        One graph does both where the solver can be captured.
        """
        if self.frozen is None:
            vector, report = self.solve(gradient)
            return replayed.pull_alone(vector), report
        found, places, report = self._run(gradient, replayed)
        return unpacked(found, places, len(self.frozen.tensors)), report

    def _run(self, gradient: State, replayed: Replay | None) -> tuple[list[Tensor], object, Report]:
        with self.autocast.off(), torch.no_grad():
            answer = self._by_graphs(gradient, replayed)
            if answer is None:
                if self.frozen is None:
                    assert self.local is not None
                    solve = self._open(self.local, gradient, None)
                else:
                    solve = self._opened(self.frozen, self.frozen.tensors, self.state, gradient, replayed)
                drive(solve.run)
                tensors = solve.tensors()  # which learns the facts
                answer = tensors, solve.facts
        (*parts, residual, steps, codes, trace), places = answer
        report = Report(
            method=f"adjoint by {type(self.linear).__name__}",
            residual=residual,
            steps=steps,
            codes=codes,
            tol=max(self.linear.tol, self.eps),
            trace=trace,
        )
        return parts, places, report

    def _linearise(self, hidden: BoundMap, state: State) -> Linearisation | SymmetricLinearisation:
        with torch.no_grad(), self.autocast.entered():
            local = hidden.linearise(state)
        if isinstance(local, Linearisation) and isinstance(self.linear, CG | MINRES):
            raise ValueError(
                f"{type(self.linear).__name__} needs a symmetric system, and this problem's Jacobian has no symmetry; "
                "use Implicit(linear=GMRES()) or leave the choice to Implicit()"
            )
        return local

    def _by_graphs(self, gradient: State, replayed: Replay | None) -> tuple[list[Tensor], object] | None:
        if self.frozen is None:
            return None
        frozen = self.frozen
        held, states = len(frozen.tensors), len(blocks(self.state))
        inputs = [*frozen.tensors, *blocks(self.state), *blocks(gradient)]

        def open_solve(tensors: list[Tensor]) -> _AdjointSolve:
            state = like(self.state, tuple(tensors[held : held + states]))
            incoming = like(gradient, tuple(tensors[held + states :]))
            return self._opened(frozen, tensors[:held], state, incoming, replayed)

        key = ("adjoint", frozen.structure, self.linear, self.autocast, None if replayed is None else replayed.key)
        return staged(key, inputs, open_solve)

    def _opened(
        self, frozen: Frozen, tensors: list[Tensor], state: State, gradient: State, replayed: Replay | None
    ) -> _AdjointSolve:
        """The solve with these tensors in the problem's place."""
        if replayed is None:
            return self._open(self._linearise(frozen.thaw(tensors), state), gradient, None)
        leaves = replayed.leaves(tensors)
        taped = None
        if replayed.steps == Steps():
            with torch.enable_grad(), self.autocast.entered():
                taped = frozen.thaw(leaves).linearise_on_tape(state)
        if taped is None:
            local = self._linearise(frozen.thaw(tensors), state)
            return self._open(local, gradient, lambda vector: replayed.pull(tensors, state, vector))
        image = taped.image

        def pull(vector: State) -> Gradients:
            with torch.enable_grad(), self.autocast.entered():
                ends = blocks(image())
            # The tape is needed again: every stage of a captured solve ends with this.
            return gradients_through(list(zip(ends, blocks(vector), strict=True)), leaves, again=True)

        return self._open(taped.local, gradient, pull)

    def _open(self, local: Linearisation | SymmetricLinearisation, gradient: State, pull: Pull | None) -> _AdjointSolve:
        if isinstance(local, Linearisation):
            return self._session(local.adjoint, gradient, lambda v: v, pull)
        reduction = local.reduction
        if reduction is not None:

            def expand(u: State) -> State:
                return map_state(torch.add, gradient, self._in(reduction.expand, u))

            return self._session(reduction.product, self._in(reduction.restrict, gradient), expand, pull)

        def recover(w: State) -> State:
            return map_state(torch.add, gradient, self._in(lambda w: local.curvature(local.factor(w)), w))

        return self._session(local.scaled, self._in(local.factor_adjoint, gradient), recover, pull)

    def _session(
        self, product: Product, target: State, answer: Callable[[State], State], pull: Pull | None
    ) -> _AdjointSolve:
        layout = Layout.of(target, self.layout.coupled)
        session = self.linear.open_states(lambda v: self._in(product, v), target, layout, self.eps)
        return _AdjointSolve(session, layout, answer, pull)

    def _in(self, product: Product, v: State) -> State:
        with self.autocast.entered():
            return product(v)
