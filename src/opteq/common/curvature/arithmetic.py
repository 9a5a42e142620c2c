"""Numbers and names for :mod:`opteq.common.curvature.bounds`, and what it says where nothing is known."""

from __future__ import annotations

from contextvars import ContextVar
from itertools import combinations
from math import inf, isfinite, prod
from typing import Any

import torch
from torch import Tensor

unknowns: ContextVar[list[NotKnown]] = ContextVar("unknowns")
"""All that was met, also where a user's code has caught it."""


class NotKnown(Exception):  # noqa: N818 - not an error: nothing follows from the code
    """The function does something whose curvature is not known."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        unknowns.get([]).append(self)


NAMES = {
    "add": "__add__", "radd": "__add__", "sub": "__sub__", "subtract": "__sub__", "rsub": "__rsub__", "mul": "__mul__",
    "rmul": "__mul__", "multiply": "__mul__", "div": "__truediv__", "truediv": "__truediv__", "neg": "__neg__",
    "negative": "__neg__", "pow": "__pow__", "square": "_square", "sum": "_sum", "mean": "_mean", "flatten": "_flatten",
    "getitem": "__getitem__", "diff": "_diff", "sqrt": "_sqrt", "softplus": "_softplus", "logsumexp": "_logsumexp",
    "linear": "_linear", "conv1d": "_linear", "conv2d": "_linear", "conv3d": "_linear", "conv_transpose2d": "_linear",
    "matmul": "_matmul", "rmatmul": "_rmatmul", "cumsum": "_cumsum", "pad": "_pad", "roll": "_roll", "flip": "_roll",
    **dict.fromkeys(("reshape", "view", "unflatten", "unsqueeze", "squeeze", "permute", "transpose"), "_reshape"),
}  # fmt: skip
CURVES = {
    "exp": (0.0, inf), "cosh": (1.0, inf), "log_sigmoid": (-0.25, 0.0), "sin": (-1.0, 1.0), "cos": (-1.0, 1.0),
    "sigmoid": (-0.0963, 0.0963), "tanh": (-0.7699, 0.7699),
}  # fmt: skip
"""Functions of every entry, without options: where their second derivatives lie."""
LOSSES = ("mse_loss", "huber_loss", "smooth_l1_loss")
"""Losses of a difference whose second derivatives lie in [0, 2], or in [0, 1 / beta]."""
ARITHMETIC = ("add", "sub", "subtract", "mul", "multiply", "div", "neg", "negative", "pow", "square")
SOME = 1e-200
"""Stands for a positive number that depends on how many entries there are."""
_ROUNDING = 1e-14
"""Relative error of a sum and of what it is made of, with room."""
_SMALL = 512
"""Channels, or rows of a matrix, up to which a norm is computed exactly."""
SWAPPED = {
    "add": "add", "sub": "rsub", "subtract": "rsub", "mul": "mul", "multiply": "mul", "rsub": "sub",
    "matmul": "rmatmul",
}  # fmt: skip
"""Functions of two values by what they are with these the other way round."""


def is_kind(value: Any, *kinds: type) -> bool:
    """isinstance, by the type itself."""
    return issubclass(type(value), kinds)


def changes_in_place(name: str) -> bool:
    """Whether a function of torch of that name, or an operator such as ``+=``, writes to its first argument."""
    return name.startswith(("__set", "__i")) or (name.endswith("_") and not name.endswith("__"))


def sum_below(parts: list[float]) -> float:
    """A lower bound of the sum; where parts cancel each other, rounding may be all that is left."""
    if -inf in parts:
        return -inf
    return sum(parts) - (_ROUNDING * sum(map(abs, parts)) if min(parts, default=0.0) < 0 < max(parts) else 0.0)


def sum_above(parts: list[float]) -> float:
    """An upper bound of the sum, rounding included."""
    return -sum_below([-part for part in parts])


def check_within_samples(dim: Any) -> None:
    """Refuse the first dimension, and all of them."""
    if dim is None or 0 in (dim if isinstance(dim, list | tuple) else (dim,)):
        raise NotKnown("it joins samples of the batch")


def left_out(parts: tuple[Any, ...]) -> frozenset[tuple[int, int]] | None:
    """How many entries slices like ``1:`` and ``:-1`` leave out, by dimension, counted from the end after ``...``."""
    found = set[tuple[int, int]]()
    for place, part in enumerate(parts):
        if part is ... and place == 0:
            continue
        if not isinstance(part, slice) or part.step is not None:
            return None
        begin, end = part.start or 0, -part.stop if part.stop is not None else 0
        if begin < 0 or end < 0 or part.stop == 0:
            return None
        if begin or end:
            found.add((place - len(parts) if parts[0] is ... else place, begin + end))
    return frozenset(found)


def as_number(value: Any) -> float | None:
    """A number, or a tensor of one entry; None for anything else."""
    value = value.detach() if is_kind(value, Tensor) and value.numel() == 1 else value
    if not is_kind(value, int, float, Tensor) or (is_kind(value, Tensor) and value.numel() != 1):
        return None
    if not isfinite(number := float(value)):
        raise NotKnown("it uses a number that is not finite")
    return number


def largest_norm(weight: Tensor) -> float:
    """An upper bound of the norm of a matrix, or of a convolution of any stride: the sum over places of its kernel."""
    if weight.is_meta:
        return inf
    matrices = weight.reshape(*weight.shape[:2], -1).movedim(2, 0) if weight.ndim > 1 else weight[None, None]
    return float(_norms(matrices).sum())


def contraction_norm(weight: Tensor, of_weight: str, of_y: str, out: str) -> float:
    """An upper bound of the norm of ``y -> einsum(weight, y)`` with these indices."""
    if weight.is_meta or "*" in of_weight or len({*of_weight}) < len(of_weight) or {*of_y} - {*of_weight} - {*out}:
        return inf
    shared = [index for index in of_weight if index in of_y]
    # One entry of the weight stands for all of y's along an index, which are then summed.
    if any(weight.shape[of_weight.index(index)] == 1 and index not in out for index in shared):
        return inf
    # And y may have one entry along some of them, which is repeated.
    repeated = [alone for count in range(len(shared) + 1) for alone in combinations(shared, count)]
    return max(_contraction_norm(weight, of_weight, {*of_y} - {*alone}, out) for alone in repeated)


def _contraction_norm(weight: Tensor, of_weight: str, of_y: set[str], out: str) -> float:
    kinds = [[k for k in of_weight if (k in of_y, k in out) == kind] for kind in ((1, 1), (1, 0), (0, 1), (0, 0))]
    places = [[of_weight.index(index) for index in kind] for kind in kinds]
    ordered = weight.detach().to("cpu", torch.float64).permute([place for kind in places for place in kind])
    sizes = [prod(weight.shape[place] for place in kind) for kind in places]
    return float(_norms(ordered.reshape(sizes).sum(3)).amax())  # of blocks, one for each index that y and out share


def _norms(matrices: Tensor) -> Tensor:
    exact = min(matrices.shape[1:]) <= _SMALL
    found: Tensor = torch.linalg.matrix_norm(matrices.detach().to("cpu", torch.float64), 2 if exact else "fro")
    return found * (1 + _ROUNDING * matrices.numel())


def times(one: float, other: float) -> float:
    """A product in which zero times infinity is zero."""
    return 0.0 if one == 0 or other == 0 else one * other
