"""A function through its bottleneck: the tensor with fewest entries that all which varies passes through.

``A(B(y))`` has the fixed points ``y = A(h)`` with ``h = B(A(h))``, and a solver that iterates on h combines smaller
vectors. OptEq as the papers write it is ``y <- sigma(W W'y + c)`` through its bottleneck ``z = W'y``.

What is needed of both halves is tested with random numbers in place of weights, input and state: an identity that holds
for the actual ones alone fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opteq.engine.flatten import Flattened
from opteq.engine.trace import Traced, dependents, extract
from opteq.problems.base import HiddenProblem
from opteq.problems.hidden import FeatureForm, Reduction, SymmetricLinearisation
from opteq.states import State


class Bottleneck:
    """Both halves of a traced function of fixed tensors and of one that varies.

    Args:
        traced: the function; its result has the shape of what varies.
        examples: of the fixed tensors, and of the one that varies.

    Attributes:
        homogeneous: whether there is a bottleneck, and the first half maps zero to zero.
        symmetric: whether there is one, and the second half is a multiple of the first one's transpose.
    """

    def __init__(self, traced: Traced, examples: Sequence[Tensor]) -> None:
        *nodes, output = traced.each.graph.nodes
        inputs = [node for node in nodes if node.op == "placeholder"]
        varying = dependents(traced.each, inputs[-1:])
        places = {node: place for place, node in enumerate(varying)}
        found, entries, reached = inputs[-1], examples[-1].numel(), 0
        for node, place in places.items():
            value = node.meta.get("val")
            # What was computed before is not used behind it.
            if reached <= place and isinstance(value, Tensor) and value.numel() < entries:
                found, entries = node, value.numel()
            reached = max([reached, *(places[user] for user in node.users)])
        self._once, (result,) = traced.once, output.args[0]
        self._into = extract(traced.each, inputs, found)
        self._out = extract(traced.each, [*inputs[:-1], found], result)
        self.homogeneous = self.symmetric = False
        if found is not inputs[-1]:
            self._forms = examples[-1].stride(), found.meta["val"].stride()
            draw = partial(_drawn, torch.Generator(examples[-1].device).manual_seed(0))
            with suppress(Exception):  # of functions that refuse random numbers
                into, out = self._bind([draw(tensor) for tensor in examples[:-1]])
                one, other = draw(examples[-1]), draw(examples[-1])
                other[1:] = one[1:]  # rows of the bottleneck have to be those of samples
                if len(into(one)) == len(one) and torch.equal(into(one)[1:], into(other)[1:]):
                    self.homogeneous = not bool(into(torch.zeros_like(one)).any())
                    self.symmetric = _transposed(into, out, one, draw)

    def formulate(self, start: State, fixed: Sequence[Tensor]) -> FeatureForm:
        """A step in the variable at the bottleneck."""
        into, out = self._bind(fixed)
        return FeatureForm(lambda h: into(out(h)), into(start), out, into)

    def reduce(self, local: SymmetricLinearisation, fixed: Sequence[Tensor]) -> Reduction:
        """The adjoint system of a step with this curvature, in the variable at the bottleneck."""
        into, out = self._bind(fixed)

        def restrict(g: State) -> Tensor:
            return into(local.factor(local.factor_adjoint(g)))

        return Reduction(lambda u: restrict(out(u)), restrict, out)

    def _bind(self, fixed: Sequence[Tensor]) -> tuple[Callable[[Any], Tensor], Callable[[Any], Tensor]]:
        known = self._once(*fixed)
        into, out = self._forms
        return lambda y: self._into(*known, _like(into, y)), lambda h: self._out(*known, _like(out, h))


def _transposed(into: Callable[..., Tensor], out: Callable[..., Tensor], like: Tensor, draw: Any) -> bool:
    """Whether ``<out(u), v> = c <u, into(v)>`` with one number c, for random u and v."""
    vs = [draw(like) for _ in range(8)]
    us = [draw(into(v)) for v in vs]
    one = torch.stack([(out(u) * v).double().sum() for u, v in zip(us, vs, strict=True)])
    other = torch.stack([(u * into(v)).double().sum() for u, v in zip(us, vs, strict=True)])
    rest = one - (one @ other) / (other @ other) * other
    return bool(rest.norm() <= min(1e3 * torch.finfo(like.dtype).eps, 0.03) * one.norm())


def _drawn(generator: torch.Generator, like: Tensor) -> Tensor:
    """Random numbers in the form of a tensor; integers stay, since they may be indices."""
    if like.is_floating_point():
        return torch.empty_like(like).normal_(generator=generator)
    return torch.empty_like(like).random_(generator=generator) if like.dtype == torch.bool else like


def _like(strides: tuple[int, ...], tensor: Tensor) -> Tensor:
    """A tensor in the layout for which a graph was traced."""
    return tensor if tensor.stride() == strides else tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def known_contraction(flat: Flattened) -> bool:
    """Whether a step of a user's problem contracts for all weights within their bounds.

    A certificate that is computed from weights without values holds for all of them.
    """
    hidden: Any = flat.with_tensors([tensor.to("meta") for tensor in flat.tensors])
    problem = hidden.bound.module
    with suppress(Exception):  # of a user's code, or of what needs a value
        computed = type(problem).certificate is HiddenProblem.certificate  # and not what a user states
        contraction = problem.certificate().contraction if computed else None
        return contraction is not None and contraction < 1
    return False
