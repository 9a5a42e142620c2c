"""Faster implementations of a few operations, in force while a solve is captured, and checks of what it does.

Both are modes of torch: the problem's own code runs as it is, and torch hands its operations over. Nothing of this runs
when a graph is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opteq.common.override import plain
from opteq.engine.inductor import call_compiled
from opteq.engine.simplify import FEW_CHANNELS
from opteq.engine.triton.launch import has_triton
from opteq.engine.triton.operations import gaussian, resample, spline
from opteq.kernels.gaussian import weigh, weigh_derivative
from opteq.operators.resample import pool, spread
from opteq.potentials.base import scaled_derivative, scaled_second
from opteq.solvers import fista
from opteq.solvers.loop import Iteration


class FastOperations(TorchFunctionMode):
    """Operations without autograd by faster kernels, where there are any. They can't be traced."""

    def __init__(self) -> None:
        super().__init__()
        self._flipped: dict[int, tuple[Tensor, Tensor]] = {}
        self._table: dict[Callable[..., Any], Callable[..., Any]] = {torch.conv_transpose2d: self._convolve_flipped}
        self._table |= {pool: resample.pooled, spread: resample.spread}
        self._table |= {weigh: gaussian.weigh, weigh_derivative: gaussian.weigh_derivative}
        self._table |= {scaled_derivative: spline.scaled_derivative, scaled_second: spline.scaled_second}
        # What accelerated steps do between two evaluations of the map is some forty operations on a few numbers.
        self._table |= {function: partial(_compiled, plain(function)) for function in (fista.propose, fista.accept)}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        fast = None if torch.is_grad_enabled() or get_proxy_mode() is not None else self._table.get(func)
        if fast is not None and not torch._C._are_functorch_transforms_active():
            found = fast(*args, **(kwargs or {}))
            if found is not None:
                return found
        return func(*args, **(kwargs or {}))

    def _convolve_flipped(
        self, u: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, **rest: Any
    ) -> Tensor | None:
        """A transposed convolution that keeps the size, as a convolution with the spatially flipped weight."""
        same = tuple(padding) if isinstance(padding, tuple | list) else (padding, padding)
        if rest or bias is not None or stride != 1 or same != (weight.shape[2] // 2, weight.shape[3] // 2):
            return None
        if weight.shape[1] < FEW_CHANNELS:
            return None
        if id(weight) not in self._flipped:
            flipped = weight.flip(2, 3).transpose(0, 1).contiguous(memory_format=torch.channels_last)
            self._flipped[id(weight)] = weight, flipped
        return torch.conv2d(u, self._flipped[id(weight)][1], padding=same)


def _compiled(function: Callable[..., Any], *given: Any) -> Any:
    return call_compiled(function, *given) if given[0].is_cuda and has_triton() else None


class WithOperations:
    """An iteration with :class:`FastOperations` in force when it begins and advances."""

    def __init__(self, iteration: Iteration, operations: FastOperations) -> None:
        self._iteration = iteration
        self._operations = operations
        self.rule, self.unfinished, self.finish = iteration.rule, iteration.unfinished, iteration.finish

    def begin(self) -> None:
        with self._operations:
            self._iteration.begin()

    def advance(self) -> None:
        with self._operations:
            self._iteration.advance()


class SideEffectError(RuntimeError):
    """A computation does something else the second time, or changes what is read after it."""


class SideEffectCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where a computation draws random numbers or writes to one of its inputs, and before it does so.

    A graph, and the backward pass of one, would draw others, and write to its own copies of the inputs: a batch
    normalisation in training mode would never learn its statistics.

    Args:
        inputs: of the computation.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inputs = {tensor.untyped_storage()._cdata for tensor in inputs}
        self._kept: list[object] = list(inputs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise SideEffectError(f"it draws random numbers ({func})")
        written = tree_leaves(_written(func, args, kwargs))
        if any(isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in self._inputs for leaf in written):
            raise SideEffectError(f"it writes to a parameter, a buffer or an input ({func})")
        return func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes to."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    found = [
        named.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if named.get("training") is True:  # the schemas of batch normalisations do not say so
        found += [named.get("running_mean"), named.get("running_var")]
    return found


class CaptureCheck(SideEffectCheck):  # type: ignore[no-untyped-call]
    """Raises where a solve depends on what a captured graph would not notice.

    That is a tensor on the device that is neither an input of the graph nor made inside, and side effects.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__(inputs)
        self._known = set(self._inputs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.is_cuda and leaf.untyped_storage()._cdata not in self._known:
                raise RuntimeError(
                    f"it reads a tensor of shape {tuple(leaf.shape)} that is neither a parameter, a buffer nor an "
                    "input; register it with register_buffer"
                )
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._known.add(storage._cdata)
                # Its memory is freed, but no other storage gets its identity.
                self._kept.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        return result
