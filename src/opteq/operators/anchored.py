"""``v -> A' relu(A v + c)`` for the steps of a captured solve: products of 16 bits, results of more.

Near a point v0, an anchor, where the map was evaluated finely, to some 22 bits, it is, with ``c0 = A v0 + c``,
``A' relu(c0) + A' (relu(A (v - v0) + c0) - relu(c0))``. What is rounded there are the two differences: errors are a
2000th of the distance to v0, not of v. Steps of a solve come closer and closer to its answer, so one fine evaluation,
which costs as much as three, serves all those that follow it, until the next one after four times as many. Residuals
are not hidden by rounding then, solves end earlier for it, and answers have more digits than TF32 gives them.

All of it is in memory that the first part of a captured solve takes, and writes to: whichever parts follow, and
wherever the solve ends, what reads an anchor finds one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from opteq._fast import settings
from opteq.operators.base import Around
from opteq.operators.narrow_choice import narrow_dtype, was_chosen
from opteq.operators.narrow_products import Convolution, convolve, convolve_finely
from opteq.operators.narrow_rounding import Less, adopt, gaps, rounded_with_sizes
from opteq.operators.round_trip import Prepared, RectifiedTrip, trip_key

# Which evaluations are fine, without counting the one at the start: the second, by which a solve has come some way,
# and after that those four times as far.
_FIRST, _GROWTH = 2, 4
# Bytes of pre-activations that are made at a time in a fine evaluation.
_ROOM = 2**24


@dataclass
class _Anchor:
    """The map at one point of every sample, in memory that is written to where a better point was found.

    Attributes:
        point: v0.
        inside: ``A v0 + c``.
        image: ``A' relu(A v0 + c)``; at a start of zeros it is a rough one, and so are steps until the anchor moves.
        gap: how far a step would move the point, for every sample.
        nothing: a zero for every sample.
    """

    point: Tensor
    inside: Tensor
    image: Tensor
    gap: Tensor
    nothing: Tensor

    @classmethod
    def at_zero(cls, c: Tensor, image: Tensor, share: float) -> _Anchor:
        """Where the point is zero, and its image known."""
        # A sample that is not finite is given up at once. What is read out of it is as finite as its state is made.
        finite = partial(torch.nan_to_num, nan=0.0, posinf=0.0, neginf=-torch.inf)
        zeros = torch.zeros_like(image)
        gap = gaps(image, zeros, share).sum(dim=1)
        return cls(zeros, finite(c), finite(image), gap, torch.zeros_like(gap))

    @classmethod
    def nowhere(cls, v: Tensor, c: Tensor) -> _Anchor:
        """One that any point is better than."""
        nothing = v.new_zeros(len(v))
        return cls(torch.zeros_like(v), torch.zeros_like(c), torch.zeros_like(v), nothing + torch.inf, nothing)

    def part(self, samples: slice) -> _Anchor:
        """Of some samples."""
        parts = self.point, self.inside, self.image, self.gap, self.nothing
        return _Anchor(*(whole[samples] for whole in parts))

    def move(self, point: Tensor, inside: Tensor, image: Tensor, share: float) -> None:
        """To another point, in samples that a step moves less there: what a solver tries may be anything."""
        apart, least = gaps(image, point, share), self.gap.clone()
        for own, new in ((self.point, point), (self.inside, inside), (self.image, image)):
            adopt(own, new, apart, least, self.gap)

    def step(self, v: Tensor, made: Prepared) -> Tensor:
        """The map at ``v``."""
        assert made.gain is not None
        # No entry of relu(A d + c0) - relu(c0) is larger than that of A d, but for the rounding of the sum, which may
        # double it: scales leave room for four times as much.
        rounded, tops = rounded_with_sizes(made.narrow, v, self.nothing, made.gain, Less(self.point))
        change = convolve(rounded, made.there, made.narrow, tops, self.inside, "change", rescaled=True)
        return convolve(change.permute(0, 2, 3, 1), made.back, v.dtype, tops[len(v) :], self.image, "add")

    def there(self, v: Tensor, made: Prepared) -> Tensor:
        """``relu(A v + c)``."""
        rounded, tops = rounded_with_sizes(made.narrow, v, less=Less(self.point))
        return convolve(rounded, made.there, v.dtype, tops, self.inside, "rectify")

    def back(self, u: Tensor, made: Prepared) -> Tensor:
        """``A' u``."""
        rounded, tops = rounded_with_sizes(made.narrow, u, less=Less(self.inside, positive=True))
        return convolve(rounded, made.back, u.dtype, tops, self.image, "add")


class AnchoredTrip(RectifiedTrip):
    """The map of a fixed-point problem ``v = share * A' relu(A v + c)``, with an anchor while its solve is captured.

    Elsewhere, and where products are in 16 bits anyway, it has none.

    Args:
        linear: the convolution.
        plain: the map and its two halves by torch's operations.
        c: what is added.
        share: what becomes of the image.
    """

    anchored = True

    def __init__(self, linear: Convolution, plain: Around, c: Tensor, share: float) -> None:
        super().__init__(linear, plain, c)
        self.share = share
        self._anchor: _Anchor | None = None
        self._turn = 0

    def there(self, v: Tensor) -> Tensor:
        """``relu(A v + c)``."""
        anchor, made = self._anchor, self._own
        if anchor is None or made is None or not self._may(v, anchor.point, made):
            return super().there(v)
        with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]  # kernels run on the current device
            return anchor.there(v, made)

    def back(self, u: Tensor) -> Tensor:
        """``A' u``, for a u such as :meth:`there` gives."""
        anchor, made = self._anchor, self._own
        if anchor is None or made is None or not self._may(u, anchor.inside, made, adjoint=True):
            return super().back(u)
        with torch.cuda.device_of(u):  # type: ignore[no-untyped-call]  # kernels run on the current device
            return anchor.back(u, made)

    def _may(self, v: Tensor, like: Tensor, made: Prepared, adjoint: bool = False) -> bool:
        fits = v.shape == like.shape and v.dtype == like.dtype
        return fits and narrow_dtype(self.linear, v, adjoint) == made.narrow

    def _at_zero(self) -> Tensor:
        image = super()._at_zero()
        if not (_remembers() and is_anchored(self.linear, image)):
            return image
        narrow = narrow_dtype(self.linear, image)
        assert narrow is not None
        with torch.cuda.device_of(image):  # type: ignore[no-untyped-call]  # kernels run on the current device
            made = self._kept(image, narrow)
            if _has_room(made, image):
                self._anchor, self._turn = _Anchor.at_zero(made.beside, image, self.share), 0
        return image

    def _by_kernels(self, v: Tensor, made: Prepared) -> Tensor:
        anchor = self._anchor
        if not _has_room(made, v) or (anchor is not None and not self._may(v, anchor.point, made)):
            return made(v)
        with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]  # kernels run on the current device
            if _remembers():
                if anchor is None:  # a start that is not zero
                    self._anchor, self._turn = _Anchor.nowhere(v, made.beside), 0
                    return self._moved(v, made, self._anchor)
                self._turn += 1
                if _is_due(self._turn):
                    return self._moved(v, made, anchor)
            # A start may be anywhere, its image is better: so is the next evaluation without an anchor at the start.
            return made(v) if anchor is None or self._turn < _FIRST else anchor.step(v, made)

    def _moved(self, v: Tensor, made: Prepared, anchor: _Anchor) -> Tensor:
        """The map at ``v``, the anchor from now on; so many samples at a time that it takes little memory."""
        image = torch.empty_like(anchor.image)
        each = max(1, _ROOM // (anchor.inside[0].numel() * anchor.inside.element_size()))
        for first in range(0, len(v), each):
            samples = slice(first, first + each)
            inside = convolve_finely(v[samples], self.linear, made.narrow, False, made.beside[samples], "add")
            convolve_finely(inside, self.linear, made.narrow, True, positive=True, out=image[samples])
            anchor.part(samples).move(v[samples], inside, image[samples], self.share)
        return image

    def _tried(self, v: Tensor, narrow: torch.dtype) -> Callable[[], Tensor]:
        made = self._prepared(v, narrow)
        if not _has_room(made, v):
            return partial(made, v)
        anchor = _Anchor.at_zero(made.beside, made(v), self.share)
        self._moved(v, made, anchor)
        anchor.back(anchor.there(v, made), made)
        return partial(anchor.step, v, made)


def is_anchored(linear: Convolution, v: Tensor) -> bool:
    """Whether steps at ``v`` in the solve that is being captured are of this kind."""
    narrow = narrow_dtype(linear, v) if settings.recording else None
    return narrow not in (None, v.dtype) and was_chosen(trip_key(linear, v, narrow, rectify=True, anchored=True))


def _has_room(made: Prepared, v: Tensor) -> bool:
    """Whether numbers have more digits than products keep."""
    return made.there.scaled and made.beside.dtype == v.dtype


def _remembers() -> bool:
    """Whether what is made now is there for all that is captured later."""
    return settings.keeping and settings.recording


def _is_due(turn: int) -> bool:
    while turn > _FIRST and turn % _GROWTH == 0:
        turn //= _GROWTH
    return turn == _FIRST
