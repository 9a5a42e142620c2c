"""Pictures of float32 as halves, times powers of two that keep them in range."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.operators.narrow_plans import processors

# Entries of a sample that a program takes at a time when it rounds them, and parts that a sample is cut into.
_BLOCK, _PARTS = 4096, 16
# The same where a program takes a whole sample.
_ALONE = 16384


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
