"""A function of tensors as two graphs: what depends on the varying arguments, and what can be computed once.

A step that autograd derives from a user's objective also computes the objective's value, which no solver asks for, and
in every evaluation what depends on the input and the weights alone. Traced to a graph of torch's basic operations, both
can be seen: operations without use are dropped, and those that do not depend on the state are computed once per solve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from opteq.engine.inductor import CompiledGraph
from opteq.engine.simplify import simplify

# A factorisation that failed raises by an operation whose result nobody uses: torch 2.10 takes it for dead code.
fx.node.has_side_effect(torch.ops.aten._linalg_check_errors.default)

Function = Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]]
"""A function of fixed and of varying tensors."""


class _Watch(TorchFunctionMode):
    """Refuses to read numbers without an operation that a trace sees, and notices where gradients are switched off."""

    without_gradient = False

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.__repr__):
            raise ValueError(f"it reads values of a tensor on the host ({func.__name__})")
        self.without_gradient |= not torch.is_grad_enabled() or func == Tensor.data.__get__  # type: ignore[attr-defined]
        return func(*args, **(kwargs or {}))


class _FixedShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses results whose shapes depend on values, by a mask for instance: a trace keeps those that it saw."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.dynamic_output_shape in func.tags:
            indexed = func is torch.ops.aten.index.Tensor  # by numbers, unless there is a mask
            if not indexed or any(one is not None and one.dtype == torch.bool for one in args[1]):
                raise ValueError(f"the shape of a result depends on values ({func})")
        return func(*args, **(kwargs or {}))


class Traced:
    """A function of fixed and varying tensors, traced for tensors of certain shapes and dtypes.

    Args:
        function: pure, of tensors only.
        fixed: examples of its fixed tensors.
        varying: examples of its varying ones.
        compile_functions: whether Inductor compiles the part that varies.

    Attributes:
        without_gradient: whether the function switched gradients off in a part, which its graph does not.
    """

    def __init__(
        self, function: Function, fixed: Sequence[Tensor], varying: Sequence[Tensor], compile_functions: bool
    ) -> None:
        count = len(fixed)

        def flat(*tensors: Tensor) -> list[Tensor]:
            return list(function(list(tensors[:count]), list(tensors[count:])))

        # Copies of the varying ones: a tensor that is an argument twice would be taken for one.
        copies = [tensor.clone() for tensor in varying]
        self._strides = [tensor.stride() for tensor in copies]
        with torch.enable_grad(), _Watch() as watch, _FixedShapes():  # type: ignore[no-untyped-call]
            # Autograd's formulas write to tensors of their own, as users may do: each write becomes a new tensor.
            traced = make_fx(torch.func.functionalize(flat), tracing_mode="real")(*fixed, *copies)
        self.without_gradient = watch.without_gradient
        simplify(traced.graph)
        _check(traced.graph)
        self.once, self.each = _split(traced, count)
        for copy in copies:
            copy.copy_(torch.linspace(-1, 1, copy.numel(), device=copy.device).reshape(copy.shape))
        _check_values(flat, [*fixed, *copies], lambda given: self.each(*self.once(*given[:count]), *given[count:]))
        self.compiled = compile_functions
        self._each: Callable[..., list[Tensor]] = CompiledGraph(self.each) if compile_functions else self.each

    def bind(self, fixed: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        """The function of the varying tensors alone, with what does not depend on them computed."""
        known = self.once(*fixed)
        return lambda varying: self._each(*known, *map(in_layout, self._strides, varying))


def in_layout(strides: tuple[int, ...], tensor: Tensor) -> Tensor:
    """A tensor in the layout for which a graph was traced."""
    return tensor if tensor.stride() == strides else tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def _check_values(function: Callable[..., Any], given: list[Tensor], graph: Callable[[list[Tensor]], Any]) -> None:
    """Raise where a graph does not give what its function gives."""
    for found, expected in zip(graph(given), function(*given), strict=True):
        known = torch.isfinite(expected) & torch.isfinite(found)
        apart = torch.where(known, found - expected, 0.0).double().norm()
        size = torch.where(torch.isfinite(expected), expected, 0.0).double().norm() + given[-1].double().norm()
        eps = 1e-5 if expected.is_cuda else torch.finfo(expected.dtype).eps  # TF32 may be in force
        if found.shape != expected.shape or apart > min(0.1, 1e4 * max(eps, torch.finfo(expected.dtype).eps)) * size:
            raise ValueError("the graph of its operations gives something else")


def _check(graph: fx.Graph) -> None:
    """Raise where a graph would not repeat its function faithfully."""
    literal = torch.ops.aten.lift_fresh_copy.default  # made by the function, torch.tensor(2.0) for instance
    for node in graph.nodes:
        if node.op == "get_attr" and any(user.target is not literal for user in node.users):
            raise ValueError("it reads a tensor that is neither a parameter, a buffer nor an input")
        if isinstance(node.target, torch._ops.OpOverload):
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                raise ValueError(f"it draws random numbers ({node.target})")
            if node.target._schema.is_mutable:
                raise ValueError(f"it writes to a tensor ({node.target})")


def _split(traced: fx.GraphModule, count: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The graph in two: of its first ``count`` arguments alone, and of what that gives and the other arguments."""
    *nodes, output = traced.graph.nodes
    inputs = [node for node in nodes if node.op == "placeholder"]
    varying = {*dependents(traced, inputs[count:]), output}
    crossing = [node for node in nodes if node not in varying and any(user in varying for user in node.users)]
    first = extract(traced, inputs[:count], crossing)
    return first, extract(traced, [*crossing, *inputs[count:]], output.args[0])


def dependents(traced: fx.GraphModule, sources: Sequence[fx.Node]) -> list[fx.Node]:
    """``sources``, and all nodes whose values depend on them, in their order."""
    found = dict.fromkeys(sources)
    for node in traced.graph.nodes:
        if any(source in found for source in node.all_input_nodes):
            found[node] = None
    return list(found)


def extract(traced: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Any) -> fx.GraphModule:
    """The part of a graph that computes ``outputs`` from the values of ``inputs``."""
    graph = fx.Graph()
    here = {node: graph.placeholder(f"given_{i}") for i, node in enumerate(inputs)}
    *nodes, _ = traced.graph.nodes  # without the output
    for node in nodes:
        if node.op != "placeholder" and node not in here and all(source in here for source in node.all_input_nodes):
            here[node] = graph.node_copy(node, here.__getitem__)
    graph.output(fx.node.map_arg(outputs, here.__getitem__))
    graph.eliminate_dead_code()
    return fx.GraphModule(traced, graph)
