"""The energy of a ring of branches, its gradient and its Hessian: heritage and diversity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.common.validate import check_flag, check_not_negative, not_negative
from opteq.couplings.ring import (
    Features,
    Pairs,
    channel_products,
    mix_neighbours,
    neighbours,
    pairs_derivative,
    products,
    ring_norm,
    sum_at_size_of,
)
from opteq.states import sum_over_sample, working_dtype


def heritage(features: Features) -> Tensor:
    """``H(z_i, z_{i+1}) = <z_i, P z_{i+1}>`` around the ring, ``(L, B)`` for L branches.

    >>> heritage((torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])))
    tensor([[11.],
            [11.]])
    """
    return _heritage(neighbours(features))


def diversity(features: Features, smoothing: float = 0.0) -> Tensor:
    """``D(z_i, z_{i+1}) = sum over a != b of |M[a, b]|`` around the ring, ``(L, B)`` for L branches.

    With ``smoothing`` tau, ``sqrt(M^2 + tau^2)`` replaces ``|M|``.

    >>> diversity((torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -4.0]])))
    tensor([[10.],
            [10.]])
    """
    check_not_negative("smoothing", smoothing)
    return torch.stack([_diversity(matrix, smoothing) for matrix in products(features)])


@dataclass(frozen=True)
class Coupling:
    """The energy ``E`` of a ring of branches, minus its gradient ``h``, and the derivative of h.

    Args:
        diversity: the weight lambda of D.
        smoothing: tau. D has kinks where a product M is zero, and h jumps there; ``sqrt(M^2 + tau^2)`` in place of
            ``|M|`` turns the jump into a slope of up to ``lambda |channel|^2 / tau``. 0 keeps the kinks.
        heritage: whether E contains H. Without it every branch has ``-1/2 |z_i|^2`` instead, as in OptEq; otherwise a
            network with lambda 0 would have no feedback.

    >>> coupling = Coupling(diversity=0.1)
    >>> coupling.negative_gradient((torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])))
    (tensor([[2.6000, 3.7000]]), tensor([[0.8000, 1.9000]]))
    """

    diversity: float = 0.0
    smoothing: float = 0.0
    heritage: bool = True

    def __post_init__(self) -> None:
        not_negative(self, "diversity")
        not_negative(self, "smoothing")
        check_flag("Coupling.heritage", self.heritage)

    @property
    def ties_branches(self) -> bool:
        """Whether branches depend on each other at all."""
        return self.heritage or self.diversity > 0

    def curvature_bound(self, channels: int, sizes: Sequence[int] | None = None) -> float:
        """A bound on the norm of the derivative of h where signs are fixed: ``rho (1 + lambda (C - 1))``.

        For branches of one size rho is 1, and the bound is attained where all products off the diagonal are negative.
        Resampling between neighbours shrinks it: see :func:`ring_norm`. Without heritage ``1 + rho lambda (C - 1)``.

        ``sizes`` are the heights of the branches' features; None takes 1 for rho, which is right for any.
        """
        rho = 1.0 if sizes is None else ring_norm(tuple(sizes))
        different = self.diversity * (channels - 1)
        return rho * (1 + different) if self.heritage else 1 + rho * different

    def terms(self, features: Features) -> dict[str, Tensor]:
        """The parts of ``E``, one value per sample each: heritage (or self) and, where lambda is not 0, diversity."""
        pairs = neighbours(features)
        return self._terms(features, pairs, channel_products(pairs) if self.diversity else ())

    def negative_gradient_and_energy(self, features: Features) -> tuple[Features, Tensor]:
        """``h`` and ``E``, from the same products of channels; lambda is not 0."""
        pairs = neighbours(features)
        matrices = channel_products(pairs)
        h = self._negative_gradient(features, pairs, tuple(self.signs(matrix) for matrix in matrices))
        return h, torch.stack(list(self._terms(features, pairs, matrices).values())).sum(dim=0)

    def signs(self, matrix: Tensor) -> Tensor:
        """The derivative of ``|M|`` (or of what replaces it), zero on the diagonal, in the dtype of ``matrix``."""
        if not self.smoothing:
            # Its derivative is zero wherever it has one: without autograd, no products with zeros are computed.
            signs = torch.sign(matrix.detach())
            signs.diagonal(dim1=-2, dim2=-1).zero_()
            return signs
        wide = _finite(matrix)
        return _off_diagonal(wide / _smooth_abs(wide, self.smoothing)).to(matrix.dtype)

    def negative_gradient(self, features: Features, signs: tuple[Tensor, ...] | None = None) -> Features:
        """``h = -grad E``, one tensor per branch.

        ``signs (B, C, C)`` take the place of the derivative of ``|M|``: at a kink any number of [-1, 1] is one.
        """
        if not self.ties_branches:
            return features
        pairs = neighbours(features)
        if not self.diversity:
            return tuple(
                sum_at_size_of(z, pairs[index][1], pairs[index - 1][0], 0.5) for index, z in enumerate(features)
            )
        if signs is None:
            signs = tuple(self.signs(matrix) for matrix in channel_products(pairs))
        return self._negative_gradient(features, pairs, signs)

    def jacobian_at(self, features: Features) -> Callable[[Features], Features]:
        """``v -> h'(z) v``, symmetric; matrices are computed once for all products.

        With fixed signs h is linear, so that is :meth:`negative_gradient` again; smoothing adds how the signs change.
        """
        if not self.diversity:
            return self.negative_gradient
        pairs = neighbours(features)
        matrices = channel_products(pairs)
        signs = tuple(self.signs(matrix) for matrix in matrices)
        slopes = tuple(self._sign_derivative(matrix) for matrix in matrices) if self.smoothing else ()

        def product(v: Features) -> Features:
            directions = neighbours(v)
            linear = self._negative_gradient(v, directions, signs)
            if not self.smoothing:
                return linear
            changes = pairs_derivative(pairs, directions)
            moved = tuple((slope * _finite(d)).to(d.dtype) for slope, d in zip(slopes, changes, strict=True))
            return tuple(u + w for u, w in zip(linear, self._by_signs(features, pairs, moved), strict=True))

        return product

    def _by_signs(self, features: Features, pairs: Pairs, matrices: tuple[Tensor, ...]) -> Features:
        """How ``negative_gradient(features, signs)`` changes with its signs, in the direction ``matrices``."""
        return mix_neighbours(features, pairs, tuple(-self.diversity / 2 * matrix for matrix in matrices))

    def _negative_gradient(self, features: Features, pairs: Pairs, signs: tuple[Tensor, ...]) -> Features:
        """Neighbours mixed by ``(I - lambda signs) / 2``: with I inside the matrix heritage costs no product."""
        if not self.heritage:
            mixed = self._by_signs(features, pairs, signs)
            return tuple(z + share for z, share in zip(features, mixed, strict=True))
        own = torch.eye(signs[0].shape[-1], dtype=signs[0].dtype, device=signs[0].device)
        # Not in place, which exporters refuse.
        weights = tuple(torch.add(0.5 * own, matrix, alpha=-self.diversity / 2) for matrix in signs)
        return mix_neighbours(features, pairs, weights)

    def _terms(self, features: Features, pairs: Pairs, matrices: tuple[Tensor, ...]) -> dict[str, Tensor]:
        if self.heritage:
            terms = {"heritage": -_heritage(pairs).sum(dim=0) / 2}
        else:
            squares = [sum_over_sample(z.to(working_dtype(z.dtype)).square()) for z in features]
            terms = {"self": -torch.stack(squares).sum(dim=0) / 2}
        if self.diversity:
            totals = [_diversity(matrix, self.smoothing) for matrix in matrices]
            terms["diversity"] = self.diversity / 2 * torch.stack(totals).sum(dim=0)
        return terms

    def _sign_derivative(self, matrix: Tensor) -> Tensor:
        """The second derivative of ``sqrt(M^2 + tau^2)``, ``tau^2 / (M^2 + tau^2)^(3/2)``, in float32 or better."""
        wide = _finite(matrix)
        root = _smooth_abs(wide, self.smoothing)
        return _off_diagonal((self.smoothing / root).square() / root)


def _heritage(pairs: Pairs) -> Tensor:
    return torch.stack([sum_over_sample(a.to(working_dtype(a.dtype)) * b) for a, b in pairs])


def _diversity(matrix: Tensor, smoothing: float) -> Tensor:
    wide = _finite(matrix)
    magnitudes = _smooth_abs(wide, smoothing) if smoothing else wide.abs()
    return sum_over_sample(_off_diagonal(magnitudes))


def _smooth_abs(matrix: Tensor, smoothing: float) -> Tensor:
    """``sqrt(M^2 + tau^2)`` without squaring, which would overflow where M itself does not."""
    return torch.hypot(matrix, torch.full_like(matrix, smoothing))


def _finite(matrix: Tensor) -> Tensor:
    """``matrix`` in float32 or better, with overflown sums of products clamped to the largest number of its dtype."""
    limit = torch.finfo(matrix.dtype).max
    return matrix.to(working_dtype(matrix.dtype)).clamp(-limit, limit)


def _off_diagonal(matrix: Tensor) -> Tensor:
    eye = torch.eye(matrix.shape[-1], dtype=torch.bool, device=matrix.device)
    return matrix.masked_fill(eye, 0)
