"""The implicit gradient as one captured graph: from cotangents of state and features to a problem's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opteq.engine.cuda_graphs import cache
from opteq.engine.cuda_graphs.buffers import dense
from opteq.engine.cuda_graphs.operations import FastOperations, WithOperations
from opteq.engine.flatten import Flattened
from opteq.engine.log import note
from opteq.engine.traced import traces_of, with_traced_functions, with_traced_step
from opteq.engine.triton.solvers import open_linear
from opteq.gradients.base import filled, refuse_batched_gradients, refuse_second_derivative
from opteq.gradients.implicit import check_symmetry, rounding, symmetrised
from opteq.problems.hidden import Product, SymmetricLinearisation
from opteq.solution import Report
from opteq.solvers import Status
from opteq.solvers.linear import LinearSolver
from opteq.solvers.loop import Finish, Iteration, iterate
from opteq.states import Autocast, Layout, State, any_row, blocks, like, map_state


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

    def vjp(self, *arrived: State | None) -> tuple[list[Tensor | None], Report]:
        """The gradients of every tensor of the problem, and the report of the adjoint solve.

        ``arrived`` are the cotangents of the state and of the features; None where there is none.
        """
        held, states = len(self.flat.tensors), len(blocks(self.state))
        incoming = [part for one in arrived if one is not None for part in blocks(one)]
        inputs = [*self.flat.tensors, *blocks(self.state), *incoming]

        def open_solve(tensors: list[Tensor], linear: LinearSolver = self.captured) -> _BackwardSolve:
            state = like(self.state, tuple(tensors[held : held + states]))
            rest = iter(tensors[held + states :])
            given = [None if one is None else like(one, tuple(next(rest) for _ in blocks(one))) for one in arrived]
            return _BackwardSolve(self, linear, tensors[:held], state, *given)

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
                answer = open_solve(inputs, self.linear).run()
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
        at_state: State | None, at_features: State | None,
    ) -> None:  # fmt: skip
        self.adjoint = adjoint
        self.state = state
        self.leaves = [
            tensor.detach().requires_grad_(wanted) for tensor, wanted in zip(held, adjoint.flat.wanted, strict=True)
        ]
        self.facts: object = None
        operations = FastOperations()
        at_state, at_features = (None if one is None else map_state(dense, one) for one in (at_state, at_features))
        with operations:
            with adjoint.autocast.entered():
                traces = traces_of(adjoint.flat, adjoint.compile_functions)
                step = with_traced_step(adjoint.flat, traces, state, self.leaves)
                with torch.enable_grad():
                    self.carrier, inside, features = step.step_by_step(state)
                self.problem = with_traced_functions(adjoint.flat, traces, held)  # what is traced refers to it
                local = self.problem.linearise(state, None if inside is None else map_state(Tensor.detach, inside))
            check_symmetry(local, linear)
            self.direct: list[tuple[State, State]] = []
            if at_features is not None:
                at_state, at_features = self._through_features(local, features, at_state, at_features)
            system = symmetrised(local, at_state, at_features, adjoint.apply, adjoint.layout.coupled)
            product, rhs, self.recover = system
            self.layout = Layout.of(rhs, adjoint.layout.coupled)
            self.solve = open_linear(linear, lambda v: adjoint.apply(product, v), rhs, self.layout, adjoint.eps)
        self.iteration: Iteration = WithOperations(self.solve.iteration, operations)

    def run(self) -> tuple[list[Any], object]:
        """Solve without a graph, once, and free the solver's memory before the rest."""
        iterate(self.iteration)
        finish = self.solve.finish(self.iteration.finish())
        del self.solve, self.iteration
        return self._gradients(finish), self.facts

    def tensors(self, finish: Finish) -> list[Tensor]:
        """Gradients of the problem's tensors, then residual, steps, codes and history."""
        return self._gradients(self.solve.finish(finish))

    def _gradients(self, finish: Finish) -> list[Tensor]:
        finish = finish.per_sample(self.layout)
        # Operations of its own: this part of the graph is captured before the steps, and runs after them.
        with FastOperations():
            vector = self.recover(self.layout.restore(finish.point))
            total = gradients_of([(self.carrier, vector), *self.direct], self.leaves)
        self.facts = tuple(place for place, gradient in enumerate(total) if gradient is not None)
        found = [gradient for gradient in total if gradient is not None]
        return [*found, finish.residual, finish.steps, finish.codes, finish.trace]

    def _through_features(
        self, local: Any, features: State | None, at_state: State | None, at_features: State
    ) -> tuple[State | None, State | None]:
        """The cotangent of the state with what the features add to it, and that of the features where they don't."""
        parts = [part.detach().requires_grad_() for part in blocks(self.state)]
        known = isinstance(local, SymmetricLinearisation) and local.system.of_features
        if features is None or not known:
            with torch.enable_grad(), self.adjoint.autocast.entered():
                problem = self.adjoint.flat.with_tensors(self.leaves)
                features = problem.features(like(self.state, tuple(parts)))
        self.direct = [(features, at_features)]
        if known:
            return at_state, at_features
        found = gradients_of(self.direct, parts)
        through = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parts, strict=True)]
        total = like(self.state, tuple(through))
        return (total if at_state is None else map_state(torch.add, at_state, total)), None


def gradients_of(outputs: Sequence[tuple[State, State]], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient of every leaf for outputs and their cotangents; None where there is none."""
    pairs = [
        (output, cotangent.to(output.dtype))
        for one, other in outputs
        for output, cotangent in zip(blocks(one), blocks(other), strict=True)
        if output.requires_grad
    ]
    places = [place for place, leaf in enumerate(leaves) if leaf.requires_grad]
    if not pairs or not places:
        return [None] * len(leaves)
    reached, cotangents = zip(*pairs, strict=True)
    # The graph is retained: this is captured before the steps are, which would be given the memory that it leaves.
    found = torch.autograd.grad(
        reached, [leaves[place] for place in places], cotangents, retain_graph=True, allow_unused=True
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
    def forward(ctx: Any, adjoint: AdjointByGraph, features: State | None, record: Any, *originals: Tensor) -> Any:  # noqa: ARG004
        ctx.adjoint, ctx.record = adjoint, record
        ctx.set_materialize_grads(False)  # most users look at the features alone
        # Saved though the adjoint has them too: so autograd notices a weight that was changed in between.
        # Not running statistics, which the next call of the layer may change before the backward pass of this one.
        ctx.save_for_backward(*adjoint.flat.read)
        shape_only = partial(map_state, lambda part: part.new_empty(()).expand_as(part))
        ctx.features = None if features is None else shape_only(features)
        # The state is copied: the backward pass needs it as it is, and users may change what they are given in place.
        states = tuple(part.clone() for part in blocks(adjoint.state))
        return states if features is None else (*states, *(part.detach() for part in blocks(features)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        read, adjoint = ctx.saved_tensors, ctx.adjoint
        if all(gradient is None for gradient in gradients):
            return (None, None, None, *[None] * len(adjoint.flat.originals))
        refuse_batched_gradients(gradients)
        count = len(blocks(adjoint.state))
        at_state = filled(gradients[:count], adjoint.state)
        at_features = None if ctx.features is None else filled(gradients[count:], ctx.features)
        with torch.no_grad():
            found, report = adjoint.vjp(at_state, at_features)
            ctx.record(report)
        if torch.is_grad_enabled():  # a second derivative may be asked for
            found = refuse_second_derivative(found, read)
        return (None, None, None, *found)
