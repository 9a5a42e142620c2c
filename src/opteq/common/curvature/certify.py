"""Bounds on the Hessian of an objective, and what follows from them, from the code that computes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import copy
from math import inf
from typing import Any

import torch
from torch import Tensor

from opteq.common.curvature.arithmetic import SOME, NotKnown, is_kind, sum_above, sum_below, unknowns
from opteq.common.curvature.bounds import Affine, Bent, Bounds, Given, Image, Input

Terms = Callable[[Any, Any], Mapping[str, Any]]


def curvature_of_terms(terms: Terms, start: Any) -> tuple[float, float, float]:
    """Bounds of the Hessian by y of a sum of terms, least and largest, and of its mixed derivative by y and x.

    Args:
        terms: as in :class:`opteq.Objective`.
        start: what has the shape of y, as :func:`start_for` gives it.

    Raises:
        NotKnown: where the code does something else than :mod:`opteq.common.curvature.bounds` lists.
    """
    met: list[NotKnown] = []
    token = unknowns.set(met)
    try:
        like = start if is_kind(start, Image) else None
        same = is_kind(start, Input) or (like is not None and like.operator is None)
        with torch.enable_grad():
            values = _values(terms, Affine(like_x=same, like=like))
    except NotKnown:
        raise
    except Exception as error:  # a user's code that was not made for what it got here
        raise met[0] if met else NotKnown(f"it needs tensors: {error}") from error
    finally:
        unknowns.reset(token)
    if met:  # and the code went on without it
        raise met[0]
    bent = [value for value in values if is_kind(value, Bent)]
    bent += [Bent(0.0, 0.0, inf) for value in values if is_kind(value, Affine) and value.given == inf]  # y' A(x), maybe
    if not all(is_kind(value, Bounds, Tensor) for value in values):
        raise NotKnown("a term is no tensor")
    return sum_below([b.low for b in bent]), sum_above([b.high for b in bent]), sum_above([b.mixed for b in bent])


def _values(terms: Terms, y: Affine) -> list[Any]:
    """The terms for y and an input; for one of n tensors where the code begins with ``a, b = x``."""
    x = Input()
    try:
        values = list(terms(y, x).values())
    except ValueError as error:
        parts = re.search(r"too many values to unpack \(expected (\d+)", str(error))
        if parts is None or not x.apart:
            raise
        return list(terms(y, Input(int(parts[1]))).values())
    if x.apart:
        raise NotKnown("it takes the input apart by a loop or a function (x[0] and unpacking can be followed)")
    return values


def start_for(problem: Any, usual: Any) -> Any:
    """What ``problem.start(x)`` returns: an :class:`Input` or an :class:`Image`, or else of unknown shape.

    ``usual`` is the method that returns zeros like x.
    """
    if getattr(problem.start, "__func__", None) is usual:  # an object may have its own
        return Input()
    try:
        return without_memory(problem).start(Input())
    except Exception:  # a user's code that was not made for what it got here
        return None


def without_memory(problem: Any) -> Any:
    """A copy to be called with stand-ins for tensors: what its functions keep stays with the copy.

    Tensors that are neither parameters nor buffers may come from an earlier input, and count as that.
    """
    other = copy(problem)
    vars(other).update({name: Given() for name, value in vars(other).items() if is_kind(value, Tensor)})
    return other


def certify_objective(terms: Terms, start: Any, returns_state: bool, curvature: Any) -> dict[str, Any]:
    """Fields of a certificate for the minimiser of a sum of terms and a convex penalty.

    Args:
        terms: as in :class:`opteq.Objective`.
        start: as in :func:`curvature_of_terms`.
        returns_state: whether the layer returns y.
        curvature: as in :class:`opteq.Objective`.
    """
    names = ("exists", "unique", "contraction", "lipschitz")
    try:
        least, most, mixed = curvature_of_terms(terms, start)
    except NotKnown as reason:
        return {"reasons": dict.fromkeys(names, f"nothing is known about terms(y, x): {reason}")}
    if least == inf:
        raise OverflowError("the bound of the terms' Hessian overflows")
    if not least > 0:
        why = f"the terms are not known to be strongly convex: their Hessian lies above {least:.4g}"
        return {"reasons": dict.fromkeys(names, why)}
    if least < SOME**0.5:  # what stands for it may have been multiplied
        why = "the terms are strongly convex, by how much depends on the number of entries that a mean is taken of"
        return {"exists": True, "unique": True, "reasons": dict.fromkeys(names, why)}
    strong = f"the terms are {least:.4g}-strongly convex: their Hessian lies in [{least:.4g}, {most:.4g}]"
    safe = isinstance(curvature, int | float) and curvature >= most
    step = f"a step of length 1/{curvature}" if safe else "the step length is measured, or not known to be short enough"
    moves = mixed < inf and returns_state
    slope = f"the gradient moves by {mixed:.4g} times as much as x" if moves else "how y moves with x is not known"
    return {
        "exists": True, "unique": True,
        "contraction": 1 - least / curvature if safe else None,
        "lipschitz": mixed / least if moves else None,
        "reasons": dict(zip(names, (strong, strong, step, slope), strict=True)),
    }  # fmt: skip


def certify_smooth_part(
    terms: Terms, start: Any, returns_state: bool, steepness: float
) -> tuple[bool, float | None, float | None, str]:
    """Of ``G = f + 1/2 |y|^2 + g``: whether it is strongly convex, bounds of its step's and its minimiser's Lipschitz
    constant or None, and the reason. ``terms`` are g's, ``steepness`` is the largest slope of the activation.
    """
    try:
        low, high, mixed = curvature_of_terms(terms, start)
    except NotKnown as reason:
        return False, None, None, f"nothing is known about smooth(y, x): {reason}"
    why, contraction = f"the Hessian of g lies in [{low:.4g}, {high:.4g}]", steepness * max(abs(low), abs(high))
    lipschitz = steepness * mixed / (1 - contraction) if contraction < 1 and mixed < inf and returns_state else None
    return low > -1 and steepness <= 1, contraction if contraction < inf else None, lipschitz, why
