"""There and back by a convolution, ``v -> A' relu(A v + c)`` and ``v -> A' (d * A v)``: what solvers do all the time.

A captured solve may take kernels of its own for it. What lies between the two convolutions is never seen then, and has
16 bits (:mod:`opteq.operators.narrow`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opteq._fast import settings
from opteq._triton import may_keep
from opteq.operators.base import Around
from opteq.operators.narrow import as_beside
from opteq.operators.narrow_choice import is_chosen, narrow_dtype, was_chosen
from opteq.operators.narrow_products import Convolution, Rows, convolve
from opteq.operators.narrow_rounding import rounded_by, rounded_to, sizes


class RoundTrip:
    """One of the two maps, for a given convolution.

    Args:
        linear: the convolution.
        plain: the same map by torch's operations; it takes None for zero, too, if it rectifies.
        beside: c, or d; made when it is needed.
        rectify: whether it is the first of the two maps.
    """

    anchored = False

    def __init__(
        self, linear: Convolution, plain: Callable[[Any], Tensor], beside: Callable[[], Tensor], rectify: bool
    ) -> None:
        self.linear = linear
        self.plain = plain
        self.beside = beside
        self.rectify = rectify
        self._own: Prepared | None = None

    def __call__(self, v: Tensor | None) -> Tensor:
        """The map at ``v``; None stands for zero, where rectification is all there is on the way."""
        if v is None:
            return self._at_zero()
        narrow = narrow_dtype(self.linear, v)
        if narrow is None:
            return self.plain(v)
        key = trip_key(self.linear, v, narrow, self.rectify, self.anchored)
        if not is_chosen(key, v, partial(self.plain, v), partial(self._tried, v, narrow)):
            return self.plain(v)
        return self._by_kernels(v, self._kept(v, narrow))

    def scaled_for(self, v: Any, share: float = 1.0) -> ScaledTrip | None:
        """The map for arguments like ``v`` that are halves already; None where they would not be rounded to those.

        ``share`` is what becomes of the image.
        """
        if self.rectify or not isinstance(v, Tensor):
            return None
        narrow = narrow_dtype(self.linear, v)
        return None if narrow in (None, v.dtype) else ScaledTrip(self, v, narrow, share)

    def _tried(self, v: Tensor, narrow: torch.dtype) -> Callable[[], Tensor]:
        """What is measured before it is chosen; every kernel that may be launched has to be launched here."""
        return partial(self._prepared(v, narrow), v)

    def _by_kernels(self, v: Tensor, made: Prepared) -> Tensor:
        return made(v)

    def _at_zero(self) -> Tensor:
        c = self.beside()
        narrow = narrow_dtype(self.linear, c, adjoint=True)
        if narrow is None or c.dtype == narrow:
            return self.plain(None)
        weight = self.linear.weight
        key = ("from zero and back", c.shape, narrow, weight.shape, weight.stride(), c.device)
        if not is_chosen(key, c, partial(self.plain, None), lambda: self._prepared(c, narrow).at_zero):
            return self.plain(None)
        return self._kept(c, narrow).at_zero()

    def _kept(self, like: Tensor, narrow: torch.dtype) -> Prepared:
        made = self._own
        if made is None or not made.serves(like, narrow):
            made = self._prepared(like, narrow)
            self._own = made if may_keep(like) else self._own
        return made

    def _prepared(self, v: Tensor, narrow: torch.dtype) -> Prepared:
        with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]  # kernels run on the current device
            beside = self.beside()
            truth = beside.dtype == torch.bool
            beside = as_beside(beside, self.linear, v)
            there, back = (Rows.of(self.linear, narrow, adjoint) for adjoint in (False, True))
            offset = gain = None
            if there.scaled:
                # No entry of A v is larger than that of v times the largest sum of a row's weights.
                most = there.sums.amax().expand(len(v))
                size = None if truth else sizes(beside, positive=self.rectify)
                offset = size if self.rectify and size is not None else torch.zeros_like(most)
                gain = (most if self.rectify or size is None else most * size).contiguous()
            return Prepared(there, back, beside, narrow, offset, gain, "rectify" if self.rectify else "weigh")


class ScaledTrip:
    """``v -> share * A' (d * A v)`` for a v that is halves, with a scale for every sample, as solvers may keep it.

    Args:
        trip: the map.
        like: what such a v stands for, in float32.
        narrow: the dtype of halves.
        share: what becomes of the image.
    """

    def __init__(self, trip: RoundTrip, like: Tensor, narrow: torch.dtype, share: float) -> None:
        self.trip = trip
        self.like = like
        self.narrow = narrow
        self.share = share

    @property
    def in_use(self) -> bool:
        """Whether a solve is captured in which the map goes by kernels of 16 bits."""
        key = trip_key(self.trip.linear, self.like, self.narrow, self.trip.rectify, self.trip.anchored)
        return settings.recording and was_chosen(key)

    @property
    def gain(self) -> Tensor:
        """What the size of a sample's entries is multiplied by to bound those between the two products."""
        gain = self.trip._kept(self.like, self.narrow).gain
        assert gain is not None
        return gain

    def __call__(self, halves: Tensor, tops: Tensor) -> Tensor:
        """The map; ``tops`` are the sizes of samples, and behind them those times :attr:`gain`."""
        made = self.trip._kept(self.like, self.narrow)
        image = made.of_rounded(halves.permute(0, 2, 3, 1), tops, self.like.dtype)
        return image if self.share == 1 else image * self.share


class RectifiedTrip(RoundTrip, Around):
    """The first of the two maps, and its halves.

    Args:
        linear: the convolution.
        plain: the same by torch's operations.
        c: what is added.
    """

    def __init__(self, linear: Convolution, plain: Around, c: Tensor) -> None:
        super().__init__(linear, plain, lambda: c, rectify=True)
        self.halves = plain

    def there(self, v: Tensor) -> Tensor:
        """``relu(A v + c)``."""
        return self.halves.there(v)

    def back(self, u: Tensor) -> Tensor:
        """``A' u``, for a u such as :meth:`there` gives."""
        return self.halves.back(u)


def trip_key(linear: Convolution, v: Tensor, narrow: torch.dtype, rectify: bool, anchored: bool) -> Hashable:
    """What distinguishes round trips with arguments like ``v`` from others, where the faster way is chosen."""
    weight = linear.weight
    return "round trip", v.shape, v.dtype, narrow, weight.shape, weight.stride(), rectify, anchored, v.device


@dataclass(frozen=True)
class Prepared:
    """All that a round trip needs but its argument."""

    there: Rows
    back: Rows
    beside: Tensor
    narrow: torch.dtype
    offset: Tensor | None
    gain: Tensor | None
    then: str

    def serves(self, v: Tensor, narrow: torch.dtype) -> bool:
        """Whether it was made for arguments, or results of the first product, like ``v``."""
        pixels = len(v), *v.shape[2:]
        scaled = v.dtype == torch.float32
        return (self.narrow, self.there.scaled) == (narrow, scaled) and pixels == (
            len(self.beside), *self.beside.shape[2:]
        )  # fmt: skip

    def __call__(self, v: Tensor) -> Tensor:
        with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]  # kernels run on the current device
            rounded, tops = rounded_to(self.narrow, v, self.offset, self.gain)
            return self.of_rounded(rounded, tops, v.dtype)

    def of_rounded(self, rounded: Tensor, tops: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The same for an argument ``(batch, height, width, channels)`` of 16 bits, its scales told by ``tops``."""
        with torch.cuda.device_of(rounded):  # type: ignore[no-untyped-call]
            between = convolve(
                rounded, self.there, self.narrow, tops, self.beside, self.then, rescaled=tops is not None
            ).permute(0, 2, 3, 1)
            return convolve(between, self.back, dtype, None if tops is None else tops[len(rounded) :])

    def at_zero(self) -> Tensor:
        """``A' relu(c)``, where there are scales."""
        assert self.offset is not None
        with torch.cuda.device_of(self.beside):  # type: ignore[no-untyped-call]
            positive = rounded_by(self.narrow, self.beside, self.offset, rectify=True)
            return convolve(positive, self.back, self.beside.dtype, self.offset)
