"""The implicit gradient as one captured graph: from cotangents of state and features to a problem's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opteq.engine.cuda_graphs import cache
from opteq.engine.cuda_graphs.buffers import dense
from opteq.engine.cuda_graphs.operations import FastOperations, WeightGradients, WithOperations
from opteq.engine.flatten import Flattened
from opteq.engine.log import note
from opteq.engine.traced import form_of, with_traced_functions
from opteq.engine.triton.solvers import open_linear
from opteq.gradients.adjoint import check_symmetry, rounding, symmetrised
from opteq.gradients.attach import refuse_hidden_batches, refuse_second_derivative
from opteq.problems.hidden import Product
from opteq.solution import Report
from opteq.solvers import Status
from opteq.solvers.linear import LinearSolver
from opteq.solvers.loop import Finish, Iteration, iterate
from opteq.states import Autocast, Layout, State, any_row, blocks, like, map_state, nan_samples

Gradients = list[Tensor | None]


@dataclass(frozen=True)
class Cotangents:
    """The cotangents of the state and of the features in the backward pass; None where there is none."""

    state: State | None
    features: State | None


class AdjointByGraph:
    """The backward pass of one solve.

    What it needs is noted in the forward pass: by the time of the backward pass a user's module may hold other weights
    (``torch.func.functional_call`` puts them in for the forward pass only).

    Args:
        flat: the problem, taken apart.
        state: its equilibrium, a constant.
        linear: solves the adjoint system.
        coupled: whether samples depend on each other.
        compile_functions: whether a user's functions are compiled.
        most: how many steps a graph may hold. A system that needs more, and is allowed more, is solved again plainly.
    """

    def __init__(
        self, flat: Flattened, state: State, linear: LinearSolver, coupled: bool, compile_functions: bool, most: int
    ) -> None:
        self.flat = flat
        self.state = state
        self.linear = linear
        self.captured = replace(linear, max_steps=min(linear.max_steps, most))
        self.compile_functions = compile_functions
        self.layout = Layout.of(state, coupled)
        self.autocast = Autocast.current(self.layout.device)
        self.eps = rounding(self.layout, self.autocast)

    def vjp(self, cotangents: Cotangents) -> tuple[Gradients, Report]:
        """The gradients of every tensor of the problem, and the report of the adjoint solve."""
        held, states = len(self.flat.tensors), len(blocks(self.state))
        arrived = [cotangents.state, cotangents.features]
        incoming = [part for one in arrived if one is not None for part in blocks(one)]
        inputs = [*self.flat.tensors, *blocks(self.state), *incoming]

        def open_solve(tensors: list[Tensor], linear: LinearSolver = self.captured) -> _BackwardSolve:
            state = like(self.state, tuple(tensors[held : held + states]))
            rest = iter(tensors[held + states :])
            given = [None if one is None else like(one, tuple(next(rest) for _ in blocks(one))) for one in arrived]
            return _BackwardSolve(self, linear, tensors[:held], state, Cotangents(*given))

        forms = tuple(None if one is None else len(blocks(one)) for one in arrived)
        key = (
            "adjoint", self.flat.structure, self.flat.wanted, self.linear, self.autocast, forms, self.compile_functions
        )  # fmt: skip
        with self.autocast.off(), torch.no_grad():
            answer = cache.run(key, inputs, open_solve)
            note("backward", answer if isinstance(answer, str) else None)
            if not isinstance(answer, str) and self.captured != self.linear:
                codes = answer[0][-2]
                if any_row(codes == int(Status.MAX_STEPS)):
                    answer = f"{self.captured.max_steps} steps are captured, and samples needed more"
                    note("backward", answer)
            if isinstance(answer, str):
                solve = open_solve(inputs, self.linear)
                iterate(solve.iteration)
                tensors: list[Any] = solve.tensors(solve.iteration.finish())
                answer = tensors, solve.facts
        (*found, residual, steps, codes, history), places = answer
        assert isinstance(places, tuple)
        known = dict(zip(places, found, strict=True))
        report = Report(
            method=f"adjoint by {type(self.linear).__name__}",
            residual=residual, steps=steps, codes=codes, tol=max(self.linear.tol, self.eps), history=history,
        )  # fmt: skip
        return [known.get(place) for place in range(held)], report

    def apply(self, product: Product, v: State) -> State:
        """A product in the precision of the forward pass."""
        with self.autocast.entered():
            return product(v)


class _BackwardSolve:
    """An adjoint solve under way, to be captured: its linear solve, and what becomes of the answer."""

    def __init__(
        self, adjoint: AdjointByGraph, linear: LinearSolver, held: Sequence[Tensor], state: State,
        cotangents: Cotangents,
    ) -> None:  # fmt: skip
        self.adjoint = adjoint
        self.state = state
        self.leaves = [
            tensor.detach().requires_grad_(wanted) for tensor, wanted in zip(held, adjoint.flat.wanted, strict=True)
        ]
        self.facts: object = None
        operations = FastOperations()
        with operations:
            gradient, self.direct = self._through_features(cotangents)
            gradient = nan_samples(gradient, adjoint.layout.coupled)
            with adjoint.autocast.entered():
                form = form_of(adjoint.flat, adjoint.compile_functions)
                self.problem = with_traced_functions(adjoint.flat, held, form)  # what is traced refers to it
                local = self.problem.linearise(state)
            check_symmetry(local, linear)
            system = symmetrised(local, gradient, adjoint.apply)
            self.recover = system.recover
            self.layout = Layout.of(system.rhs, adjoint.layout.coupled)
            product = system.product
            self.solve = open_linear(linear, lambda v: adjoint.apply(product, v), system.rhs, self.layout, adjoint.eps)
        self.iteration: Iteration = WithOperations(self.solve.iteration, operations)

    def tensors(self, finish: Finish) -> list[Tensor]:
        """Gradients of the problem's tensors, then residual, steps, codes and history."""
        finish, layout = self.solve.finish(finish), self.layout
        # Operations of its own: this part of the graph is captured before the steps, and runs after them.
        with FastOperations():
            vector = self.recover(layout.restore(finish.point))
            with torch.enable_grad(), self.adjoint.autocast.entered():
                reached = blocks(self.adjoint.flat.with_tensors(self.leaves).step(self.state))
            with WeightGradients():  # type: ignore[no-untyped-call]
                through = gradients_of(list(zip(reached, blocks(vector), strict=True)), self.leaves)
        total = [_sum(one, other) for one, other in zip(through, self.direct, strict=True)]
        self.facts = tuple(place for place, gradient in enumerate(total) if gradient is not None)
        statistics = [layout.per_sample(each) for each in (finish.residual, finish.steps, finish.codes)]
        return [*(gradient for gradient in total if gradient is not None), *statistics, finish.trace]

    def _through_features(self, cotangents: Cotangents) -> tuple[State, Gradients]:
        """The cotangent of the state, that of the features included, and what the features give to the tensors."""
        at_state, at_features = (
            None if one is None else map_state(dense, one) for one in (cotangents.state, cotangents.features)
        )
        if at_features is None:
            assert at_state is not None
            return at_state, [None] * len(self.leaves)
        parts = [part.detach().requires_grad_() for part in blocks(self.state)]
        with torch.enable_grad(), self.adjoint.autocast.entered():
            problem = self.adjoint.flat.with_tensors(self.leaves)
            features = blocks(problem.features(like(self.state, tuple(parts))))
        found = gradients_of(list(zip(features, blocks(at_features), strict=True)), [*parts, *self.leaves])
        count = len(parts)
        through = [torch.zeros_like(p) if g is None else g for g, p in zip(found[:count], parts, strict=True)]
        total = like(self.state, tuple(through))
        return total if at_state is None else map_state(torch.add, at_state, total), found[count:]


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of what is there."""
    return other if one is None else one if other is None else one + other


def gradients_of(pairs: Sequence[tuple[Tensor, Tensor]], leaves: Sequence[Tensor]) -> Gradients:
    """The gradient of every leaf for the cotangents of the outputs; None where there is none."""
    pairs = [(output, cotangent.to(output.dtype)) for output, cotangent in pairs if output.requires_grad]
    places = [place for place, leaf in enumerate(leaves) if leaf.requires_grad]
    if not pairs or not places:
        return [None] * len(leaves)
    outputs, cotangents = zip(*pairs, strict=True)
    # The graph is retained: this is captured before the steps are, which would be given the memory that it leaves.
    found = torch.autograd.grad(
        outputs, [leaves[place] for place in places], cotangents, retain_graph=True, allow_unused=True
    )
    known = dict(zip(places, found, strict=True))
    return [known.get(place) for place in range(len(leaves))]


def attach_adjoint(
    adjoint: AdjointByGraph, features: State | None, record: Callable[[Report], None]
) -> tuple[State, State | None]:
    """State and features, differentiated by the adjoint; constants where nothing wants a gradient."""
    state = adjoint.state
    if not any(adjoint.flat.wanted):
        return state, features
    attached: tuple[Tensor, ...] = _Attached.apply(adjoint, features, record, *adjoint.flat.originals)  # type: ignore[no-untyped-call]
    count = len(blocks(state))
    return like(state, attached[:count]), None if features is None else like(features, attached[count:])


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, adjoint: AdjointByGraph, features: State | None, record: Any, *originals: Tensor) -> Any:
        ctx.adjoint, ctx.record = adjoint, record
        ctx.set_materialize_grads(False)  # most users look at the features alone
        # Saved though the adjoint has them too: so autograd notices a weight that was changed in between.
        ctx.save_for_backward(*originals)
        ctx.features = None if features is None else map_state(lambda part: part.new_empty(()), features)
        ctx.shapes = None if features is None else [part.shape for part in blocks(features)]
        # The state is copied: the backward pass needs it as it is, and users may change what they are given in place.
        states = tuple(part.clone() for part in blocks(adjoint.state))
        return states if features is None else (*states, *(part.detach() for part in blocks(features)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        originals, adjoint = ctx.saved_tensors, ctx.adjoint
        if all(gradient is None for gradient in gradients):
            return (None, None, None, *[None] * len(originals))
        refuse_hidden_batches([gradient for gradient in gradients if gradient is not None])
        count = len(blocks(adjoint.state))
        at_state = _filled(gradients[:count], adjoint.state, [part.shape for part in blocks(adjoint.state)])
        at_features = None
        if ctx.features is not None:
            at_features = _filled(gradients[count:], ctx.features, ctx.shapes)
        with torch.no_grad():
            found, report = adjoint.vjp(Cotangents(at_state, at_features))
            ctx.record(report)
        if torch.is_grad_enabled():  # a second derivative may be asked for
            there = [gradient for gradient in found if gradient is not None]
            guarded = iter(refuse_second_derivative(there, originals))
            found = [None if gradient is None else next(guarded) for gradient in found]
        return (None, None, None, *found)


def _filled(gradients: Sequence[Tensor | None], form: State, shapes: Sequence[torch.Size]) -> State | None:
    """The cotangent of a state, zero for parts that have none; None where no part has one."""
    if all(gradient is None for gradient in gradients):
        return None
    parts = zip(gradients, blocks(form), shapes, strict=True)
    return like(form, tuple(part.new_zeros(shape) if given is None else given for given, part, shape in parts))
