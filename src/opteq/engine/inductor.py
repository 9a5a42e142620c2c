"""Functions of tensors compiled to few kernels, for the shapes that they are called with."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_unflatten

_MOST_KEPT = 64
_kept: OrderedDict[Any, tuple[Callable[..., Any], Any]] = OrderedDict()


class CompiledGraph:
    """A graph of torch's basic operations, compiled by Inductor at its first call.

    Args:
        graph: takes tensors, and returns a list of tensors.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        # Compiled code allocates past torch's dispatcher: a mode that observes operations gets to see the graph itself.
        if _get_current_dispatch_mode() is not None:
            return list(self._graph(*tensors))
        if self._compiled is None:
            # Not torch.compile: Dynamo is switched off inside of a layer, and there is a graph already.
            # Layouts stay as they are: channels-last would slow down convolutions with few channels.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler's notes to its own developers
                from torch import _inductor  # loads the compiler of torch, which takes longer than torch itself

                self._compiled = _inductor.compile(self._graph, list(tensors), options={"layout_optimization": False})
        return list(self._compiled(*tensors))


def call_compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)`` by compiled code; arguments and result are tensors, numbers, None and tuples of them."""
    leaves, form = tree_flatten(arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    rest = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    looks = tuple((leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in tensors)
    key = function, form, rest, looks
    if key not in _kept:
        result_form: list[Any] = []

        def flat(*given: Tensor) -> list[Tensor]:
            there = iter(given)
            filled = [next(there) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            found, result = tree_flatten(function(*tree_unflatten(filled, form)))
            result_form[:] = [result, [isinstance(part, Tensor) for part in found]]
            return [part for part in found if isinstance(part, Tensor)]

        # Copies: a tensor that is an argument twice would be taken for one.
        graph = make_fx(flat, tracing_mode="real")(*(tensor.clone() for tensor in tensors))
        _kept[key] = CompiledGraph(graph), tuple(result_form)
        if len(_kept) > _MOST_KEPT:
            _kept.popitem(last=False)
    call, (result, are_tensors) = _kept[key]
    parts = iter(call(*tensors))
    return tree_unflatten([next(parts) if is_tensor else None for is_tensor in are_tensors], result)
