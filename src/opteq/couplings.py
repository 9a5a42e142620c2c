"""What ties the branches of MOptEq together: heritage H, diversity D, and the fusion that follows from them.

Branches stand in a ring, each beside the next and the last beside the first. For two neighbours, with channels
compared pixel by pixel at the coarser of their two sizes,

    M[a, b] = <channel a of one, channel b of the other>
    H = sum of the diagonal of M          (corresponding channels resemble each other)
    D = sum of |M| off the diagonal       (different channels say different things)

and the energy of the ring is ``E = 1/2 sum over neighbours of (lambda D - H)``. Its gradient is what MOptEq computes
between branches: the fusion ``h = -grad E``.

Features are tuples with a tensor a branch, pictures ``(B, C, h, w)`` or vectors ``(B, C)``; a vector is a picture
of one pixel. All have C channels, and the sizes of neighbours are whole multiples of each other. Resampling is
average pooling one way and its exact adjoint the other way, so it does not matter which of two neighbours is brought to
the size of which: the inner products are the same, and the coarser size is the cheaper one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from opteq.common.precision import matrix_product
from opteq.operators import resample
from opteq.states import sum_over_sample, working_dtype

Features = tuple[Tensor, ...]
Pairs = list[tuple[Tensor, Tensor]]


def heritage(features: Features) -> Tensor:
    """``H(z_i, z_{i+1}) = <z_i, P z_{i+1}>`` around the ring, ``(L, B)`` for L branches.

    >>> heritage((torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])))
    tensor([[11.],
            [11.]])
    """
    return _heritage(meetings(features))


def diversity(features: Features, smoothing: float = 0.0) -> Tensor:
    """``D(z_i, z_{i+1}) = sum over a != b of |M[a, b]|`` around the ring, ``(L, B)`` for L branches.

    Args:
        features: one tensor a branch.
        smoothing: tau in ``sqrt(M^2 + tau^2)``, which replaces ``|M|``.

    >>> diversity((torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -4.0]])))
    tensor([[10.],
            [10.]])
    """
    return torch.stack([_total(matrix, smoothing) for matrix in products(features)])


def products(features: Features) -> tuple[Tensor, ...]:
    """The matrices ``M`` of each branch (rows) with the next (columns), ``(B, C, C)`` each."""
    return _products(meetings(features))


def augmented_loss(features: Features, diversity: float, smoothing: float = 0.0, normalised: bool = False) -> Tensor:
    """``sum over neighbours of (lambda D - H)``, averaged over the batch: a term for a training loss.

    As it is, longer features make H larger without end: the term is unbounded below. With ``normalised`` every branch
    has length 1 in each sample first, so that H is a cosine and the term at least minus the number of branches.

    It asks of a network without the fusion, such as POptEq, by training what MOptEq does by construction; the paper
    compares the two. Add it with a weight. (The paper prints it with the opposite sign, which would reward what
    its objective punishes.)

    Args:
        features: one tensor a branch.
        diversity: lambda.
        smoothing: tau, see :func:`diversity`.
        normalised: bring the features of every branch to length 1, per sample.
    """
    coupling = Coupling(diversity, smoothing)
    if normalised:
        features = tuple(_of_length_one(z) for z in features)
    return 2 * torch.stack(list(coupling.terms(features).values())).sum(dim=0).mean()


def _of_length_one(z: Tensor) -> Tensor:
    """``z / |z|`` per sample, resampled branches included; a sample of zeros stays zero."""
    wide = z.to(working_dtype(z.dtype))
    length = sum_over_sample(wide.square()).clamp_min(torch.finfo(wide.dtype).tiny ** 0.5).sqrt()
    return wide / length.reshape(-1, *[1] * (z.ndim - 1))


@dataclass(frozen=True)
class Coupling:
    """The energy ``E`` of a ring of branches, minus its gradient ``h``, and the derivative of h.

    Args:
        diversity: the weight lambda of D.
        smoothing: tau. D has kinks where a product M is zero, and h jumps there; ``sqrt(M^2 + tau^2)`` in place of
            ``|M|`` turns the jump into a slope of up to ``lambda |channel|^2 / tau``. 0 keeps the kinks.
        heritage: whether there is an H. Without it every branch has ``-1/2 |z_i|^2`` in its place, as in OptEq:
            nothing in place of H would leave a network without feedback where lambda is 0.

    >>> coupling = Coupling(diversity=0.1)
    >>> coupling.fuse((torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])))
    (tensor([[2.6000, 3.7000]]), tensor([[0.8000, 1.9000]]))
    """

    diversity: float = 0.0
    smoothing: float = 0.0
    heritage: bool = True

    def __post_init__(self) -> None:
        for field in ("diversity", "smoothing"):
            check_not_negative(field, getattr(self, field))
        if not isinstance(self.heritage, bool):
            raise TypeError(f"heritage should be True or False; got {self.heritage!r}")

    @property
    def ties_branches(self) -> bool:
        """Whether branches depend on each other at all."""
        return self.heritage or self.diversity > 0

    def curvature_bound(self, channels: int, sizes: Sequence[int] | None = None) -> float:
        """A bound on the norm of the derivative of h where signs are fixed: ``rho (1 + lambda (C - 1))``.

        For branches of one size rho is 1, and the bound is attained where all products off the diagonal are negative.
        Resampling between neighbours shrinks it: see :func:`ring_norm`. Without heritage ``1 + rho lambda (C - 1)``.

        Args:
            channels: C.
            sizes: height of each branch's features; None takes 1 for rho, which is right for any.
        """
        rho = 1.0 if sizes is None else ring_norm(tuple(sizes))
        different = self.diversity * (channels - 1)
        return rho * (1 + different) if self.heritage else 1 + rho * different

    def terms(self, features: Features) -> dict[str, Tensor]:
        """The parts of ``E``, one number a sample each: heritage (or self) and, where lambda is not 0, diversity."""
        pairs = meetings(features)
        return self._terms(features, pairs, _products(pairs) if self.diversity else ())

    def fuse_and_energy(self, features: Features) -> tuple[Features, Tensor]:
        """``h`` and ``E``, from the same products of channels; lambda is not 0."""
        pairs = meetings(features)
        matrices = _products(pairs)
        fused = self._spread(features, pairs, tuple(self._weights(self.signs(matrix)) for matrix in matrices))
        return fused, torch.stack(list(self._terms(features, pairs, matrices).values())).sum(dim=0)

    def _terms(self, features: Features, pairs: Pairs, matrices: tuple[Tensor, ...]) -> dict[str, Tensor]:
        if self.heritage:
            terms = {"heritage": -_heritage(pairs).sum(dim=0) / 2}
        else:
            squares = [sum_over_sample(z.to(working_dtype(z.dtype)).square()) for z in features]
            terms = {"self": -torch.stack(squares).sum(dim=0) / 2}
        if self.diversity:
            totals = [_total(matrix, self.smoothing) for matrix in matrices]
            terms["diversity"] = self.diversity / 2 * torch.stack(totals).sum(dim=0)
        return terms

    def signs(self, matrix: Tensor) -> Tensor:
        """The derivative of ``|M|`` (or of what replaces it), zero on the diagonal, of the dtype of ``matrix``."""
        if not self.smoothing:
            # Its derivative is zero wherever it has one: without the tape, no products with zeros are computed.
            signs = torch.sign(matrix.detach())
            signs.diagonal(dim1=-2, dim2=-1).zero_()
            return signs
        wide = _finite(matrix)
        return _off_diagonal(wide / _root(wide, self.smoothing)).to(matrix.dtype)

    def fuse(self, features: Features, signs: tuple[Tensor, ...] | None = None) -> Features:
        """``h = -grad E``, one tensor a branch.

        Args:
            features: one tensor a branch.
            signs: matrices ``(B, C, C)`` in place of the derivative of ``|M|``: at a kink any number of [-1, 1] is one.
        """
        if not self.ties_branches:
            return features
        pairs = meetings(features)
        if not self.diversity:
            return tuple(
                (_at_size_of(z, pairs[index][1]) + _at_size_of(z, pairs[index - 1][0])) / 2
                for index, z in enumerate(features)
            )
        if signs is None:
            signs = tuple(self.signs(matrix) for matrix in _products(pairs))
        return self._spread(features, pairs, tuple(self._weights(matrix) for matrix in signs))

    def jacobian_at(self, features: Features) -> Callable[[Features], Features]:
        """``v -> h'(z) v``, symmetric; matrices are computed once for all products.

        With fixed signs h is linear, so that is ``fuse`` again; smoothing adds the derivative of the signs.
        """
        if not self.diversity:
            return self.fuse
        here = meetings(features)
        matrices = _products(here)
        weights = tuple(self._weights(self.signs(matrix)) for matrix in matrices)
        slopes = tuple(self._slope(matrix) for matrix in matrices) if self.smoothing else ()

        def product(v: Features) -> Features:
            there = meetings(v)
            straight = self._spread(v, there, weights)
            if not self.smoothing:
                return straight
            changes = _change(here, there)
            moves = tuple((slope * _finite(d)).to(d.dtype) for slope, d in zip(slopes, changes, strict=True))
            return tuple(u + w for u, w in zip(straight, self._turn(features, here, moves), strict=True))

        return product

    def turn(self, features: Features, matrices: tuple[Tensor, ...]) -> Features:
        """What a change of the signs by ``matrices`` adds to ``fuse(features)``.

        That is -lambda/2 times the adjoint of :func:`change`.
        """
        return self._turn(features, meetings(features), matrices)

    def _turn(self, features: Features, pairs: Pairs, matrices: tuple[Tensor, ...]) -> Features:
        return _hand_out(features, pairs, tuple(-self.diversity / 2 * matrix for matrix in matrices))

    def _weights(self, signs: Tensor) -> Tensor:
        """``(I - lambda signs) / 2``, without the I where there is no heritage; so heritage costs no product."""
        if not self.heritage:
            return -self.diversity / 2 * signs
        own = torch.eye(signs.shape[-1], dtype=signs.dtype, device=signs.device)
        return torch.add(0.5 * own, signs, alpha=-self.diversity / 2)  # not in place, which exporters refuse

    def _spread(self, features: Features, pairs: Pairs, weights: tuple[Tensor, ...]) -> Features:
        handed = _hand_out(features, pairs, weights)
        return handed if self.heritage else tuple(z + share for z, share in zip(features, handed, strict=True))

    def _slope(self, matrix: Tensor) -> Tensor:
        """The second derivative of ``sqrt(M^2 + tau^2)``, ``tau^2 / (M^2 + tau^2)^(3/2)``, in float32 or better."""
        wide = _finite(matrix)
        root = _root(wide, self.smoothing)
        return _off_diagonal((self.smoothing / root).square() / root)


@cache
def ring_norm(sizes: tuple[int, ...]) -> float:
    """The norm of what neighbours in a ring hand each other, ``z -> 1/2 (P z_{i+1} + P z_{i-1})``.

    P, which averages over squares of ``k`` pixels or does the adjoint, has norm ``1/k``. The norm of a block matrix is
    at most that of the matrix of its blocks' norms, which here is attained: by constant pictures.

    >>> ring_norm((32, 32, 32)), round(ring_norm((32, 16, 8, 4)), 2)
    (1.0, 0.42)
    """
    norms = np.zeros((len(sizes), len(sizes)))  # not of torch: for an exporter it is a constant
    for index, size in enumerate(sizes):
        after = (index + 1) % len(sizes)
        handed = min(size, sizes[after]) / max(size, sizes[after]) / 2
        norms[index, after] += handed
        norms[after, index] += handed
    return float(np.linalg.norm(norms, ord=2))


def change(features: Features, v: Features) -> tuple[Tensor, ...]:
    """The derivative of :func:`products` at ``features`` in the direction ``v``."""
    return _change(meetings(features), meetings(v))


def _change(here: Pairs, there: Pairs) -> tuple[Tensor, ...]:
    first = [(u, b) for (_, b), (u, _) in zip(here, there, strict=True)]
    second = [(a, w) for (a, _), (_, w) in zip(here, there, strict=True)]
    sums = zip(_products(first), second, strict=True)
    return tuple(matrix_product(torch.baddbmm, total, a, w.mT) for total, (a, w) in sums)


def largest_neighbours(features: Features) -> Features:
    """For each branch the largest channel of its neighbours, in every channel, divided by ``sqrt(C)``.

    Signs alternate from channel to channel, so that a map that mixes channels meets no special direction. These are
    the directions in which a smoothed D is stiff.
    """
    check_features(features)
    count, found = len(features), []
    for index, z in enumerate(features):
        around = [features[(index + 1) % count], features[index - 1]]
        if z.ndim == 4:
            around = [resample(other, (z.shape[2], z.shape[3])) for other in around]
        channels = torch.cat([other.flatten(2) if z.ndim == 4 else other[:, :, None] for other in around], dim=1)
        sizes = torch.linalg.vector_norm(channels, dim=2, dtype=working_dtype(channels.dtype))
        chosen = channels.gather(1, sizes.argmax(dim=1)[:, None, None].expand(-1, 1, channels.shape[2]))
        signs = 1 - 2 * (torch.arange(z.shape[1], device=z.device) % 2).to(z.dtype)
        found.append((chosen * signs[:, None] / math.sqrt(z.shape[1])).reshape(z.shape))
    return tuple(found)


def check_features(features: Features) -> None:
    """Raise unless ``features`` is a ring of pictures, or of vectors, with the same channels."""
    if not isinstance(features, tuple) or not features:
        raise TypeError(f"features should be a tuple with a tensor a branch; got {type(features).__name__}")
    shapes = [tuple(z.shape) for z in features]
    if len({len(shape) for shape in shapes}) > 1 or len(shapes[0]) not in (2, 4):
        raise ValueError(
            f"the features of all branches should be pictures (B, C, h, w), or all vectors (B, C); got {shapes}"
        )
    if any(shape[:2] != shapes[0][:2] for shape in shapes):
        raise ValueError(
            f"the features of all branches should have the same batch and the same number of channels, since channels "
            f"are compared one by one; got {shapes}"
        )


def check_not_negative(name: str, value: object) -> float:
    """``value`` as a float if it is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} should be a number of at least 0; got {value!r}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} should be at least 0 and finite; got {value!r}")
    return float(value)


def meetings(features: Features) -> Pairs:
    """Each branch and the next as matrices ``(B, C, pixels)`` at the coarser of their sizes."""
    check_features(features)
    return [_meet(z, features[(index + 1) % len(features)]) for index, z in enumerate(features)]


def _meet(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    if first.ndim == 2:
        return first[:, :, None], second[:, :, None]
    if first.shape[2] > second.shape[2]:
        first = resample(first, (second.shape[2], second.shape[3]))
    else:
        second = resample(second, (first.shape[2], first.shape[3]))
    return first.flatten(2), second.flatten(2)


def _heritage(pairs: Pairs) -> Tensor:
    return torch.stack([sum_over_sample(a.to(working_dtype(a.dtype)) * b) for a, b in pairs])


def _products(pairs: Pairs) -> tuple[Tensor, ...]:
    return tuple(matrix_product(torch.bmm, a, b.mT) for a, b in pairs)


def _hand_out(features: Features, pairs: Pairs, weights: tuple[Tensor, ...]) -> Features:
    """What each branch gets from its two meetings, at its own size: ``weights`` times the other's channels.

    In the meeting of branch i with the next, branch i gets ``weights[i]`` times the next one's channels, and the next
    one gets the transpose times those of branch i.
    """
    handed = []
    for index, z in enumerate(features):
        after, ahead = pairs[index][1], weights[index]
        before, behind = pairs[index - 1][0], weights[index - 1].mT
        share = _mixed(ahead, after)
        if before.shape == after.shape:  # the two meetings have one size: add the second where the first is
            handed.append(_at_size_of(z, _mixed(behind, before, share)))
        else:
            handed.append(_at_size_of(z, share) + _at_size_of(z, _mixed(behind, before)))
    return tuple(handed)


def _mixed(weights: Tensor, channels: Tensor, more: Tensor | None = None) -> Tensor:
    """``weights channels + more``, with channels next to each other in memory where those of ``channels`` are."""
    if channels.stride(1) == 1 and channels.shape[1] > 1:
        return _mixed_plainly(channels.mT, weights.mT, None if more is None else more.mT).mT
    return _mixed_plainly(weights, channels, more)


def _mixed_plainly(left: Tensor, right: Tensor, more: Tensor | None) -> Tensor:
    if more is None:
        return matrix_product(torch.bmm, left, right)
    return matrix_product(torch.baddbmm, more, left, right)


def _at_size_of(z: Tensor, matrix: Tensor) -> Tensor:
    if z.ndim == 2:
        return matrix[:, :, 0]
    height, width = z.shape[2], z.shape[3]
    factor = math.isqrt(height * width // matrix.shape[2])
    picture = matrix.reshape(*matrix.shape[:2], height // factor, width // factor)
    return resample(picture, (height, width))


def _total(matrix: Tensor, smoothing: float) -> Tensor:
    wide = _finite(matrix)
    sizes = _root(wide, smoothing) if smoothing else wide.abs()
    return sum_over_sample(_off_diagonal(sizes))


def _root(matrix: Tensor, smoothing: float) -> Tensor:
    """``sqrt(M^2 + tau^2)`` without squaring, which would overflow where M itself does not."""
    return torch.hypot(matrix, torch.full_like(matrix, smoothing))


def _finite(matrix: Tensor) -> Tensor:
    """``matrix`` in float32 or better, with overflown sums of products put back to the largest number of its dtype."""
    limit = torch.finfo(matrix.dtype).max
    return matrix.to(working_dtype(matrix.dtype)).clamp(-limit, limit)


def _off_diagonal(matrix: Tensor) -> Tensor:
    eye = torch.eye(matrix.shape[-1], dtype=torch.bool, device=matrix.device)
    return matrix.masked_fill(eye, 0)
