"""Neighbours in a ring of branches: their channels at a common size, products of channels, and the adjoints.

Features are tuples with one tensor per branch, images ``(B, C, h, w)`` or vectors ``(B, C)``; a vector is an image of
one pixel. All have C channels, and the sizes of neighbours are integer multiples of each other. Resampling is average
pooling one way and its exact adjoint the other way, so inner products are the same whichever of two neighbours is
resampled; the coarser size is the cheaper one.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from opteq.common.precision import matrix_product
from opteq.operators import resample
from opteq.states import working_dtype

Features = tuple[Tensor, ...]
Pairs = list[tuple[Tensor, Tensor]]


def check_features(features: Features) -> None:
    """Raise unless ``features`` is a ring of images, or of vectors, with the same channels."""
    if not isinstance(features, tuple) or not features:
        raise TypeError(f"features should be a tuple with one tensor per branch; got {type(features).__name__}")
    shapes = [tuple(z.shape) for z in features]
    if len({len(shape) for shape in shapes}) > 1 or len(shapes[0]) not in (2, 4):
        raise ValueError(
            f"the features of all branches should be images (B, C, h, w), or all vectors (B, C); got {shapes}"
        )
    if any(shape[:2] != shapes[0][:2] for shape in shapes):
        raise ValueError(
            f"the features of all branches should have the same batch and the same number of channels, since channels "
            f"are compared one by one; got {shapes}"
        )


def neighbours(features: Features) -> Pairs:
    """Each branch and the next as matrices ``(B, C, pixels)`` at the coarser of their sizes."""
    check_features(features)
    count = len(features)
    views = [_views(z, features[index - 1], features[(index + 1) % count]) for index, z in enumerate(features)]
    return [(views[index][1], views[(index + 1) % count][0]) for index in range(count)]


def _views(z: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """A branch at the coarser of its own size and the size of the branch before, and likewise of the one after."""
    if z.ndim == 2:
        return z[:, :, None], z[:, :, None]
    sizes = [_size(min(z, other, key=lambda image: image.shape[2])) for other in (before, after)]
    fine, coarse = sorted(sizes, reverse=True)
    first = resample(z, fine)
    second = resample(first if _divides(coarse, fine) else z, coarse)  # a mean of means
    views = {fine: first.flatten(2), coarse: second.flatten(2)}
    return views[sizes[0]], views[sizes[1]]


def _size(image: Tensor) -> tuple[int, int]:
    return image.shape[2], image.shape[3]


def _divides(coarse: tuple[int, int], fine: tuple[int, int]) -> bool:
    return fine[0] % coarse[0] == 0 and fine[1] % coarse[1] == 0


def products(features: Features) -> tuple[Tensor, ...]:
    """The matrices ``M`` of each branch (rows) with the next (columns), ``(B, C, C)`` each."""
    return channel_products(neighbours(features))


def channel_products(pairs: Pairs) -> tuple[Tensor, ...]:
    """:func:`products` of branches that are paired already."""
    return tuple(matrix_product(torch.bmm, a, b.mT) for a, b in pairs)


def products_derivative(features: Features, v: Features) -> tuple[Tensor, ...]:
    """The derivative of :func:`products` at ``features`` in the direction ``v``."""
    return pairs_derivative(neighbours(features), neighbours(v))


def pairs_derivative(pairs: Pairs, directions: Pairs) -> tuple[Tensor, ...]:
    """:func:`products_derivative` of branches and directions that are paired already."""
    first = [(u, b) for (_, b), (u, _) in zip(pairs, directions, strict=True)]
    second = [(a, w) for (a, _), (_, w) in zip(pairs, directions, strict=True)]
    sums = zip(channel_products(first), second, strict=True)
    return tuple(matrix_product(torch.baddbmm, total, a, w.mT) for total, (a, w) in sums)


def mix_neighbours(features: Features, pairs: Pairs, weights: tuple[Tensor, ...]) -> Features:
    """For each branch, the channels of its two neighbours times ``weights``, at the branch's own size.

    Branch i receives ``weights[i]`` times the channels of the next branch, and that one the transpose times those of
    branch i.
    """
    received = []
    for index, z in enumerate(features):
        after, ahead = pairs[index][1], weights[index]
        before, behind = pairs[index - 1][0], weights[index - 1].mT
        first = _mix(ahead, after)
        if before.shape == after.shape:  # both at one size: the second product adds to the first
            both = _mix(behind, before, first)
            received.append(both[:, :, 0] if z.ndim == 2 else resample(_image(z, both), _size(z)))
        else:
            received.append(sum_at_size_of(z, first, _mix(behind, before)))
    return tuple(received)


def _mix(weights: Tensor, channels: Tensor, more: Tensor | None = None) -> Tensor:
    """``weights channels + more``, channels-last in memory where ``channels`` is."""
    turned = channels.stride(1) == 1 and channels.shape[1] > 1
    pair = (channels.mT, weights.mT) if turned else (weights, channels)
    if more is None:
        mixed = matrix_product(torch.bmm, *pair)
    else:
        mixed = matrix_product(torch.baddbmm, more.mT if turned else more, *pair)
    return mixed.mT if turned else mixed


def sum_at_size_of(z: Tensor, one: Tensor, other: Tensor, factor: float = 1.0) -> Tensor:
    """``factor`` times the sum of two matrices ``(B, C, pixels)`` at the size of ``z``, added where they have fewer."""
    if z.ndim == 2:
        return factor * (one + other)[:, :, 0]
    coarse, fine = sorted((_image(z, one), _image(z, other)), key=lambda image: image.shape[2])
    if not _divides(_size(coarse), _size(fine)):
        coarse, fine = resample(coarse, _size(z)), resample(fine, _size(z))
    return resample(factor * (fine + resample(coarse, _size(fine))), _size(z))


def _image(z: Tensor, matrix: Tensor) -> Tensor:
    """A matrix ``(B, C, pixels)`` as an image of the proportions of ``z``."""
    height, width = _size(z)
    factor = math.isqrt(height * width // matrix.shape[2])
    return matrix.reshape(*matrix.shape[:2], height // factor, width // factor)


@cache
def ring_norm(sizes: tuple[int, ...]) -> float:
    """The norm of the mean over the neighbours in a ring, ``z -> 1/2 (P z_{i+1} + P z_{i-1})``.

    P, which averages over squares of ``k`` pixels or does the adjoint, has norm ``1/k``. The norm of a block matrix is
    at most that of the matrix of its blocks' norms; constant images attain it here.

    >>> ring_norm((32, 32, 32)), round(ring_norm((32, 16, 8, 4)), 2)
    (1.0, 0.42)
    """
    norms = np.zeros((len(sizes), len(sizes)))  # not of torch: for an exporter it is a constant
    for index, size in enumerate(sizes):
        after = (index + 1) % len(sizes)
        share = min(size, sizes[after]) / max(size, sizes[after]) / 2
        norms[index, after] += share
        norms[after, index] += share
    return float(np.linalg.norm(norms, ord=2))


def largest_neighbours(features: Features) -> Features:
    """For each branch the largest channel of its neighbours, in every channel, divided by ``sqrt(C)``.

    Signs alternate from channel to channel, to avoid special directions of maps that mix channels. A smoothed D is
    stiff in these directions.
    """
    check_features(features)
    count, found = len(features), []
    for index, z in enumerate(features):
        around = [features[(index + 1) % count], features[index - 1]]
        if z.ndim == 4:
            around = [resample(other, (z.shape[2], z.shape[3])) for other in around]
        channels = torch.cat([other.flatten(2) if z.ndim == 4 else other[:, :, None] for other in around], dim=1)
        norms = torch.linalg.vector_norm(channels, dim=2, dtype=working_dtype(channels.dtype))
        largest = channels.gather(1, norms.argmax(dim=1)[:, None, None].expand(-1, 1, channels.shape[2]))
        signs = 1 - 2 * (torch.arange(z.shape[1], device=z.device) % 2).to(z.dtype)
        found.append((largest * signs[:, None] / math.sqrt(z.shape[1])).reshape(z.shape))
    return tuple(found)
