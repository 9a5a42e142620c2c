"""A traced function in two halves, split at the smallest tensor through which its varying argument acts.

``A(B(y))`` has the fixed points ``y = A(h)`` with ``h = B(A(h))``, and a solver that iterates on h combines smaller
vectors. OptEq as the papers write it is ``y <- sigma(W W'y + c)`` through its bottleneck ``z = W'y``.

Properties of the halves are tested with random numbers in place of weights, input and state: an identity that holds for
the actual numbers alone is not found. One of analytic functions that holds at random points holds everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from opteq.engine.flatten import Flattened
from opteq.engine.inductor import CompiledGraph
from opteq.engine.trace import Function, Traced, dependents, extract, in_layout
from opteq.problems.base import HiddenProblem
from opteq.problems.hidden import BoundMap, Formulation, Reduction, SymmetricLinearisation
from opteq.solvers.base import FixedPointTask
from opteq.states import State

_ANALYTIC = {
    "_to_copy", "_unsafe_view", "add", "addmm", "alias", "bmm", "cat", "clone", "constant_pad_nd", "convolution", "div",
    "detach", "exp", "expand", "flip", "full", "lift_fresh_copy", "mean", "mm", "mul", "neg", "permute", "pow", "t",
    "reshape", "rsub", "select", "sigmoid", "slice", "squeeze", "sub", "sum", "tanh", "transpose", "unsqueeze", "view",
}  # fmt: skip
"""Operations that are analytic functions, or move entries."""


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
        into = extract(traced.each, inputs, [found])
        out = extract(traced.each, [*inputs[:-1], found], output.args[0])
        self._graphs: list[Any] = [traced.once, into, out]
        self.homogeneous = self.symmetric = False
        if found is not inputs[-1]:
            self._strides = examples[-1].stride(), found.meta["val"].stride()
            with suppress(Exception):  # of functions that refuse random numbers
                self._try_random_numbers(examples)
            self.symmetric = self.symmetric and _are_analytic(traced.once, into, out)
        if traced.compiled:
            self._graphs[1:] = map(CompiledGraph, (into, out))

    def formulate(self, hidden: BoundMap, start: State, fixed: Sequence[Tensor]) -> Formulation:
        """A problem for the variable at the bottleneck of its step."""
        into, out = self._bind(self._graphs, fixed)
        task = FixedPointTask(lambda h: into(out(h)), into(start), damping=hidden.damping, coupled=hidden.coupled)
        return Formulation(task, out, into)

    def reduce(self, local: SymmetricLinearisation, fixed: Sequence[Tensor]) -> Reduction:
        """The adjoint system of a step with this curvature, in the variable at the bottleneck."""
        into, out = self._bind(self._graphs, fixed)
        return Reduction(lambda g: into(local.derivative(g)), out)

    def _bind(self, graphs: Sequence[Any], fixed: Sequence[Tensor]) -> tuple[Callable[[Any], Tensor], ...]:
        """Both halves as functions of one tensor."""
        once, into, out = graphs
        known, (before, behind) = once(*fixed), self._strides
        return lambda y: into(*known, in_layout(before, y))[0], lambda h: out(*known, in_layout(behind, h))[0]

    def _try_random_numbers(self, examples: Sequence[Tensor]) -> None:
        """In float64, whatever the precision of the graph: an identity holds to the last digits, or it does not.

        Integers may be indices, for which random ones will not do. Where some are used, nothing is known of others.
        """
        if not _can_be_drawn(self._graphs[0], examples[:-1]):
            return
        draw = partial(_drawn, torch.Generator(examples[-1].device).manual_seed(0))
        fixed = [draw(tensor) for tensor in examples[:-1]]
        into, out = self._bind([*map(_in_float64, self._graphs)], fixed)
        one, other = draw(examples[-1]), draw(examples[-1])
        other[1:] = one[1:]  # rows of the bottleneck have to be those of samples
        if len(into(one)) == len(one) and _near(into(one)[1:], into(other)[1:]):
            self.homogeneous = not bool(into(torch.zeros_like(one)).any())
            self.symmetric = _transposed(into, out, one, draw)


def has_same_gradients(traced: Traced, function: Function, fixed: Sequence[Tensor], varying: Sequence[Tensor]) -> bool:
    """Whether a graph has the derivatives of its function by fixed tensors, for random numbers of float64."""
    with suppress(Exception), torch.enable_grad():
        if _can_be_drawn(traced.once, fixed) and not traced.without_gradient:
            draw = partial(_drawn, torch.Generator(varying[0].device).manual_seed(0))
            given = [draw(one).requires_grad_(one.is_floating_point()) for one in fixed]
            state, vector = [*map(draw, varying)], [*map(draw, varying)]
            once, each = map(_in_float64, (traced.once, traced.each))
            leaves, found = [one for one in given if one.requires_grad], []
            for results in (each(*once(*given), *state), function(given, state)):
                total = torch.stack([(one * other).sum() for one, other in zip(results, vector, strict=True)]).sum()
                found.append(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))
            return all(_near(one, other) for one, other in zip(*found, strict=True))
    return False


def _in_float64(module: fx.GraphModule) -> fx.GraphModule:
    def widened(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    graph = deepcopy(module.graph)
    for node in graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), widened)
    return fx.GraphModule(module, graph)


def _are_analytic(once: fx.GraphModule, *halves: fx.GraphModule) -> bool:
    """Whether both halves are analytic functions, so that what random numbers show holds for all: no mask, no clamp."""
    *nodes, output = once.graph.nodes
    used = {place for half in halves for place, node in enumerate(half.graph.nodes) if node.users}
    needed = [value for place, value in enumerate(output.args[0]) if place in used]
    before = extract(once, [node for node in nodes if node.op == "placeholder"], needed)
    called = [node.target for part in (before, *halves) for node in part.graph.nodes if node.op == "call_function"]
    return all(isinstance(one, torch._ops.OpOverload) and one.overloadpacket.__name__ in _ANALYTIC for one in called)


def _can_be_drawn(once: fx.GraphModule, fixed: Sequence[Tensor]) -> bool:
    """Whether random numbers can take the place of all fixed tensors that are used."""
    given = [node for node in once.graph.nodes if node.op == "placeholder"]
    used = [tensor for node, tensor in zip(given, fixed, strict=True) if node.users]
    return all(tensor.is_floating_point() or tensor.dtype == torch.bool for tensor in used)


def _transposed(into: Callable[..., Tensor], out: Callable[..., Tensor], like: Tensor, draw: Any) -> bool:
    """Whether ``<out(u), v> = c <u, into(v)>`` with one number c, for random u and v."""
    pairs = []
    for _ in range(4):
        v = draw(like)
        carried = into(v)
        u = draw(carried)
        pairs.append(torch.stack([(out(u) * v).sum(), (u * carried).sum()]))
    one, other = torch.stack(pairs, dim=1)
    return _near(one, (one @ other) / (other @ other) * other)


def _near(one: Tensor, other: Tensor) -> bool:
    """Whether tensors of float64 agree up to rounding."""
    return bool((one - other).norm() <= 1e-9 * one.norm())


def _drawn(generator: torch.Generator, like: Tensor) -> Tensor:
    """Random numbers of float64 in the form of a tensor; integers stay."""
    if like.is_floating_point():
        return torch.empty_like(like, dtype=torch.float64).normal_(generator=generator)
    return torch.empty_like(like).random_(generator=generator) if like.dtype == torch.bool else like


def known_curvature(flat: Flattened, tensors: Sequence[Tensor]) -> tuple[bool, bool]:
    """Whether a step of a user's problem contracts, and whether g is concave, for all weights within their bounds.

    What is computed from weights without values holds for all of them.
    """
    hidden: Any = flat.with_tensors([tensor.to("meta") for tensor in tensors])
    problem, contraction, concave = hidden.bound.module, None, False
    with suppress(Exception):  # of a user's code, or of what needs a value
        concave = problem.has_concave_smooth()
        if type(problem).certificate is HiddenProblem.certificate:  # and not what a user states
            contraction = problem.certificate().contraction
    return contraction is not None and contraction < 1, concave
