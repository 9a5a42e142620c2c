"""Convolutions by products of 16 bits.

Where products of float32 may be those of TF32, halves times a power of two serve as well: they have the same 11
significant bits, rounded the same way and at the same places as TF32 does it, so that results are as exact; and tensor
cores take half the time for them. Nothing can become too large: a scale follows from the largest entry of a sample or,
between two convolutions, from a bound of it. What is too small for halves then, by a factor of 2^27 and more, loses
some of its bits, and from 2^38 on all of them, where TF32 would have kept them. The rounding of large entries hides
that, unless they meet zeros on their way: one entry of 1e9 among others of size one, and a weight of zero for it. (The
bound is the largest sum of a row's weights times the largest entry, which may be far above what is attained.)

Under autocast, products have its dtype, as they would have anyway. The kernels
(:mod:`opteq.operators.narrow_kernels`) are launched by captured solves, where launches cost nothing, and for large
input terms (:mod:`opteq.operators.narrow_layer`); in both where they were faster than torch's when both were tried.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opteq.operators.narrow_choice import is_chosen, is_plain, narrow_dtype
from opteq.operators.narrow_plans import Sums, processors
from opteq.operators.narrow_products import Convolution, Rows, balanced_sum, convolve
from opteq.operators.narrow_rounding import rounded_to, rounded_with_sizes, sizes


def product(linear: Convolution, v: Tensor, adjoint: bool, plain: Callable[[], Tensor]) -> Tensor:
    """``A v``, or ``A' v``: by halves in place of TF32 where that is faster, else ``plain``."""
    return _alone(linear, v, adjoint, None, plain)


def rectified(linear: Convolution, v: Tensor, c: Tensor, plain: Callable[[], Tensor]) -> Tensor:
    """``relu(A v + c)``, likewise."""
    same = c.dtype == v.dtype and c.shape == (len(v), linear.weight.shape[0], *v.shape[2:])
    return _alone(linear, v, False, lambda: c, plain, "rectify") if same else plain()


def weighed(linear: Convolution, v: Tensor, diagonal: Callable[[], Tensor], plain: Callable[[], Tensor]) -> Tensor:
    """``d * (A v)``, likewise."""
    return _alone(linear, v, False, diagonal, plain, "weigh")


def as_beside(tensor: Tensor, linear: Convolution, v: Tensor) -> Tensor:
    """What is joined with a product of ``v``, as kernels read it."""
    tensor = tensor.expand(len(v), linear.weight.shape[0], *v.shape[2:])
    if not is_plain(tensor):
        tensor = tensor.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _alone(
    linear: Convolution,
    v: Tensor,
    adjoint: bool,
    beside: Callable[[], Tensor] | None,
    plain: Callable[[], Tensor],
    then: str = "nothing",
) -> Tensor:
    narrow = narrow_dtype(linear, v, adjoint)
    if narrow is None or v.dtype != torch.float32:  # torch's own kernels for 16 bits are good
        return plain()
    key = ("narrow", v.shape, adjoint, then, linear.weight.shape, linear.weight.stride(), v.device)

    def quick() -> Tensor:
        with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]  # kernels run on the current device
            rows = Rows.of(linear, narrow, adjoint)
            rounded, tops = rounded_to(narrow, v)
            joined = None if beside is None else as_beside(beside(), linear, v)
            return convolve(rounded, rows, v.dtype, tops, joined, then)

    return quick() if is_chosen(key, v, plain, lambda: quick) else plain()


def by_weight(linear: Convolution, v: Tensor, u: Tensor, plain: Callable[[], Tensor]) -> Tensor:
    """The derivative of ``<A v, u>`` by the weight of A, likewise."""
    narrow = narrow_dtype(linear, v)
    count, _, *taps = linear.weight.shape
    same = u.dtype == v.dtype == torch.float32 and u.shape == (len(v), count, *v.shape[2:])
    if narrow is None or not same or torch._C._functorch.is_legacy_batchedtensor(u) or not is_plain(u):
        return plain()
    plan = Sums.of(*v.shape, count, taps[0] * taps[1], processors(v.device))
    if plan is None:
        return plain()
    key = ("narrow, by weight", v.shape, linear.weight.shape, v.device)

    def quick() -> Tensor:
        with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]  # kernels run on the current device
            return balanced_sum(u, sizes(u), *rounded_with_sizes(narrow, v), taps, plan)

    return quick() if is_chosen(key, v, plain, lambda: quick) else plain()
