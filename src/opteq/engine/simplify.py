"""Simplify a traced graph: propagate constants, and drop unused operations.

The cotangent of a sum is the same number everywhere. Autograd multiplies by it, entry by entry, and asks the sum for
its shape, which keeps the sum alive. Here a tensor whose entries are all one known number is that number.

The gradient of a convolution by its input is a convolution that does not depend on the input. Torch's operation for it
takes the input all the same, and its second derivative also computes a gradient of the weight. A transposed convolution
without strides is a convolution with the flipped weight, which a GPU computes faster.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_SHAPES = {
    aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.select.int, aten.clone.default, aten.permute.default, aten.transpose.int, aten.alias.default,
    aten.detach.default,
}  # fmt: skip
"""Operations that rearrange entries."""

_LINEAR = {aten.convolution.default, aten.mm.default, aten.bmm.default}
"""Operations that are linear in their first argument, a convolution where it has no bias."""

FEW_CHANNELS = 8
"""With fewer output channels cuDNN's convolutions are slower than its transposed ones."""

_LIKE = {aten.ones_like.default: 1.0, aten.zeros_like.default: 0.0}


def simplify(graph: fx.Graph) -> None:
    """Simplify a graph of aten operations in place."""
    for node in list(graph.nodes):
        if node.target is getitem and node.args[1] == 0 and node.args[0].target is aten.convolution_backward.default:
            made = _gradient_by_input(graph, node)
            node.replace_all_uses_with(node if made is None else made)
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.target is aten.convolution.default and node.args[6]:
            _flip(graph, node)
    numbers: dict[fx.Node, float] = {}
    for node in list(graph.nodes):
        if (number := _number(node, numbers)) is not None:
            numbers[node] = number
            continue
        if (replacement := _replacement(graph, node, numbers)) is not None:
            node.replace_all_uses_with(replacement)
            replacement.meta.setdefault("val", node.meta.get("val"))
            graph.erase_node(node)  # it is no user of its arguments any more
    for node, number in numbers.items():
        value = node.meta.get("val")
        if node.users and isinstance(value, torch.Tensor):
            form = {"dtype": value.dtype, "device": value.device}
            node.replace_all_uses_with(_call(graph, node, aten.full.default, (list(value.shape), number), form))
    graph.eliminate_dead_code()


def _number(node: fx.Node, numbers: dict[fx.Node, float]) -> float | None:
    """The number that all entries of a node's value are; None where they differ or are not known."""
    if node.op != "call_function":
        return None
    if node.target in _LIKE:
        return _LIKE[node.target]
    first = numbers.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == 0:
        return 1.0
    if first is None:
        return None
    if node.target in _SHAPES or node.target is aten._to_copy.default:
        return first
    if node.target is aten.neg.default:
        return -first
    if node.target in (aten.mul.Tensor, aten.mul.Scalar):
        other = numbers.get(node.args[1]) if isinstance(node.args[1], fx.Node) else node.args[1]
        return None if not isinstance(other, int | float) else first * other
    return None


def _replacement(graph: fx.Graph, node: fx.Node, numbers: dict[fx.Node, float]) -> fx.Node | None:
    """A node with the same value that takes less to compute; None where there is none."""
    value: Any = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == 1 and isinstance(node.args[0], fx.Node):
        return node.args[0]
    if node.target in (aten.mul.Tensor, aten.mul.Scalar):
        return _product(graph, node, numbers)
    if node.target is aten.neg.default and isinstance(node.args[0], fx.Node):
        return _scaled(graph, node, node.args[0], -1.0)
    if node.target is aten._to_copy.default:
        return _round_trip(graph, node)
    return _negated_later(graph, node)


def _gradient_by_input(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The gradient of a convolution by its input, as a convolution; None where none has its size."""
    source: Any = node.args[0]
    incoming, image, weight, _, *geometry, transposed, _, groups, _ = source.args
    sizes = [each.meta["val"].shape[2:] for each in (image, incoming, weight)]
    more = [0] * len(geometry[0])
    for i, (n, m, k, stride, padding, dilation) in enumerate(zip(*sizes, *geometry, strict=True)):
        reach = dilation * (k - 1) + 1 - 2 * padding
        if not transposed:  # what a stride does not reach
            more[i] = n - (m - 1) * stride - reach
        elif (m - reach) // stride + 1 != n:  # an output padding of a stride or more
            return None
    arguments = (incoming, weight, None, *geometry, not transposed, more, groups)
    return _call(graph, node, aten.convolution.default, arguments)


def _flip(graph: fx.Graph, node: fx.Node) -> None:
    """Compute a transposed convolution without strides by the flipped weight."""
    image, weight, bias, stride, padding, dilation, _, more, groups = node.args
    value: Any = weight.meta["val"]  # type: ignore[union-attr]
    kernel, dims = value.shape[2:], list(range(2, value.ndim))
    rest = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]  # type: ignore[arg-type]
    if {*stride} != {1} or any(more) or groups != 1 or min(rest) < 0 or value.shape[1] < FEW_CHANNELS:  # type: ignore
        return
    result: Any = node.meta["val"]  # whose layout stays: views of it are recorded
    wide = value.ndim == 4 and not result.is_contiguous()
    form: dict[str, Any] = {"memory_format": torch.channels_last if wide else torch.contiguous_format}
    with graph.inserting_before(node):
        flipped = graph.call_function(aten.flip.default, (weight, dims))
        flipped = graph.call_function(aten.transpose.int, (flipped, 0, 1))
        flipped = graph.call_function(aten.clone.default, (flipped,), form)
    flipped.meta["val"] = value.transpose(0, 1)
    node.args = (image, flipped, bias, stride, rest, dilation, False, more, groups)


def _negated_later(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A sum or a product of what was negated, negated itself: signs meet further on, and go. Not a digit changes."""
    one, other = map(_negated, (*node.args, None, None)[:2])
    if node.target is aten.add.Tensor and not node.kwargs and one is not None and other is not None:
        made = _call(graph, node, aten.add.Tensor, (one, other))
    elif node.target in _LINEAR and one is not None and (len(node.args) < 3 or node.args[2] is None):
        made = _call(graph, node, node.target, (one, *node.args[1:]), node.kwargs)
    else:
        return None
    return _scaled(graph, node, made, -1.0)


def _negated(value: Any) -> fx.Node | None:
    """What was negated to give a value that is used once."""
    if not isinstance(value, fx.Node) or value.target is not aten.mul.Scalar or len(value.users) != 1:
        return None
    source, factor = value.args
    return source if factor == -1 and isinstance(source, fx.Node) and _same_form(source, value) else None


def _round_trip(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A product by a number in float32 of what has 16 bits, and is rounded to them again: the product itself.

    Autocast takes squares and sums to float32. Products of 16 bits are computed in float32 and rounded anyway.
    """
    widened: Any = node.args[0]
    factor: Any = 1.0
    if isinstance(widened, fx.Node) and widened.target is aten.mul.Scalar:
        widened, factor = widened.args
    if not isinstance(widened, fx.Node) or widened.target is not aten._to_copy.default:
        return None
    source, between = widened.args[0], widened.meta.get("val")
    if not isinstance(source, fx.Node) or not _same_form(source, node) or not isinstance(between, torch.Tensor):
        return None
    if torch.finfo(between.dtype).eps > torch.finfo(node.meta["val"].dtype).eps or between.dtype == torch.float64:
        return None
    return _scaled(graph, node, source, float(factor))


def _product(graph: fx.Graph, node: fx.Node, numbers: dict[fx.Node, float]) -> fx.Node | None:
    left, right = node.args
    for tensor, other in ((left, right), (right, left)):
        number: Any = numbers.get(other) if isinstance(other, fx.Node) else other
        if isinstance(tensor, fx.Node) and isinstance(number, int | float) and _same_form(tensor, node):
            return _scaled(graph, node, tensor, float(number))
    return None


def _scaled(graph: fx.Graph, node: fx.Node, tensor: fx.Node, number: float) -> fx.Node:
    """``number * tensor``, with a factor that the tensor was multiplied by before."""
    source, factor = tensor, number
    if tensor.target is aten.mul.Scalar and isinstance(tensor.args[0], fx.Node) and len(tensor.users) == 1:
        assert isinstance(tensor.args[1], int | float)
        source, factor = tensor.args[0], number * tensor.args[1]
    if factor == 1 and _same_form(source, node):
        return source
    return _call(graph, node, aten.mul.Scalar, (source, factor))


def _call(graph: fx.Graph, node: fx.Node, target: Any, arguments: tuple[Any, ...], options: Any = None) -> fx.Node:
    """A call before a node, whose value has the form of the node's."""
    with graph.inserting_before(node):
        made = graph.call_function(target, arguments, options)
    made.meta["val"] = node.meta.get("val")
    return made


def _same_form(tensor: fx.Node, node: fx.Node) -> bool:
    """Whether two nodes have values of one shape and dtype."""
    one: Any = tensor.meta.get("val")
    other: Any = node.meta.get("val")
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return bool(tensors and one.shape == other.shape and one.dtype == other.dtype)
