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
class Replay:
    """Steps from a state, of a frozen problem.

    Attributes:
        steps: which.
        frozen: the problem.
        state: where they begin, a constant.
        autocast: the precision of the way forward.
    """

    steps: Steps
    frozen: Frozen
    state: State
    autocast: Autocast

    @property
    def key(self) -> Hashable:
        """What distinguishes its graph from that of others."""
        return "replay", self.frozen.structure, self.steps, self.autocast, self.frozen.wanted

    def pull(self, tensors: Sequence[Tensor], state: State, gradient: State) -> Gradients:
        """The gradient of every tensor of the problem for ``gradient`` at the last step; None where there is none."""
        return self._differentiated(self.leaves(tensors), state, gradient, twice=False)

    def leaves(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """``tensors`` as the beginning of a tape, where a gradient is wanted."""
        return [
            tensor.detach().requires_grad_(wanted) for tensor, wanted in zip(tensors, self.frozen.wanted, strict=True)
        ]

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
    pull: Callable[[State], Gradients],
    notice: Callable[[], None] | None = None,
    once: bool = False,
) -> State:
    """The state of ``replayed``, differentiated through its steps; itself where nothing wants a gradient.

    Args:
        hidden: the problem, whose tensors get the gradients.
        replayed: the steps.
        pull: gradients of the problem's tensors for one of the state.
        notice: called when the backward pass comes by.
        once: whether ``pull`` can't be differentiated again.
    """
    if not any(replayed.frozen.wanted):
        return replayed.state
    values = blocks(replayed.state)
    attached: tuple[Tensor, ...] = _Replayed.apply(  # type: ignore[no-untyped-call]
        replayed, pull, notice, once, *values, *hidden.originals
    )
    return like(replayed.state, attached)


def differentiated_steps(hidden: BoundMap, state: State, steps: Steps, notice: Callable[[], None]) -> State:
    """``state``, differentiated through ``steps`` taken from it; ``state`` itself where nothing wants a gradient."""
    replayed = replay(hidden, state, steps)
    if replayed is not None:
        return attach_replay(hidden, replayed, replayed.pull_alone, notice)
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
    def forward(ctx: Any, replayed: Replay, pull: Any, notice: Any, once: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.replayed, ctx.pull, ctx.notice, ctx.once = replayed, pull, notice, once
        ctx.count = len(blocks(replayed.state))
        # Saved though the replay has them too: so autograd notices a weight that was changed in between.
        ctx.save_for_backward(*tensors[ctx.count :])
        return tuple(value.clone() for value in tensors[: ctx.count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        originals = ctx.saved_tensors
        if ctx.notice is not None:
            ctx.notice()
        state = ctx.replayed.state
        if torch.is_grad_enabled() and not ctx.once:
            found = ctx.replayed.pull_on_tape(originals, like(state, gradients))
        else:
            with torch.no_grad():
                found = ctx.pull(like(state, gradients))
            if torch.is_grad_enabled():
                found = _guarded(found, originals)
        return (None, None, None, None, *[None] * ctx.count, *found)


def _guarded(found: Gradients, originals: Sequence[Tensor]) -> Gradients:
    known, places = packed(found)
    return unpacked(refuse_second_derivative(known, originals), places, len(found))
