"""Pictures of float32 as halves, times powers of two that keep them in range."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.operators.narrow_plans import processors

# Entries of a sample that a program takes at a time when it rounds them, and parts that a sample is cut into.
_BLOCK, _PARTS = 4096, 16
# The same where a program takes a whole sample.
_ALONE = 16384


@dataclass(frozen=True)
class Less:
    """What is subtracted before anything is rounded: pictures in float32, or their positive part."""

    pictures: Tensor
    positive: bool = False

    @property
    def how(self) -> str:
        """As kernels are told."""
        return "positive" if self.positive else "all"


def rounded_to(
    narrow: torch.dtype, v: Tensor, offset: Tensor | None = None, gain: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Pictures ``(batch, height, width, channels)`` in 16 bits, scaled if they were in float32.

    Then there is, for every sample, the size of its largest entry; and, with ``offset`` and ``gain``, behind these
    ``offset + gain * size``.
    """
    return (v.permute(0, 2, 3, 1), None) if v.dtype == narrow else rounded_with_sizes(narrow, v, offset, gain)


def rounded_with_sizes(
    narrow: torch.dtype,
    v: Tensor,
    offset: Tensor | None = None,
    gain: Tensor | None = None,
    less: Less | None = None,
) -> tuple[Tensor, Tensor]:
    """The same for pictures in float32; or for their difference to others."""
    from opteq.operators import narrow_kernels as kernels

    batch, bounded = len(v), offset is not None
    tops = torch.empty((2 if bounded else 1) * batch, device=v.device)
    first, second = (tops if given is None else given for given in (offset, gain))
    if 2 * batch < processors(v.device):
        return _rounded(narrow, v, _sizes_of_parts(v, less=less), tops, first, second, bounded, less=less), tops
    out = _like(v, narrow)
    kernels.narrow_alone[(batch,)](
        v, _minus(v, less), first, second, out, tops, v[0].numel(), batch, BLOCK=_ALONE, BOUNDED=bounded,
        LESS=_how(less), num_warps=_ALONE // 512,
    )  # fmt: skip
    return out, tops


def divided(narrow: torch.dtype, v: Tensor, tops: Tensor, rectify: bool = False) -> Tensor:
    """Pictures in float32, or their positive part, as halves by known sizes; what is left is behind their channels."""
    from opteq.operators import narrow_kernels as kernels

    batch, channels, height, width = v.shape
    out = torch.empty(batch, height, width, 2 * channels, dtype=narrow, device=v.device)
    kernels.divide[(batch, _PARTS)](
        v, tops, out, v[0].numel(), BLOCK=_BLOCK, PARTS=_PARTS, CHANNELS=channels, RECTIFY=rectify, num_warps=8
    )
    return out


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
    less: Less | None = None,
) -> Tensor:
    """By sizes ``(batch, parts)``, which are told then; or ``(batch,)``."""
    from opteq.operators import narrow_kernels as kernels

    out = _like(v, narrow)
    count = sizes.shape[1] if sizes.ndim == 2 else 1
    kernels.narrow[(len(v), _PARTS)](
        v, _minus(v, less), sizes, offset, gain, out, tops, v[0].numel(), count, len(v), BLOCK=_BLOCK, PARTS=_PARTS,
        COUNT=count, RECTIFY=rectify, LESS=_how(less), TOLD=sizes.ndim == 2, BOUNDED=bounded, num_warps=8,
    )  # fmt: skip
    return out


def _like(v: Tensor, dtype: torch.dtype) -> Tensor:
    batch, channels, height, width = v.shape
    return torch.empty(batch, height, width, channels, dtype=dtype, device=v.device)


def sizes(v: Tensor, positive: bool = False) -> Tensor:
    """For every sample the size of its largest entry, or of its largest positive one."""
    return _sizes_of_parts(v, positive).amax(dim=1)


def _sizes_of_parts(v: Tensor, positive: bool = False, less: Less | None = None) -> Tensor:
    from opteq.operators import narrow_kernels as kernels

    parts = torch.empty(len(v), _PARTS, device=v.device)
    kernels.largest[(len(v), _PARTS)](
        v, _minus(v, less), parts, v[0].numel(), BLOCK=_BLOCK, PARTS=_PARTS, POSITIVE=positive, LESS=_how(less),
        num_warps=8,
    )  # fmt: skip
    return parts


def _minus(v: Tensor, less: Less | None) -> Tensor:
    return v if less is None else less.pictures


def _how(less: Less | None) -> str:
    return "nothing" if less is None else less.how


def gaps(left: Tensor, right: Tensor, share: float = 1.0) -> Tensor:
    """The sizes of ``share * left - right``, summed up over parts of every sample: ``(batch, parts)``."""
    from opteq.operators import narrow_kernels as kernels

    parts = torch.empty(len(left), _PARTS, device=left.device)
    kernels.gap[(len(left), _PARTS)](
        left, right, parts, share, left[0].numel(), BLOCK=_BLOCK, PARTS=_PARTS, num_warps=8
    )
    return parts


def adopt(out: Tensor, source: Tensor, parts: Tensor, least: Tensor, fewer: Tensor) -> None:
    """Copy samples where the sum of ``parts`` is below ``least``; the smaller one of the two goes to ``fewer``."""
    from opteq.operators import narrow_kernels as kernels

    kernels.adopt[(len(out), _PARTS)](
        source, out, parts, least, fewer, out[0].numel(), BLOCK=_BLOCK, PARTS=_PARTS, num_warps=8
    )
