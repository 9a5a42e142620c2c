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

import functools
import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from opteq._fast import settings
from opteq._triton import may_launch
from opteq.operators.choice import is_faster, is_known
from opteq.operators.narrow_plans import Plan, Sums, processors

# Tests set it, to run the kernels by Triton's interpreter on a CPU.
_interpreted = False
# Channels come in multiples of it, as memory is read in such pieces.
_STEP = 16
# Entries of a sample that a program takes at a time when it rounds them, and parts that a sample is cut into.
_BLOCK, _PARTS = 4096, 16
# The same where a program takes a whole sample.
_ALONE = 16384
# Weights of a row that are read at a time.
_ROW_BLOCK = 1024
# Operations below which a product takes little more than its launch; nothing is compiled for those.
_LEAST = 5 * 10**8
_refused: set[Hashable] = set()


class Convolution(Protocol):
    """What is asked of a convolution here: its weight, that of its products, and where it keeps what was made of it."""

    weight: Tensor
    rows: dict[Hashable, Rows]

    @property
    def acting(self) -> Tensor:
        """The weight in the precision of products."""
        ...


def narrow_dtype(linear: Convolution, v: Tensor, adjoint: bool = False) -> torch.dtype | None:
    """The 16-bit dtype in which ``v`` may be multiplied; None where it may not, or kernels can't be used."""
    if torch.is_grad_enabled():
        return None
    found = narrow_dtype_on_tape(linear.weight, v, adjoint)
    # A map that was made outside of a region with autocast has no rounded weight.
    return None if found is None or (v.dtype == found) != (linear.acting.dtype == found) else found


def narrow_dtype_on_tape(weight: Tensor, v: Tensor, adjoint: bool = False) -> torch.dtype | None:
    """The same for a convolution with a weight, which may be put on a tape by its caller."""
    if not (v.is_cuda or _interpreted) or weight.dtype != torch.float32 or v.ndim != 4:
        return None
    # Whose members under a transformation can't be asked for their layout, for one.
    if torch._C._are_functorch_transforms_active() or torch._C._functorch.is_legacy_batchedtensor(v):
        return None
    outputs, inputs = weight.shape[:2]
    if outputs % _STEP or inputs % _STEP or v.shape[1] != (outputs if adjoint else inputs):
        return None
    if 2 * v.numel() * weight.numel() < _LEAST * v.shape[1] or v.numel() == 0:
        return None
    if not (_interpreted or (may_launch(v, weight.detach()) and _has_kernels(v.device))):
        return None
    if not is_plain(v):
        return None
    if torch.is_autocast_enabled(v.device.type):
        dtype = torch.get_autocast_dtype(v.device.type)
        return dtype if v.dtype == dtype and dtype.itemsize == 2 else None
    return torch.float16 if v.dtype == torch.float32 and _may_round() else None


def is_plain(v: Tensor) -> bool:
    """Whether pictures are channels last, with the strides of their sizes even where those do not matter."""
    _, channels, height, width = v.shape
    return v.stride() == (channels * height * width, 1, width * channels, channels)


def _may_round() -> bool:
    """Whether convolutions of float32 may be computed in TF32."""
    if not torch.backends.cudnn.enabled:
        return False
    convolutions: Any = getattr(torch.backends.cudnn, "conv", None)
    if hasattr(convolutions, "fp32_precision"):  # torch 2.9, where reading the older flag may raise
        return bool(convolutions.fp32_precision == "tf32")
    return bool(torch.backends.cudnn.allow_tf32)


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    """Whether a device reads boxes of memory by itself, as NVIDIA's do since Hopper, and Triton knows about it."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor
    except ImportError:
        return False
    return hasattr(TensorDescriptor, "from_tensor")


def is_chosen(
    key: Hashable,
    v: Tensor,
    plain: Callable[[], Tensor],
    prepare: Callable[[], Callable[[], Tensor]],
    outside: bool = False,
) -> bool:
    """Whether the kernels are to be used now: while a graph is captured, where they are faster.

    Outside of captures the answer is no, and the two ways are tried for the captures to come.

    Args:
        key: what distinguishes the product.
        v: its argument.
        plain: the product by torch's operations.
        prepare: gives the same by the kernels.
        outside: whether they are to be used outside of captures, too, where they are faster.
    """
    if _interpreted:
        return True
    if key in _refused:
        return False
    if torch.cuda.is_current_stream_capturing():
        return is_faster(key)
    if not is_known(key):
        if not (settings.graphs or outside):  # no capture will come
            return False
        try:
            with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]  # whose time is measured
                is_faster(key, plain, prepare())
        except Exception as error:  # whatever a compiler may raise
            _refused.add(key)
            message = str(error).splitlines()[0] if str(error) else type(error).__name__
            warnings.warn(f"kernels for a convolution could not be used: {message}", stacklevel=2)
    return outside and is_faster(key)


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
            out = torch.empty(*rounded.shape[:3], len(rows.numbers), device=v.device)
            convolve(rounded, rows, out, tops, None if beside is None else as_beside(beside(), linear, v), then)
            return out.permute(0, 3, 1, 2)

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
            return summed(u, sizes(u), *rounded_with_sizes(narrow, v), taps, plan)

    return quick() if is_chosen(key, v, plain, lambda: quick) else plain()


def summed(u: Tensor, tops_u: Tensor, rounded: Tensor, tops: Tensor, taps: Sequence[int], plan: Sums) -> Tensor:
    """The derivative of ``<A v, u>`` by the weight of A, where v is rounded already.

    It is a sum over samples: the scales of u are such that their products with those of v are the same for all.
    """
    own, total = balanced(tops_u, tops)
    return correlated(rounded_by(rounded.dtype, u, own), total[0], rounded, total[1], taps, plan)


def correlated(
    left: Tensor, top_left: Tensor, right: Tensor, top_right: Tensor, taps: Sequence[int], plan: Sums
) -> Tensor:
    """``(rows, columns, *taps)``: the sum over all pixels of ``left`` times ``right`` one tap away, unscaled."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from opteq.operators import narrow_kernels as kernels

    (high, wide), count, channels = taps, left.shape[3], right.shape[3]
    parts = torch.empty(plan.parts, count, high, wide, channels, device=left.device)
    tiles, sides = -(-count // plan.tile), -(-channels // plan.side)
    kernels.correlate[(high * wide * tiles * sides, plan.parts)](
        TensorDescriptor.from_tensor(left.flatten(0, 2), [math.prod(plan.box), plan.tile]),
        TensorDescriptor.from_tensor(right, [*plan.box, plan.side]),
        parts, top_left, top_right, plan.boxes, -(-plan.boxes // plan.parts), left.shape[1] // plan.box[1], tiles,
        sides, ROWS=count, COLUMNS=channels, TAPS_HIGH=high, TAPS_WIDE=wide, SAMPLES=plan.box[0], HIGH=plan.box[1],
        WIDE=plan.box[2], TILE=plan.tile, SIDE=plan.side, STAGES=plan.stages,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return parts.sum(dim=0).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Rows:
    """The weights of a convolution or of its adjoint, row by row, as kernels read them.

    Attributes:
        numbers: ``(rows, taps * columns)``.
        inverses: what undoes the scale of every row.
        sums: of the sizes of every row's weights.
        taps: height and width of the kernel.
        scaled: whether there are scales; else the two before mean nothing.
    """

    numbers: Tensor
    inverses: Tensor
    sums: Tensor
    taps: tuple[int, int]
    scaled: bool

    @classmethod
    def of(cls, linear: Convolution, narrow: torch.dtype, adjoint: bool) -> Rows:
        """Those of ``linear``, which keeps them for the rest of a capture."""
        key = narrow, adjoint, linear.acting.dtype
        made = linear.rows.get(key)
        if made is None:
            made = cls._made(linear, narrow, adjoint)
            if settings.keeping and settings.recording:
                linear.rows[key] = made
        return made

    @classmethod
    def _made(cls, linear: Convolution, narrow: torch.dtype, adjoint: bool) -> Rows:
        from opteq.operators import narrow_kernels as kernels

        weight = linear.acting.detach()
        scaled = weight.dtype == torch.float32
        outputs, inputs, high, wide = weight.shape
        by_output, by_input, by_tap, by_side = weight.stride()
        rows, columns, start, strides = outputs, inputs, 0, (by_output, by_input, by_tap, by_side)
        if adjoint:  # the convolution with the weight turned by half a circle, its channels exchanged
            rows, columns, start = inputs, outputs, (high - 1) * by_tap + (wide - 1) * by_side
            strides = (by_input, by_output, -by_tap, -by_side)
        numbers = torch.empty(rows, high * wide * columns, dtype=narrow, device=weight.device)
        inverses, sums = torch.empty(2, rows, device=weight.device)
        kernels.weights[(rows,)](
            weight, numbers, inverses, sums, start, *strides, COLUMNS=columns, TAPS=high * wide, WIDTH=wide,
            BLOCK=_ROW_BLOCK, SCALED=scaled, num_warps=4,
        )  # fmt: skip
        return cls(numbers, inverses, sums, (high, wide), scaled)


def rounded_to(
    narrow: torch.dtype, v: Tensor, offset: Tensor | None = None, gain: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Pictures ``(batch, height, width, channels)`` in 16 bits, scaled if they were in float32.

    Then there is, for every sample, the size of its largest entry; and, with ``offset`` and ``gain``, behind these
    ``offset + gain * size``.
    """
    from opteq.operators import narrow_kernels as kernels

    if v.dtype == narrow:
        return v.permute(0, 2, 3, 1), None
    batch, bounded = len(v), offset is not None
    tops = torch.empty((2 if bounded else 1) * batch, device=v.device)
    first, second = (tops if given is None else given for given in (offset, gain))
    if 2 * batch < processors(v.device):
        return _rounded(narrow, v, _sizes_of_parts(v), tops, first, second, bounded), tops
    out = _like(v, narrow)
    kernels.narrow_alone[(batch,)](
        v, first, second, out, tops, v[0].numel(), batch, BLOCK=_ALONE, BOUNDED=bounded, num_warps=_ALONE // 512
    )
    return out, tops


def rounded_with_sizes(narrow: torch.dtype, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same for pictures in float32."""
    rounded, tops = rounded_to(narrow, v)
    assert tops is not None
    return rounded, tops


def rounded_by(narrow: torch.dtype, v: Tensor, tops: Tensor, rectify: bool = False) -> Tensor:
    """The same by known sizes of every sample; or of the positive part, which is then taken."""
    return _rounded(narrow, v, tops, tops, tops, tops, rectify=rectify)


def balanced(tops_left: Tensor, tops_right: Tensor) -> tuple[Tensor, Tensor]:
    """Sizes by which to round what is summed up with pictures that have a scale for every sample, and one for the sum.

    The two scales of a sample have the same product for all samples then.
    """
    from opteq.operators import narrow_kernels as kernels

    sizes, total = torch.empty_like(tops_left), torch.empty(2, device=tops_left.device)
    padded = 1 << (len(sizes) - 1).bit_length()
    kernels.balance[(1,)](tops_left, tops_right, sizes, total, len(sizes), PADDED=padded, num_warps=4)
    return sizes, total


def _rounded(
    narrow: torch.dtype,
    v: Tensor,
    sizes: Tensor,
    tops: Tensor,
    offset: Tensor,
    gain: Tensor,
    bounded: bool = False,
    rectify: bool = False,
) -> Tensor:
    """By sizes ``(batch, parts)``, which are told then; or ``(batch,)``."""
    from opteq.operators import narrow_kernels as kernels

    out = _like(v, narrow)
    count = sizes.shape[1] if sizes.ndim == 2 else 1
    kernels.narrow[(len(v), _PARTS)](
        v, sizes, offset, gain, out, tops, v[0].numel(), count, len(v), BLOCK=_BLOCK,
        PARTS=_PARTS, COUNT=count, RECTIFY=rectify, TOLD=sizes.ndim == 2, BOUNDED=bounded, num_warps=8,
    )  # fmt: skip
    return out


def _like(v: Tensor, dtype: torch.dtype) -> Tensor:
    batch, channels, height, width = v.shape
    return torch.empty(batch, height, width, channels, dtype=dtype, device=v.device)


def sizes(v: Tensor, positive: bool = False) -> Tensor:
    """For every sample the size of its largest entry, or of its largest positive one."""
    return _sizes_of_parts(v, positive).amax(dim=1)


def _sizes_of_parts(v: Tensor, positive: bool = False) -> Tensor:
    from opteq.operators import narrow_kernels as kernels

    parts = torch.empty(len(v), _PARTS, device=v.device)
    kernels.largest[(len(v), _PARTS)](
        v, parts, v[0].numel(), BLOCK=_BLOCK, PARTS=_PARTS, POSITIVE=positive, num_warps=8
    )
    return parts


def convolve(
    source: Tensor,
    rows: Rows,
    out: Tensor,
    tops: Tensor | None = None,
    beside: Tensor | None = None,
    then: str = "nothing",
    rescaled: bool = False,
) -> None:
    """A convolution of ``source (batch, height, width, channels)``, written to ``out``.

    Args:
        source: in 16 bits.
        rows: the weights.
        out: of the same batch and size.
        tops: size of the largest entry of every sample of ``source``, which tells its scale; None without scales.
        beside: what the result is joined with, in the layout of ``out``.
        then: ``"nothing"``; ``"rectify"``, the positive part of the sum with ``beside``; ``"weigh"``, the product;
            ``"shift"``, the sum with ``beside (channels,)``.
        rescaled: whether ``out`` is scaled, by bounds of its entries that stand behind ``tops``.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    from opteq.operators import narrow_kernels as kernels

    batch, height, width, columns = source.shape
    count = len(rows.numbers)
    plan = Plan.of(batch, height, width, columns, count, processors(source.device))
    box, depth = plan.box, plan.depth
    kernels.convolve[(plan.boxes, plan.tiles)](
        TensorDescriptor.from_tensor(source, [*box, depth]),
        TensorDescriptor.from_tensor(rows.numbers, [plan.tile, depth]),
        TensorDescriptor.from_tensor(out, [*box, plan.tile]),
        rows.inverses if beside is None else beside, rows.inverses, rows.inverses if tops is None else tops,
        batch, height, width, -(-height // box[1]), -(-width // box[2]),
        COLUMNS=columns, ROWS=count, TAPS_HIGH=rows.taps[0], TAPS_WIDE=rows.taps[1],
        SAMPLES=box[0], HIGH=box[1], WIDE=box[2], TILE=plan.tile, DEPTH=depth, STAGES=plan.stages,
        THEN=then, SCALED=tops is not None, RESCALED=rescaled,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
