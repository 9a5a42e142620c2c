"""Convolutions of three by three by Winograd's algorithm, on a CPU: a quarter of the products of numbers.

Sixteen neighbouring outputs of such a convolution are 144 products of a number with a number; as values of polynomials,
which are multiplied point by point, 36 are enough. So pictures are cut into overlapping tiles of six by six, both they
and the weight are transformed, the products are those of 36 matrices, and what comes out is transformed into tiles of
four by four. Transforms cost something too, a few operations a number whatever the channels: with 64 channels and more
it pays, with 256 it takes half the time.

It costs digits: with the points chosen here an error is two to four times that of the plain sum of 9 c products, some
1e-6 of the result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from opteq._room import Room

_TILE = 4
_TAPS = 3
_POINTS = _TILE + _TAPS - 1
# Where polynomials are evaluated, beside infinity. Of all small fractions these lose the fewest digits.
_AT = (Fraction(0), Fraction(3, 4), Fraction(-3, 4), Fraction(3, 2), Fraction(-3, 2))


def has_tiles(weight: Tensor, picture: Sequence[int]) -> bool:
    """Whether a weight is three by three, and pictures ``(h, w)`` consist of whole tiles."""
    return tuple(weight.shape[2:]) == (_TAPS, _TAPS) and all(side > 0 and side % _TILE == 0 for side in picture)


class WinogradWeight:
    """A weight ``(m, c, 3, 3)``, transformed: ``(36, c, m)``."""

    def __init__(self, weight: Tensor) -> None:
        count, channels = weight.shape[:2]
        taps = weight.detach().permute(2, 3, 1, 0).reshape(_TAPS * _TAPS, channels * count)
        self.spread = (_transforms().weight @ taps).view(-1, channels, count)

    def product(self, v: Tensor, beside: Tensor | None, then: str, room: Room) -> Tensor:
        """``A v`` of a picture, or with another ``beside`` it, to "rectify" ``relu(A v + beside)``, to "weigh" their
        product.
        """
        batch, _, height, width = v.shape
        spread = _spread_pictures(v, room)
        count = self.spread.shape[2]
        products = room.take("products", len(self.spread), len(spread), count)
        torch.bmm(spread.transpose(0, 1), self.spread, out=products)
        outputs = room.take("tiles", _TILE * _TILE, len(spread) * count)  # which those of the picture need no more
        torch.mm(_transforms().output, products.view(len(products), -1), out=outputs)
        tiles = outputs.view(_TILE, _TILE, batch, height // _TILE, width // _TILE, count).permute(2, 3, 0, 4, 1, 5)
        shape = batch, count, height, width
        image = torch.empty(shape, dtype=torch.float32, device="cpu", memory_format=torch.channels_last)
        found = _rows(image).view(tiles.shape)
        if beside is None:
            found.copy_(tiles)
        elif then == "rectify":
            torch.add(tiles, _rows(beside).view(tiles.shape), out=found).relu_()
        else:
            torch.mul(tiles, _rows(beside).view(tiles.shape), out=found)
        return image


class WinogradSum:
    """The derivative of ``<A v, u>`` by a weight ``(m, c, 3, 3)``, summed over as many pairs as there are.

    The algorithm is linear in the weight, in v and in its result. So the derivative by the transformed weight is the
    product of v, transformed as always, with u, transformed by the adjoint of what makes outputs.
    """

    def __init__(self, weight: Tensor, room: Room) -> None:
        self.weight = weight
        self.room = room
        self.total = room.take("total", _POINTS * _POINTS, weight.shape[1], weight.shape[0]).zero_()

    def add(self, v: Tensor, u: Tensor) -> None:
        """One more pair, of pictures."""
        inputs = _spread_pictures(v, self.room)
        batch, count, height, width = u.shape
        tiled = _rows(u).reshape(batch, height // _TILE, _TILE, width // _TILE, _TILE, count).permute(0, 1, 3, 2, 4, 5)
        tiles = self.room.take("tiles", *tiled.shape).copy_(tiled).view(-1, _TILE * _TILE, count)
        outputs = self.room.take("products", len(tiles), _POINTS * _POINTS, count)
        torch.bmm(_transforms().output.mT.expand(len(tiles), -1, -1), tiles, out=outputs)
        torch.baddbmm(self.total, inputs.permute(1, 2, 0), outputs.transpose(0, 1), out=self.total)

    def result(self) -> Tensor:
        """The derivative, which lies in memory as the weight does."""
        count, channels = self.weight.shape[:2]
        taps = _transforms().weight.mT @ self.total.view(len(self.total), -1)
        return torch.empty_like(self.weight).copy_(taps.view(_TAPS, _TAPS, channels, count).permute(3, 2, 0, 1))


class _Transforms:
    """What turns taps into 36 values, tiles into 36 values, and 36 products into 16 outputs.

    In one dimension: a polynomial of the taps times one of the outputs has six coefficients, and is known by its values
    at five points and its leading coefficient. The transposed rule of Toom and Cook gives the sums that are wanted.
    """

    def __init__(self) -> None:
        across = range(_POINTS - 1)
        rest = [[other for k, other in enumerate(_AT) if k != j] for j in across]
        scale = [math.prod(_AT[j] - other for other in rest[j]) for j in across]
        weight = [[float(point**i / scale[j]) for i in range(_TAPS)] for j, point in enumerate(_AT)] + [[0.0, 0.0, 1.0]]
        output = [[float(point**i) for point in _AT] + [float(i == _TILE - 1)] for i in range(_TILE)]
        picture = [[*_coefficients(rest[j]), 0.0] for j in across] + [_coefficients(_AT)]
        self.weight, self.output, self.picture = _both_ways(weight), _both_ways(output), _both_ways(picture)


@functools.cache
def _transforms() -> _Transforms:
    with torch.inference_mode(False):  # they serve later calls, too
        return _Transforms()


def _coefficients(roots: Sequence[Fraction]) -> list[float]:
    """Those of the product of all ``x - root``, the constant one first."""
    found = [Fraction(1)]
    for root in roots:
        found = [high - root * low for high, low in zip([Fraction(0), *found], [*found, Fraction(0)], strict=True)]
    return [float(each) for each in found]


def _both_ways(matrix: Sequence[Sequence[float]]) -> Tensor:
    """The transform of rows and columns at once, for tiles that are columns."""
    exact = torch.tensor(matrix, dtype=torch.float64, device="cpu")
    return torch.kron(exact, exact).to(torch.float32)


def _spread_pictures(v: Tensor, room: Room) -> Tensor:
    """Pictures ``(b, c, h, w)`` as transformed tiles ``(b h w / 16, 36, c)``."""
    batch, channels, height, width = v.shape
    # Zeros around every picture stay where they are: only the inside is ever written.
    padded = room.take(("padded", channels, height, width), batch, height + 2, width + 2, channels)
    padded[:, 1:-1, 1:-1].copy_(_rows(v))
    sample, row, column, _ = padded.stride()
    shape = batch, height // _TILE, width // _TILE, _POINTS, _POINTS, channels
    overlapping = padded.as_strided(shape, (sample, _TILE * row, _TILE * column, row, column, 1))
    tiles = room.take("tiles", *shape).copy_(overlapping).view(-1, _POINTS * _POINTS, channels)
    # A small product a tile, which stays in the cache: one product for all of them takes half as long again.
    spread = room.take("spread", *tiles.shape)
    torch.bmm(_transforms().picture.expand(len(tiles), -1, -1), tiles, out=spread)
    return spread


def _rows(v: Tensor) -> Tensor:
    """A picture with its channels last."""
    return v.permute(0, 2, 3, 1)
