"""``v -> A' relu(A v + c)`` for the steps of a captured solve: products of 16 bits, results of more.

Near a point v0 where the map was evaluated finely, to some 22 bits, it is, with ``c0 = A v0 + c``,
``A' relu(c0) + A' (relu(A (v - v0) + c0) - relu(c0))``. What is rounded there are the two differences: errors are a
2000th of the distance to v0, not of v. Steps of a solve come closer and closer to its answer, so one fine evaluation,
which costs as much as three, serves all those that follow it, until the next one after four times as many. Residuals
are not hidden by rounding then, solves end earlier for it, and answers have more digits than TF32 gives them.
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
from opteq.operators.round_trip import Prepared, RoundTrip, trip_key

# Which evaluations are fine, without counting the one at a start of zeros: the second, by which a solve has come some
# way, and after that those four times as far.
_FIRST, _GROWTH = 2, 4
# Bytes of pre-activations that are made at a time in a fine evaluation.
_ROOM = 2**24


@dataclass
class _Known:
    """The map at one point of every sample, in memory that is written to where a better point was found.

    Attributes:
        point: v0.
        inside: ``A v0 + c``.
        image: ``A' relu(A v0 + c)``.
        gap: how far image and point are apart, for every sample.
        nothing: a zero for every sample.
    """

    point: Tensor
    inside: Tensor
    image: Tensor
    gap: Tensor
    nothing: Tensor

    @classmethod
    def at(cls, point: Tensor, inside: Tensor, image: Tensor) -> _Known:
        """The three tensors become those that are written to."""
        gap = gaps(image, point).sum(dim=1)
        return cls(point, inside, image, gap, torch.zeros_like(gap))

    def part(self, samples: slice) -> _Known:
        """Of some samples."""
        parts = self.point, self.inside, self.image, self.gap, self.nothing
        return _Known(*(whole[samples] for whole in parts))

    def move(self, point: Tensor, inside: Tensor, image: Tensor) -> None:
        """To another point, in samples whose residual is smaller there: what a solver tries may be anything."""
        apart, least = gaps(image, point), self.gap.clone()
        for own, new in ((self.point, point), (self.inside, inside), (self.image, image)):
            adopt(own, new, apart, least, self.gap)

    def step(self, v: Tensor, made: Prepared) -> Tensor:
        """The map at ``v``."""
        assert made.gain is not None
        # No entry of relu(A d + c0) - relu(c0) is larger than that of A d.
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


class RefinedTrip(RoundTrip, Around):
    """The map, with a memory while a solve is captured. Elsewhere, and where nothing is rounded more, it has none.

    Args:
        linear: the convolution.
        plain: the map and its two halves by torch's operations.
        c: what is added.
    """

    def __init__(self, linear: Convolution, plain: Around, c: Tensor) -> None:
        super().__init__(linear, plain, lambda: c, rectify=True)
        self.halves = plain
        self._known: _Known | None = None
        self._turn = 0

    def there(self, v: Tensor) -> Tensor:
        """``relu(A v + c)``."""
        known, made = self._known, self._own
        if known is None or made is None or not self._may(v, known.point, made):
            return self.halves.there(v)
        with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]  # kernels run on the current device
            return known.there(v, made)

    def back(self, u: Tensor) -> Tensor:
        """``A' u``, for a u such as :meth:`there` gives."""
        known, made = self._known, self._own
        if known is None or made is None or not self._may(u, known.inside, made, adjoint=True):
            return self.halves.back(u)
        with torch.cuda.device_of(u):  # type: ignore[no-untyped-call]  # kernels run on the current device
            return known.back(u, made)

    def _may(self, v: Tensor, like: Tensor, made: Prepared, adjoint: bool = False) -> bool:
        fits = v.shape == like.shape and v.dtype == like.dtype
        return fits and narrow_dtype(self.linear, v, adjoint) == made.narrow

    def _at_zero(self) -> Tensor:
        image = super()._at_zero()
        narrow = narrow_dtype(self.linear, image) if _remembers() else None
        if narrow is None or not is_refined(self.linear, image):
            return image
        with torch.cuda.device_of(image):  # type: ignore[no-untyped-call]  # kernels run on the current device
            made = self._kept(image, narrow)
            self._known = _Known.at(torch.zeros_like(image), made.beside.clone(), image.clone())
        return image

    def _by_kernels(self, v: Tensor, made: Prepared) -> Tensor:
        known = self._known
        if not made.there.scaled or (known is not None and not self._may(v, known.point, made)):
            return made(v)
        with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]  # kernels run on the current device
            if _remembers():
                self._turn = _FIRST if known is None else self._turn + 1
                if known is None:
                    return self._begun(v, made)
                if _is_due(self._turn):
                    return self._moved(v, made, known)
            return made(v) if known is None or self._turn < _FIRST else known.step(v, made)

    def _begun(self, v: Tensor, made: Prepared) -> Tensor:
        inside, image = self._finely(v, made.beside, made.narrow)
        self._known = _Known.at(v.clone(), inside, image)
        return image.clone()

    def _moved(self, v: Tensor, made: Prepared, known: _Known) -> Tensor:
        """The map at ``v``, which is known from now on; so many samples at a time that little memory is needed."""
        image = torch.empty_like(known.image)
        each = max(1, _ROOM // (4 * known.inside[0].numel()))
        for first in range(0, len(v), each):
            samples = slice(first, first + each)
            inside, found = self._finely(v[samples], made.beside[samples], made.narrow, image[samples])
            known.part(samples).move(v[samples], inside, found)
        return image

    def _finely(self, v: Tensor, c: Tensor, narrow: torch.dtype, image: Tensor | None = None) -> tuple[Tensor, Tensor]:
        inside = convolve_finely(v, self.linear, narrow, False, c, "add")
        return inside, convolve_finely(inside, self.linear, narrow, True, positive=True, out=image)

    def _tried(self, v: Tensor, narrow: torch.dtype) -> Callable[[], Tensor]:
        made = self._prepared(v, narrow)
        if not made.there.scaled:
            return partial(made, v)
        other = RefinedTrip(self.linear, self.halves, made.beside)
        other._begun(v, made)
        known = other._known
        assert known is not None
        other._moved(v, made, known)
        known.back(known.there(v, made), made)
        return partial(known.step, v, made)


def is_refined(linear: Convolution, v: Tensor) -> bool:
    """Whether round trips from ``v`` in the solve that is being captured are of this kind."""
    narrow = narrow_dtype(linear, v) if settings.recording else None
    return narrow not in (None, v.dtype) and was_chosen(trip_key(linear, v, narrow, rectify=True))


def _remembers() -> bool:
    """Whether what is made now is there for all that is captured later."""
    return settings.keeping and settings.recording


def _is_due(turn: int) -> bool:
    while turn > _FIRST and turn % _GROWTH == 0:
        turn //= _GROWTH
    return turn == _FIRST
