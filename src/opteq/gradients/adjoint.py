"""The way back: the linear system of the implicit gradient, by captured graphs where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opteq._autocast import Autocast
from opteq._copying import best_turned_inside, in_layout_of
from opteq.gradients.replay import Gradients, Incoming, Replay, Steps, added, gradients_through, packed, unpacked
from opteq.problems.freezing import Frozen, freeze
from opteq.problems.hidden import BoundMap
from opteq.problems.linearisation import (
    Linearisation,
    Product,
    Reduction,
    SymmetricLinearisation,
    TapedLinearisation,
)
from opteq.solution import Report
from opteq.solvers.buffers import own
from opteq.solvers.graphs import staged, usable
from opteq.solvers.linear import CG, MINRES, LinearSolver
from opteq.solvers.linear.base import LinearSession
from opteq.solvers.loop import Finish, Run, drive
from opteq.states import Layout, State, blocks, like, map_state, nan_samples

Answer = tuple[list[Tensor], object]
"""Tensors, and what is known about them without looking at a number."""


@dataclass
class _AdjointSolve:
    """An adjoint solve under way: its linear solve, and what becomes of that one's answer.

    ``conclude`` makes the adjoint vector of it, or goes on to the gradients of the problem's tensors; ``facts`` are
    then the places of those that have one.
    """

    session: LinearSession
    layout: Layout
    conclude: Callable[[State], Answer]
    facts: object = None
    lasting: Sequence[Tensor] = ()

    @property
    def run(self) -> Run:
        """What advances."""
        return self.session.run

    def tensors(self, finish: Finish) -> list[Tensor]:
        """What it was all for, and how the system was solved, the history last."""
        finish, layout = self.session.finish(finish), self.layout
        found, self.facts = self.conclude(layout.restore(finish.point))
        numbers = [layout.per_sample(number) for number in (finish.residual, finish.steps, finish.codes)]
        return [*found, *numbers, finish.trace]


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
        """The adjoint vector and how its system was solved; NaN for samples whose gradient is not finite."""
        parts, _, report = self._run(Incoming(nan_samples(gradient, self.layout.coupled)), None)
        return like(gradient, tuple(parts)), report

    def pull(self, incoming: Incoming, replayed: Replay) -> tuple[Gradients, Report]:
        """What gradients of state and features give to every tensor of the problem, with the solve's report.

        One graph does all of it where the solver can be captured.
        """
        if self.frozen is None:
            tensors = replayed.frozen.tensors
            gradient, direct = replayed.pull_features(tensors, replayed.state, incoming)
            vector, report = self.solve(gradient)
            return added(replayed.pull_alone(vector), direct), report
        found, places, report = self._run(incoming, replayed)
        return unpacked(found, places, len(self.frozen.tensors)), report

    def _run(self, incoming: Incoming, replayed: Replay | None) -> tuple[list[Tensor], object, Report]:
        with self.autocast.off(), torch.no_grad():
            answer = None
            if self.frozen is None:
                assert self.local is not None
                assert incoming.state is not None
                solve = self._open(self.local, incoming.state, _handed_out)
            else:
                features = None if replayed is None else replayed.features
                given = _Given(self.frozen.tensors, self.state, features, incoming)
                answer = self._by_graphs(self.frozen, given, replayed)
                if answer is None:
                    solve = self._opened(self.frozen, given.owned().arranged(), replayed)
            if answer is None:
                drive(solve.run)
                tensors = solve.tensors(solve.run.finish())  # which learns the facts
                answer = tensors, solve.facts
        (*parts, residual, steps, codes, history), places = answer
        report = Report(
            method=f"adjoint by {type(self.linear).__name__}",
            residual=residual,
            steps=steps,
            codes=codes,
            tol=max(self.linear.tol, self.eps),
            history=history,
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

    def _by_graphs(self, frozen: Frozen, given: _Given, replayed: Replay | None) -> Answer | None:
        def open_solve(tensors: list[Tensor]) -> _AdjointSolve:
            return self._opened(frozen, given.with_tensors(tensors).arranged(), replayed)

        arrived = given.incoming.state is None, given.incoming.features is None
        key = (
            "adjoint", frozen.structure, self.linear, self.autocast, arrived,
            None if replayed is None else replayed.key,
        )  # fmt: skip
        return staged(key, given.tensors(), open_solve, forms=given.forms())

    def _opened(self, frozen: Frozen, given: _Given, replayed: Replay | None) -> _AdjointSolve:
        """The solve with the given tensors in the problem's place."""
        if replayed is None:
            assert given.incoming.state is not None
            return self._open(self._linearise(frozen.thaw(given.held), given.state), given.incoming.state, _handed_out)
        leaves = replayed.leaves(given.held)
        if given.features is not None and replayed.steps == Steps():
            with torch.enable_grad(), self.autocast.entered():
                taped = frozen.thaw(leaves).linearise_on_tape(given.state, given.features, replayed.close)
            if taped is not None:
                return self._open_on_features(taped, given.incoming, leaves)
        gradient, direct = replayed.pull_features(given.held, given.state, given.incoming)
        local = self._linearise(frozen.thaw(given.held), given.state)

        def conclude(vector: State) -> Answer:
            return packed(added(replayed.pull(given.held, given.state, vector), direct))

        return self._open(local, gradient, conclude)

    def _open_on_features(
        self, taped: TapedLinearisation, incoming: Incoming, leaves: Sequence[Tensor]
    ) -> _AdjointSolve:
        """The system for what the state's part in them adds to the features' own gradient, in their variable."""
        reduction, at_state, at_features = taped.reduction, incoming.state, incoming.features
        if at_state is None:
            assert at_features is not None
            # Once with the gradient as it came: the answer is then an addition to it, solved to a tolerance of its own.
            target = self._in(reduction.product, at_features)
        else:
            gradient = at_state
            if at_features is not None:
                gradient = map_state(torch.add, gradient, self._in(reduction.expand, at_features))
            target = self._in(reduction.restrict, gradient)

        def conclude(total: State) -> Answer:
            step = taped.image
            if at_state is None and taped.inside is not None and reduction.weighed is not None:
                vector, step = self._in(reduction.weighed, total), taped.inside
            else:
                vector = _sum(at_state, self._in(reduction.expand, total))
            with torch.enable_grad(), self.autocast.entered():
                ends = [*blocks(step()), *blocks(taped.features())]
            # The tape is kept: this is captured before the steps are, which would be given the memory that it leaves.
            pairs = list(zip(ends, [*blocks(vector), *blocks(total)], strict=True))
            return packed(gradients_through(pairs, leaves, again=True))

        return self._session(reduction.product, target, conclude, at_features, reduction)

    def _open(
        self,
        local: Linearisation | SymmetricLinearisation,
        gradient: State,
        conclude: Callable[[State], Answer],
    ) -> _AdjointSolve:
        if isinstance(local, Linearisation):
            return self._session(local.adjoint, gradient, conclude)
        reduction = local.reduction
        if reduction is not None:

            def expand(u: State) -> Answer:
                return conclude(map_state(torch.add, gradient, self._in(reduction.expand, u)))

            target = self._in(reduction.restrict, gradient)
            return self._session(reduction.product, target, expand, reduction=reduction)

        def recover(w: State) -> Answer:
            vector = self._in(lambda w: local.curvature(local.factor(w)), w)
            return conclude(map_state(torch.add, gradient, vector))

        return self._session(local.scaled, self._in(local.factor_adjoint, gradient), recover)

    def _session(
        self,
        product: Product,
        target: State,
        conclude: Callable[[State], Answer],
        added: State | None = None,
        reduction: Reduction | None = None,
    ) -> _AdjointSolve:
        layout, scaled = Layout.of(target, self.layout.coupled), None
        if reduction is not None and reduction.scaled is not None and not layout.coupled:
            with self.autocast.entered():
                scaled = reduction.scaled(target)
        session = self.linear.open_states(lambda v: self._in(product, v), target, layout, self.eps, added, scaled)
        return _AdjointSolve(session, layout, conclude)

    def _in(self, product: Product, v: State) -> State:
        with self.autocast.entered():
            return product(v)


def _sum(first: State | None, second: State) -> State:
    return second if first is None else map_state(torch.add, first, second)


def _handed_out(vector: State) -> Answer:
    return list(blocks(vector)), None


@dataclass(frozen=True)
class _Given:
    """All tensors that an adjoint solve depends on: the problem's, state and features, and what arrives at them."""

    held: Sequence[Tensor]
    state: State
    features: State | None
    incoming: Incoming

    def tensors(self) -> list[Tensor]:
        """All of them, in order."""
        return [*self.held, *(part for state in self._states() if state is not None for part in blocks(state))]

    def with_tensors(self, tensors: Sequence[Tensor]) -> _Given:
        """The same form with others in their place, in the same order."""
        rest = iter(tensors[len(self.held) :])
        state, features, at_state, at_features = (
            None if old is None else like(old, tuple(next(rest) for _ in blocks(old))) for old in self._states()
        )
        assert state is not None
        return _Given(tensors[: len(self.held)], state, features, Incoming(at_state, at_features))

    def owned(self) -> _Given:
        """The same with nothing that was lent: a solve that is not captured takes its time, and views."""
        features = None if self.features is None else map_state(own, self.features)
        return replace(self, state=map_state(own, self.state), features=features)

    def forms(self) -> list[Tensor]:
        """Tensors with the strides that graphs should be given these in, in the order of :meth:`tensors`.

        They are those that :meth:`arranged` gives to them, but where it is quicker inside of a graph.
        """
        found = [*self.held, *blocks(self.state), *(() if self.features is None else blocks(self.features))]
        pairs = (self.incoming.state, self.state), (self.incoming.features, self.features)
        for gradient, value in pairs:
            if gradient is not None and value is not None:
                parts = zip(blocks(gradient), blocks(value), strict=True)
                found += [
                    own if own.dtype == part.dtype and not best_turned_inside(part, own) else part
                    for part, own in parts
                ]
        return found

    def arranged(self) -> _Given:
        """The same with gradients in the layout of what they arrive at: a solve would turn them around at every step.

        A mean over channels-last pictures, for one, has a gradient that is not.
        """
        at_state, at_features = (
            None if gradient is None or value is None else map_state(in_layout_of, gradient, value)
            for gradient, value in ((self.incoming.state, self.state), (self.incoming.features, self.features))
        )
        return replace(self, incoming=Incoming(at_state, at_features))

    def _states(self) -> tuple[State | None, ...]:
        return self.state, self.features, self.incoming.state, self.incoming.features
