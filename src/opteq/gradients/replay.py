"""A few steps on a tape that is made when the gradient arrives, by one captured graph where that is possible.

The equilibrium is known before anything is put on a tape: the steps that carry its gradient are taken only to be
differentiated. A problem that can be frozen is therefore remembered as its structure and its tensors; the backward
pass takes the steps, differentiates them and hands each tensor its gradient. On a GPU all of it is one launch, and
between the passes nothing is kept but the tensors that the problem held anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opteq._autocast import Autocast
from opteq.gradients.attach import attach, refuse_second_derivative
from opteq.gradients.base import wants_gradient
from opteq.problems.freezing import Frozen, freeze
from opteq.problems.hidden import BoundMap
from opteq.solvers.buffers import own
from opteq.solvers.graphs import called, usable
from opteq.states import State, blocks, like, map_state

Gradients = list[Tensor | None]


@dataclass(frozen=True)
class Steps:
    """Steps ``y <- (1 - damping) y + damping T(y)``, to be put on a tape."""

    count: int = 1
    damping: float = 1.0

    def taken(self, hidden: BoundMap, state: State) -> State:
        """Where they lead from ``state``."""
        for _ in range(self.count):
            image = hidden.step(state)
            if self.damping == 1:
                state = image
            else:
                state = map_state(lambda old, new: old + self.damping * (new - old), state, image)
        return state


@dataclass(frozen=True)
class Incoming:
    """The gradients that arrive at a state and at its features; None where none does."""

    state: State | None
    features: State | None = None

    @property
    def at_state(self) -> State:
        """That of the state, where it is the only one that can arrive."""
        assert self.state is not None
        assert self.features is None
        return self.state


@dataclass(frozen=True)
class Replay:
    """Steps from a state, of a frozen problem.

    Attributes:
        steps: which.
        frozen: the problem.
        state: where they begin, a constant.
        autocast: the precision of the way forward.
        features: of the state, where they are handed out beside it; None where they are not.
        close: whether the state was solved for to four digits or more.
    """

    steps: Steps
    frozen: Frozen
    state: State
    autocast: Autocast
    features: State | None = None
    close: bool = False

    @property
    def key(self) -> Hashable:
        """What distinguishes its graph from that of others."""
        return "replay", self.frozen.structure, self.steps, self.autocast, self.frozen.wanted, self.close

    def pull(self, tensors: Sequence[Tensor], state: State, gradient: State) -> Gradients:
        """The gradient of every tensor of the problem for ``gradient`` at the last step; None where there is none."""
        return self._differentiated(self.leaves(tensors), state, gradient, twice=False)

    def leaves(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """``tensors`` as the beginning of a tape, where a gradient is wanted."""
        return [
            tensor.detach().requires_grad_(wanted) for tensor, wanted in zip(tensors, self.frozen.wanted, strict=True)
        ]

    def pull_features(self, tensors: Sequence[Tensor], state: State, incoming: Incoming) -> tuple[State, Gradients]:
        """What a gradient of the features gives to the state, with the one that it has itself, and to every tensor."""
        if incoming.features is None:
            assert incoming.state is not None
            return incoming.state, [None] * len(tensors)
        leaves = self.leaves(tensors)
        parts = [part.detach().requires_grad_() for part in blocks(state)]
        with torch.enable_grad(), self.autocast.entered():
            features = blocks(self.frozen.thaw(leaves).features(like(state, tuple(parts))))
        found = gradients_through(list(zip(features, blocks(incoming.features), strict=True)), [*parts, *leaves])
        count = len(parts)
        through = [torch.zeros_like(p) if g is None else g for g, p in zip(found[:count], parts, strict=True)]
        total = like(state, tuple(through))
        return total if incoming.state is None else map_state(torch.add, incoming.state, total), found[count:]

    def pull_alone(self, gradient: State) -> Gradients:
        """The same at the state itself, by a graph of its own where that is possible."""
        held, states = len(self.frozen.tensors), len(blocks(self.state))
        inputs = [*self.frozen.tensors, *blocks(self.state), *blocks(gradient)]

        def work(given: list[Tensor]) -> tuple[list[Tensor], object]:
            state = like(self.state, tuple(given[held : held + states]))
            return packed(self.pull(given[:held], state, like(gradient, tuple(given[held + states :]))))

        answer = called(self.key, inputs, work)
        found, places = work(inputs) if answer is None else answer
        return unpacked(found, places, held)

    def pull_on_tape(self, tensors: Sequence[Tensor], gradient: State) -> Gradients:
        """The same with a tape of its own, for a second derivative."""
        return self._differentiated(tensors, self.state, gradient, twice=True)

    def _differentiated(self, leaves: Sequence[Tensor], state: State, gradient: State, twice: bool) -> Gradients:
        with torch.enable_grad(), self.autocast.entered():
            reached = blocks(self.steps.taken(self.frozen.thaw(leaves), state))
        return gradients_through(list(zip(reached, blocks(gradient), strict=True)), leaves, create_graph=twice)


def gradients_through(
    pairs: Sequence[tuple[Tensor, Tensor]], leaves: Sequence[Tensor], create_graph: bool = False, again: bool = False
) -> Gradients:
    """What every leaf gets where each end of a tape gets the gradient beside it; None where there is none.

    Args:
        pairs: ends and their gradients, of any floating-point dtype.
        leaves: where the tape begins.
        create_graph: whether the gradients can be differentiated again.
        again: whether the tape is needed once more.
    """
    pairs = [(end, gradient.to(end.dtype)) for end, gradient in pairs if end.requires_grad]
    places = [place for place, leaf in enumerate(leaves) if leaf.requires_grad]
    if not pairs or not places:
        return [None] * len(leaves)
    ends, weights = zip(*pairs, strict=True)
    found = torch.autograd.grad(
        ends,
        [leaves[place] for place in places],
        weights,
        create_graph=create_graph,
        retain_graph=create_graph or again,
        allow_unused=True,
    )
    known = dict(zip(places, found, strict=True))
    return [known.get(place) for place in range(len(leaves))]


def added(some: Gradients, others: Gradients) -> Gradients:
    """The sums of gradients, place by place."""
    return [
        other if one is None else one if other is None else one + other for one, other in zip(some, others, strict=True)
    ]


def replay(hidden: BoundMap, state: State, steps: Steps) -> Replay | None:
    """``steps`` of ``hidden`` for later; None where they should be put on a tape at once.

    That is the case on a CPU, where a launch costs nothing worth saving and the steps would be taken once more; and
    for problems that can't be taken apart.
    """
    if not usable(blocks(state)):
        return None
    frozen = freeze(hidden)
    return None if frozen is None else Replay(steps, frozen, state, Autocast.current(blocks(state)[0].device))


def attach_replay(
    hidden: BoundMap,
    replayed: Replay,
    pull: Callable[[Incoming], Gradients],
    notice: Callable[[], None] | None = None,
    once: bool = False,
    state_too: bool = True,
) -> tuple[State, State | None]:
    """State and features of ``replayed``, differentiated through its steps; themselves where nothing wants a gradient.

    Args:
        hidden: the problem, whose tensors get the gradients.
        replayed: the steps.
        pull: gradients of the problem's tensors for those of state and features.
        notice: called when the backward pass comes by.
        once: whether ``pull`` can't be differentiated again.
        state_too: whether the state is differentiated where there are features; else it is a constant, and not copied.
    """
    state, features = replayed.state, replayed.features
    if not any(replayed.frozen.wanted):
        return map_state(own, state), None if features is None else map_state(own, features)
    states = blocks(state) if state_too or features is None else ()
    values = [*states, *(() if features is None else blocks(features))]
    attached: tuple[Tensor, ...] = _Replayed.apply(  # type: ignore[no-untyped-call]
        replayed, pull, notice, once, len(states), len(values), *values, *hidden.originals
    )
    count = len(states)
    return (
        like(state, attached[:count]) if states else state,
        None if features is None else like(features, attached[count:]),
    )


def differentiated_steps(hidden: BoundMap, state: State, steps: Steps, notice: Callable[[], None]) -> State:
    """``state``, differentiated through ``steps`` taken from it; ``state`` itself where nothing wants a gradient."""
    replayed = replay(hidden, state, steps)
    if replayed is not None:
        attached, _ = attach_replay(hidden, replayed, lambda incoming: replayed.pull_alone(incoming.at_state), notice)
        return attached
    reached = steps.taken(hidden, state)
    return attach(state, reached, notice=notice) if wants_gradient(reached) else state


def packed(gradients: Gradients) -> tuple[list[Tensor], tuple[int, ...]]:
    """The gradients that there are, and their places."""
    places = tuple(place for place, gradient in enumerate(gradients) if gradient is not None)
    return [gradient for gradient in gradients if gradient is not None], places


def unpacked(found: Sequence[Tensor], places: object, count: int) -> Gradients:
    """The inverse of :func:`packed`, for ``count`` places."""
    assert isinstance(places, tuple)
    known = dict(zip(places, found, strict=True))
    return [known.get(place) for place in range(count)]


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, replayed: Replay, pull: Any, notice: Any, once: bool, states: int, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.replayed, ctx.pull, ctx.notice, ctx.once, ctx.states, ctx.count = (
            replayed, pull, notice, once, states, count
        )  # fmt: skip
        ctx.set_materialize_grads(False)  # most users look at the features alone
        # Saved though the replay has them too: so autograd notices a weight that was changed in between.
        ctx.save_for_backward(*tensors[count:])
        return tuple(value.clone() for value in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        originals = ctx.saved_tensors
        if all(gradient is None for gradient in gradients):  # whoever took the outputs has no use for them
            return (*[None] * (6 + ctx.count), *[None] * len(originals))
        if ctx.notice is not None:
            ctx.notice()
        replayed = ctx.replayed
        states = ctx.states
        incoming = Incoming(
            _filled(gradients[:states], replayed.state) if states else None,
            _filled(gradients[states:], replayed.features),
        )
        if torch.is_grad_enabled() and not ctx.once:
            found = replayed.pull_on_tape(originals, incoming.at_state)
        else:
            with torch.no_grad():
                found = ctx.pull(incoming)
            if torch.is_grad_enabled():
                found = _guarded(found, originals)
        if not _kept():
            # Nobody can come by again, but whoever keeps an output keeps this too, and all tensors of the problem.
            ctx.replayed = ctx.pull = ctx.notice = None
        return (*[None] * (6 + ctx.count), *found)


def _kept() -> bool:
    """Whether the backward pass that is under way keeps its graph, so that another one can follow."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or bool(ask())


def _filled(gradients: Sequence[Tensor | None], values: State | None) -> State | None:
    """The gradient of ``values``, zero for parts that have none; None where no part has one."""
    if values is None or all(gradient is None for gradient in gradients):
        return None
    parts = zip(gradients, blocks(values), strict=True)
    return like(values, tuple(torch.zeros_like(value) if given is None else given for given, value in parts))


def _guarded(found: Gradients, originals: Sequence[Tensor]) -> Gradients:
    known, places = packed(found)
    return unpacked(refuse_second_derivative(known, originals), places, len(found))
