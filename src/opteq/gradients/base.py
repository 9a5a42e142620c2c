"""What all gradients share: the base class, the solve without autograd, and how its answer gets a gradient."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from opteq import engine
from opteq.common.options import NamedOptions
from opteq.problems.hidden import BoundMap, Formulation
from opteq.solution import Report
from opteq.solvers import Outcome, Solver, Status
from opteq.states import State, blocks, is_tracked, like, map_state, nan_samples, surely_finite

Record = Callable[[Report], None]

Gradients = tuple[Tensor | None, ...]
"""Gradients of several tensors; None where one has none."""

Adjoint = Callable[[Gradients], Gradients]


@dataclass(frozen=True)
class Gradient(metaclass=NamedOptions):
    """How an equilibrium is differentiated. It is independent of how the equilibrium is found."""

    forward_mode: ClassVar[bool] = False
    """Whether forward-mode differentiation (``torch.func.jvp``) passes through."""

    @abstractmethod
    def run(self, hidden: BoundMap, solver: Solver, start: State | None, record: Record) -> tuple[State, Outcome]:
        """Solve, and return the state with its gradient attached together with the solver's outcome.

        Args:
            hidden: the problem with its input bound.
            solver: finds the equilibrium.
            start: where to begin; None leaves it to the problem.
            record: called in the backward pass with its report.
        """

    def evaluate(self, hidden: BoundMap, solver: Solver, start: State | None) -> tuple[State, Outcome]:
        """Solve where no gradient is wanted."""
        return find_no_grad(hidden, solver, start)


def wants_gradient(state: State) -> bool:
    """Whether autograd tracks the state."""
    return any(is_tracked(part) for part in blocks(state))


def formulate(hidden: BoundMap, solver: Solver, start: State | None, same_steps: bool) -> Formulation:
    """The problem for the variable of ``solver``: the smallest one, unless every step is to be one of the state.

    That is what ``same_steps`` or a tolerance of 0 asks for, for a network that consists of a number of them.
    ``start`` is a state, or None for the problem's own.
    """
    if solver.works_on_features:
        other: Formulation | None = hidden.feature_form()
    else:
        other = None if same_steps or solver.tol == 0 else hidden.compact_form()
    form = hidden.state_form() if other is None else replace(other, state=partial(_finite_state, other))
    return form if start is None else replace(form, task=replace(form.task, start=form.of_state(start)))


def _finite_state(form: Formulation, found: State) -> State:
    """The state of a variable. It may be finite where its state is not, an input of NaN for instance."""
    return map_state(lambda p: p if surely_finite(p) else torch.where(torch.isfinite(p), p, 0.0), form.state(found))


def find(hidden: BoundMap, solver: Solver, start: State | None, same_steps: bool = True) -> Outcome:
    """The equilibrium of ``hidden`` with all that the solver learned, differentiable where autograd is enabled."""
    form = formulate(hidden, solver, start, same_steps)
    outcome = solver.run(form.task)
    return replace(outcome, state=form.state(outcome.state))


def find_no_grad(
    hidden: BoundMap, solver: Solver, start: State | None, same_steps: bool = False, keep_inverse: bool = False
) -> tuple[State, Outcome]:
    """The equilibrium as a constant: nothing of the iterations is kept for the backward pass.

    ``keep_inverse`` where the solver's estimate of the inverse Jacobian, on states, is needed.
    """
    with torch.no_grad():
        outcome = None if keep_inverse else engine.solve(hidden, solver, start, same_steps)
        outcome = outcome or find(hidden, solver, start, same_steps or keep_inverse)
    if not keep_inverse:  # it holds the solver's history, which is most of the memory of a solve
        outcome = replace(outcome, inverse_adjoint=None)
    return map_state(Tensor.detach, outcome.state), outcome


def attach(
    value: State,
    carrier: State,
    adjoint: Adjoint | None = None,
    notice: Callable[[], None] | None = None,
    held: Sequence[Tensor] = (),
) -> State:
    """``value``, differentiated as if it were ``carrier``.

    The value is untouched, so it does not depend on whether a gradient is wanted, and a carrier that overflowed cannot
    spoil it.

    Args:
        value: what is returned.
        carrier: whose tape the gradient goes to.
        adjoint: changes the incoming gradient on the way; the result can then not be differentiated twice. Without one,
            a sample whose gradient is not finite gets NaN throughout: a unit that is off would drop a single one.
        notice: called when the backward pass comes by.
        held: what ``adjoint`` reads. torch.func does not notice a tensor that is changed in place after it was saved;
            autograd, which saves these as well, raises its error.
    """
    values, carriers = blocks(value), blocks(carrier)
    held = [tensor.detach() for tensor in held if not tensor.is_inference()]  # autograd saves none of inference mode
    attached: tuple[Tensor, ...] = _Attach.apply(adjoint, notice, len(values), *values, *carriers, *held)  # type: ignore[no-untyped-call]
    return like(value, attached)


def attach_approximate(
    state: State, carrier: State, record: Record, method: str, steps: int, adjoint: Adjoint | None = None
) -> State:
    """``state`` with the gradient of ``carrier``, by a method in words that solves no system; the report says so."""
    if not wants_gradient(carrier):
        return state
    first = blocks(state)[0]
    batch = first.shape[0]
    report = Report(
        method=method,
        residual=first.new_full((batch,), torch.nan, dtype=torch.float32),
        steps=torch.full((batch,), steps, dtype=torch.int64, device=first.device),
        codes=torch.full((batch,), int(Status.APPROXIMATE), dtype=torch.int64, device=first.device),
        tol=float("nan"),
    )
    return attach(state, carrier, adjoint, notice=lambda: record(report))


class _Attach(torch.autograd.Function):
    generate_vmap_rule = True

    # With a separate setup_context, torch.func can transform the function.
    @staticmethod
    def forward(adjoint: Adjoint | None, notice: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        return tuple(value.clone() for value in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG004
        ctx.adjoint, ctx.notice, ctx.count = inputs[:3]
        ctx.set_materialize_grads(False)  # most users look at the features alone
        ctx.save_for_backward(*inputs[3 + ctx.count :])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        carriers, held = saved[: ctx.count], saved[ctx.count :]
        if all(gradient is None for gradient in gradients):
            return (None, None, None, *[None] * (2 * ctx.count + len(held)))
        if ctx.notice is not None:
            ctx.notice()
        if ctx.adjoint is None:
            found: Gradients = blocks(nan_samples(filled(gradients, carriers) or ()))
        else:
            with torch.no_grad():
                found = ctx.adjoint(gradients)
            if torch.is_grad_enabled():  # a second derivative may be asked for
                found = refuse_second_derivative(found, carriers)
        cast = [None if g is None else g.to(carrier.dtype) for g, carrier in zip(found, carriers, strict=True)]
        return (None, None, None, *[None] * ctx.count, *cast, *[None] * len(held))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        if ctx.adjoint is not None:  # met by torch.func.hessian, whose forward mode lies below a reverse mode
            raise RuntimeError(
                "forward-mode differentiation (torch.func.jvp, jacfwd, hessian) does not pass through an adjoint "
                "solve; use reverse mode (vjp, jacrev), or gradient=opteq.Unrolled(steps)"
            )
        return tangents[3 + ctx.count : 3 + 2 * ctx.count]


def filled(gradients: Gradients, form: State) -> State | None:
    """Gradients of a state's parts, zero for those that have none; None where no part has one."""
    if all(gradient is None for gradient in gradients):
        return None
    parts = zip(gradients, blocks(form), strict=True)
    return like(form, tuple(torch.zeros_like(part) if given is None else given for given, part in parts))


def refuse_batched_gradients(gradients: Gradients) -> None:
    """Raise where torch.autograd has put many gradients into one tensor without saying so.

    A linear solve branches on its residuals, which can't be read from such a tensor.
    """
    if any(one is not None and torch._C._functorch.is_legacy_batchedtensor(one) for one in gradients):
        raise RuntimeError(
            "several gradients of an equilibrium at once, by is_grads_batched=True or vectorize=True of "
            "torch.autograd, do not pass through an adjoint solve; use torch.func.jacrev, or vmap(vjp), which do"
        )


def refuse_second_derivative(values: Gradients, carriers: Sequence[Tensor]) -> Gradients:
    """``values`` whose derivative, also by way of ``carriers``, is an error."""
    there = [value for value in values if value is not None]
    guarded = iter(_RefuseSecondDerivative.apply(len(there), *there, *carriers))  # type: ignore[no-untyped-call]
    return tuple(None if value is None else next(guarded) for value in values)


class _RefuseSecondDerivative(torch.autograd.Function):
    """The identity, with a refusal for a gradient.

    It takes the carriers along, so that it lies on every path from a second derivative to a weight or an input:
    without it autograd would run past the adjoint solve in silence, and be wrong.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.clone() for value in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept; torch.func transforms functions that have this method."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # noqa: ARG004
        raise RuntimeError(
            "this gradient of an equilibrium comes from an adjoint solve and can't be differentiated again. "
            "For second derivatives use gradient=opteq.Unrolled(steps), or opteq.Phantom(steps) with many steps"
        )
