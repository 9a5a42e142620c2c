"""Attach the gradient of one step to the equilibrium, with an adjoint solve in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opteq.states import State, blocks, like, nan_samples

Gradients = tuple[Tensor | None, ...]
"""Gradients of several tensors; None where one has none."""

Adjoint = Callable[[Gradients], Gradients]


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
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # noqa: ARG004
        raise RuntimeError(
            "this gradient of an equilibrium comes from an adjoint solve and can't be differentiated again. "
            "For second derivatives use gradient=opteq.Unrolled(steps), or opteq.Phantom(steps) with many steps"
        )
