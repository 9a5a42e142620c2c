"""The way forward: find the equilibrium, as constants, by captured graphs where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from opteq._autocast import Autocast
from opteq._fast import settings
from opteq._room import room
from opteq.problems.expansion import Expansion
from opteq.problems.freezing import freeze
from opteq.problems.hidden import BoundMap, FeatureForm
from opteq.solvers import Outcome, Solver
from opteq.solvers.base import Session
from opteq.solvers.graphs import staged
from opteq.solvers.loop import Finish, Run, drive
from opteq.solvers.parts import Gathered, joined
from opteq.states import State, blocks, like, map_state, single


@dataclass(frozen=True)
class _Place:
    """Where a state is in a list of tensors."""

    slice: slice
    is_tuple: bool

    @classmethod
    def of(cls, state: State, begin: int) -> _Place:
        """That of a state whose first part is at ``begin``."""
        return cls(slice(begin, begin + len(blocks(state))), isinstance(state, tuple))

    def read(self, tensors: Sequence[Tensor]) -> State:
        """The state."""
        parts = tuple(tensors[self.slice])
        return parts if self.is_tuple else parts[0]


@dataclass(frozen=True)
class _Facts:
    """What the tensors of an answer do not tell: which of them are the state, and which its features, if any."""

    state: _Place
    features: _Place | None
    tol: float


@dataclass
class _Search:
    """A solve under way, in the state's variable or in that of the features."""

    session: Session
    template: State | None  # None stands for one tensor of zeros
    form: FeatureForm | None
    read_out: Callable[[State], State | None] | None = None  # the features of a state, where they are wanted too
    facts: object = None
    lasting: tuple[Tensor, ...] = ()  # features that the run itself keeps

    @property
    def run(self) -> Run:
        """What advances."""
        return self.session.run

    def outcome(self, finish: Finish | None = None) -> Outcome:
        """Where it stands, or stood at a ``finish``, in the state's variable."""
        outcome = self.session.outcome(finish)
        if self.form is None:
            return outcome
        with self.session.caller.entered():
            state = self.form.state(outcome.state)
        # Features may be finite where the state that belongs to them is not, an input of NaN for instance.
        if self.template is None:
            state = _finite(single(state))
        else:
            state = map_state(
                lambda new, old: torch.where(torch.isfinite(new), new, old.to(new.dtype)), state, self.template
            )
        return replace(outcome, state=state)

    def tensors(self, finish: Finish) -> list[Tensor]:
        """The outcome as a list, the history last."""
        outcome = self.outcome(finish)
        features = None
        if self.read_out is not None and finish.image is not None:
            assert self.form is not None
            features, self.lasting = like(self.form.start, finish.image), finish.image
        elif self.read_out is not None:
            with self.session.caller.entered():
                features = self.read_out(outcome.state)
        parts = [*blocks(outcome.state), *(() if features is None else blocks(features))]
        place = _Place.of(outcome.state, 0)
        self.facts = _Facts(
            place, None if features is None else _Place.of(features, place.slice.stop), self.session.tol
        )
        return [*parts, outcome.residual, outcome.steps, outcome.codes, outcome.trace]


def _finite(state: Tensor) -> Tensor:
    """The state with zeros for what is not finite."""
    if state.requires_grad:  # so that a gradient that is not finite does not pass there either
        return torch.where(torch.isfinite(state), state, 0.0)
    return torch.nan_to_num(state, nan=0.0, posinf=0.0, neginf=0.0)


def _open(
    hidden: BoundMap,
    solver: Solver,
    start: State | None,
    form: FeatureForm | None,
    inverse: bool,
    features: bool = False,
) -> _Search:
    """A search; ``features`` tells that those of its state will be asked for."""
    template = hidden.start() if form is None or not form.zero_state else None
    if form is None:
        assert template is not None
        session = solver.open(
            hidden.step,
            template if start is None else start,
            measured=None if hidden.contracts else hidden.measured,
            project=hidden.project,
            interval=hidden.interval,
            damping=hidden.damping,
            coupled=hidden.coupled,
            keep_inverse=inverse,
        )
    else:
        session = solver.open(
            form.step,
            form.start if start is None else hidden.features(start),
            measured=None if hidden.contracts else form.measured,
            damping=hidden.damping,
            coupled=hidden.coupled,
            keep_inverse=inverse,
            at_start=form.first if start is None else None,
            keep_image=features and form.reads_out,
        )
    return _Search(session, template, form)


def find(hidden: BoundMap, solver: Solver, start: State | None) -> Outcome:
    """The equilibrium of ``hidden`` with all that the solver learned, on the tape if there is one."""
    form = hidden.feature_form() if solver.works_on_features else None
    search = _open(hidden, solver, start, form, inverse=True)
    with search.session.caller.off():
        drive(search.run)
    return search.outcome()


def features_beside(hidden: BoundMap, state: State) -> State | None:
    """The features of a state; None where they are the state itself, or not the solve's business."""
    if hidden.reads_out_aside:
        return None
    features = hidden.features(state)
    same = [id(part) for part in blocks(features)] == [id(part) for part in blocks(state)]
    return None if same else features


def find_without_tape(
    hidden: BoundMap,
    solver: Solver,
    start: State | None,
    keep_inverse: bool = False,
    as_on_tape: bool = False,
    with_features: bool = False,
    lend: bool = False,
) -> tuple[State, Outcome]:
    """The equilibrium as a constant: nothing of the way to it is kept for the backward pass.

    Args:
        hidden: the problem with its input bound.
        solver: finds the equilibrium.
        start: where to begin; None leaves it to the problem.
        keep_inverse: whether the solver's estimate of the inverse Jacobian is needed. Without it, the fast paths
            are open.
        as_on_tape: whether the steps are those of :func:`find`, for a network that consists of them. In the variable of
            the features as many steps lead further.
        with_features: whether features, as constants too, are of use where they cost no launch.
        lend: whether state and features may be lent ones, which nobody outside of this library is to see.
    """
    with torch.no_grad():
        if keep_inverse:
            outcome = find(hidden, solver, start)
        else:
            captured = _by_graphs(hidden, solver, start, as_on_tape, with_features, lend)
            outcome = captured or _as_it_is(hidden, solver, start, as_on_tape, with_features)
    # The very tensors where they are constants already: a captured backward pass knows them again.
    return map_state(lambda part: part.detach() if part.requires_grad else part, outcome.state), outcome


def _form(hidden: BoundMap, solver: Solver, as_on_tape: bool) -> FeatureForm | None:
    if solver.works_on_features:
        return hidden.feature_form()
    return None if as_on_tape else hidden.compact_form()


def _as_it_is(hidden: BoundMap, solver: Solver, start: State | None, as_on_tape: bool, with_features: bool) -> Outcome:
    expansion = hidden.expansion() if solver.refines and not as_on_tape else None
    if expansion is not None:
        return _refined(hidden, expansion, solver, start)
    # As a captured solve would, which may follow: what it launches should be loaded by then.
    features = with_features and settings.graphs and not hidden.reads_out_aside
    search = _open(hidden, solver, start, _form(hidden, solver, as_on_tape), inverse=False, features=features)
    with search.session.caller.off():
        drive(search.run)
        return search.outcome()


def _refined(hidden: BoundMap, expansion: Expansion, solver: Solver, start: State | None) -> Outcome:
    """The equilibrium by way of its features, with all that is known of the map there."""
    features = None if start is None else single(hidden.features(start))
    damping = hidden.damping
    gathered, outcomes = Gathered(len(expansion.c)), []
    with room() as mine:
        whole = expansion.solved_to(solver.tol, mine)
        for rows in whole.parts():
            part = whole.part(rows)
            known = part.begin() if features is None else part.exact(part.taken(features[rows]))
            session = solver.open_refined(part, known, damping[rows] if isinstance(damping, Tensor) else damping)
            drive(session.run)
            outcome = session.outcome()
            assert outcome.known is not None
            gathered.put(rows, [part.given(each) for each in part.onward(outcome.known)])
            outcomes.append(replace(outcome, known=None))
    outcome, known = joined(outcomes), gathered.tensors
    state = expansion.activation(known)
    if bool(torch.isfinite(known[1].sum() + known[-1].sum())):
        return replace(outcome, state=state, known=known)
    # Features may be finite where the state that belongs to them is not, an input of NaN for instance.
    return replace(outcome, state=torch.where(torch.isfinite(state), state, 0.0), known=None)


def _by_graphs(
    hidden: BoundMap, solver: Solver, start: State | None, as_on_tape: bool, with_features: bool, lend: bool
) -> Outcome | None:
    frozen = freeze(hidden) if settings.graphs else None
    if frozen is None or not frozen.tensors or not frozen.tensors[0].is_cuda:
        return None
    try:
        hash(solver)
    except TypeError:  # a regulariser inside SAM, for instance
        return None
    count = len(frozen.tensors)
    with_features = with_features and not hidden.reads_out_aside  # which the copy does not know of
    inputs = [*frozen.tensors, *([] if start is None else blocks(start))]
    autocast = Autocast.current(inputs[0].device)

    def open_solve(tensors: list[Tensor]) -> _Search:
        copy = frozen.thaw(tensors[:count])
        begin = None if start is None else like(start, tuple(tensors[count:]))
        # In the caller's precision: a capture may happen inside a region without autocast.
        with autocast.entered():
            form = _form(copy, solver, as_on_tape)
            search = _open(copy, solver, begin, form, inverse=False, features=with_features)
        if with_features:
            search.read_out = partial(features_beside, copy)
        return search

    key = ("forward", frozen.structure, solver, start is None, as_on_tape, with_features, autocast)
    with autocast.off():
        answer = staged(key, inputs, open_solve, lend)
    if answer is None:
        return None
    tensors, facts = answer
    assert isinstance(facts, _Facts)
    residual, steps, codes, history = tensors[-4:]
    features = None if facts.features is None else facts.features.read(tensors)
    return Outcome(facts.state.read(tensors), residual, steps, codes, history, facts.tol, features=features)
