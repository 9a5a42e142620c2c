"""The products of :mod:`opteq.operators.narrow`, with everything rounded: convolutions, and derivatives by weights."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from opteq._fast import settings
from opteq.operators.narrow_plans import Plan, Sums, processors
from opteq.operators.narrow_rounding import balanced, divided, rounded_by, sizes

# Weights of a row that are read at a time.
_ROW_BLOCK = 1024


class Convolution(Protocol):
    """What is asked of a convolution here: its weight, that of its products, and where it keeps what was made of it."""

    weight: Tensor
    rows: dict[Hashable, Rows]

    @property
    def acting(self) -> Tensor:
        """The weight in the precision of products."""
        ...


@dataclass(frozen=True)
class Rows:
    """The weights of a convolution or of its adjoint, row by row, as kernels read them.

    Attributes:
        numbers: ``(rows, taps * columns)``; where they are fine, with three columns for one: halves twice, and what is
            left of them.
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
    def of(cls, linear: Convolution, narrow: torch.dtype, adjoint: bool, fine: bool = False) -> Rows:
        """Those of ``linear``, which keeps them for the rest of a capture."""
        key = narrow, adjoint, linear.acting.dtype, fine
        made = linear.rows.get(key)
        if made is None:
            made = cls._made(linear, narrow, adjoint, fine)
            if settings.keeping and settings.recording:
                linear.rows[key] = made
        return made

    @classmethod
    def _made(cls, linear: Convolution, narrow: torch.dtype, adjoint: bool, fine: bool) -> Rows:
        from opteq.operators import narrow_kernels as kernels

        weight = linear.acting.detach()
        scaled = weight.dtype == torch.float32
        outputs, inputs, high, wide = weight.shape
        by_output, by_input, by_tap, by_side = weight.stride()
        rows, columns, start, strides = outputs, inputs, 0, (by_output, by_input, by_tap, by_side)
        if adjoint:  # the convolution with the weight turned by half a circle, its channels exchanged
            rows, columns, start = inputs, outputs, (high - 1) * by_tap + (wide - 1) * by_side
            strides = (by_input, by_output, -by_tap, -by_side)
        numbers = torch.empty(rows, high * wide * columns * (3 if fine else 1), dtype=narrow, device=weight.device)
        inverses, sums = torch.empty(2, rows, device=weight.device)
        kernels.weights[(rows,)](
            weight, numbers, inverses, sums, start, *strides, COLUMNS=columns, TAPS=high * wide, WIDTH=wide,
            BLOCK=_ROW_BLOCK, SCALED=scaled, FINE=fine, num_warps=4,
        )  # fmt: skip
        return cls(numbers, inverses, sums, (high, wide), scaled)


def convolve(
    source: Tensor,
    rows: Rows,
    dtype: torch.dtype,
    tops: Tensor | None = None,
    beside: Tensor | None = None,
    then: str = "nothing",
    rescaled: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """A convolution of ``source (batch, height, width, channels)``, as channels-last pictures.

    Args:
        source: in 16 bits.
        rows: the weights.
        dtype: of the result.
        tops: size of the largest entry of every sample of ``source``, which tells its scale; None without scales.
        beside: what the result is joined with, in its layout.
        then: ``"nothing"``; ``"add"``, the sum with ``beside``; ``"rectify"``, its positive part; ``"change"``, that
            without the positive part of ``beside``; ``"weigh"``, the product; ``"shift"``, the sum with
            ``beside (channels,)``.
        rescaled: whether the result is scaled, by bounds of its entries that stand behind ``tops``.
        out: where the result goes, if there is such a place.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    from opteq.operators import narrow_kernels as kernels

    batch, height, width, channels = source.shape
    count, (high, wide) = len(rows.numbers), rows.taps
    columns = rows.numbers.shape[1] // (high * wide)
    if out is None:
        size, form = (batch, count, height, width), torch.channels_last
        out = torch.empty(size, dtype=dtype, device=source.device, memory_format=form)
    plan = Plan.of(batch, height, width, columns, count, processors(source.device))
    box, depth = plan.box, plan.depth
    kernels.convolve[(plan.boxes, plan.tiles)](
        TensorDescriptor.from_tensor(source, [*box, depth]),
        TensorDescriptor.from_tensor(rows.numbers, [plan.tile, depth]),
        TensorDescriptor.from_tensor(out.permute(0, 2, 3, 1), [*box, plan.tile]),
        rows.inverses if beside is None else beside, rows.inverses, rows.inverses if tops is None else tops,
        batch, height, width, -(-height // box[1]), -(-width // box[2]),
        COLUMNS=columns, CHANNELS=channels, ROWS=count, TAPS_HIGH=high, TAPS_WIDE=wide,
        SAMPLES=box[0], HIGH=box[1], WIDE=box[2], TILE=plan.tile, DEPTH=depth, STAGES=plan.stages,
        THEN=then, SCALED=tops is not None, RESCALED=rescaled,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return out


def convolve_finely(
    v: Tensor,
    linear: Convolution,
    narrow: torch.dtype,
    adjoint: bool,
    beside: Tensor | None = None,
    then: str = "nothing",
    positive: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """A convolution of pictures in float32, or of their positive part, or its adjoint, to some 22 bits."""
    tops = sizes(v, positive)
    source = divided(narrow, v, tops, rectify=positive)
    return convolve(source, Rows.of(linear, narrow, adjoint, fine=True), v.dtype, tops, beside, then, out=out)


def balanced_sum(u: Tensor, tops_u: Tensor, rounded: Tensor, tops: Tensor, taps: Sequence[int], plan: Sums) -> Tensor:
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
