"""Derivatives of functions, as :mod:`torch.func` has them, inside a checkpoint and in inference mode, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

S = TypeVar("S")


def gradient(function: Callable[[Any], Tensor], at: S) -> S:
    """The gradient of the sum of a function of a state."""
    return values_and_gradient(function, at)[1]


def values_and_gradient(function: Callable[[Any], Tensor], at: S) -> tuple[Tensor, S]:
    """The values of a function of a state, one per sample, and the gradient of their sum, in one pass."""

    def summed(state: S) -> tuple[Tensor, Tensor]:
        values = function(state)
        return values.sum(), values

    derivative = torch.func.grad(summed, has_aux=True)
    if torch.compiler.is_compiling():  # which saves nothing by itself
        slope, values = derivative(at)
    else:
        with without_saved_tensor_hooks(), _without_inference_mode():
            slope, values = derivative(at)
    return values, slope


def pullback(function: Callable[[Any], Any], at: S) -> tuple[Any, Callable[[Any], S]]:
    """The value of a function of a state, and ``v -> J' v`` for its Jacobian J there."""
    result: Any
    if torch.compiler.is_compiling():
        result = torch.func.vjp(function, at)
    else:
        with without_saved_tensor_hooks(), _without_inference_mode(), _explained():
            result = torch.func.vjp(function, at)
    value, vjp = result

    def product(v: Any) -> Any:
        if torch.compiler.is_compiling():
            return vjp(v)[0]
        with _without_inference_mode(), _explained():
            return vjp(v)[0]

    return value, product


@contextmanager
def _explained() -> Iterator[None]:
    """Errors of operations whose derivative torch can't differentiate say what to do."""
    try:
        yield
    except RuntimeError as error:
        if "derivative for" not in str(error) or "is not implemented" not in str(error):
            raise
        attention = "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
        raise RuntimeError(
            f"{error}. Terms are differentiated twice: write them with operations that can be; attention inside of "
            f"`with {attention}`"
        ) from error


@contextmanager
def _without_inference_mode() -> Iterator[None]:
    """Inside, inference mode is off, and autograd of what is outside as well.

    In inference mode, torch 2.10 and older ones give derivatives of zero without an error (pytorch issue 177318).
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Inside, tensors are saved for backward without saved-tensor hooks.

    A checkpoint (``torch.utils.checkpoint`` with ``use_reentrant=False``) and ``save_on_cpu`` put hooks on what is
    saved, and torch.func refuses to run beside hooks. The tensors of a step are kept, then, as without a checkpoint.
    """
    hooks: Any = torch._C._autograd
    held = []
    while (top := hooks._top_saved_tensors_default_hooks(False)) is not None:
        held.append(top)
        hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(held):
            hooks._push_saved_tensors_default_hooks(pack, unpack)
