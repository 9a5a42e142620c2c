"""Independent features: the Hilbert-Schmidt independence criterion of all pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from opteq.common.validate import positive, whole
from opteq.regularizers.base import (
    Regularizer,
    batch_shares,
    check_direction,
    chunk_size,
    exact_products,
    working_copy,
)
from opteq.regularizers.random_fourier import RandomFourier


@dataclass(frozen=True)
class HSIC(Regularizer):
    """``R(Z) = sum_{i<j} HSIC(Z_i, Z_j)``: features that are independent, not only uncorrelated.

    ``HSIC(X, Y) = tr(K_X H K_Y H) / (B - 1)^2`` with the Gaussian kernel ``exp(-|x_b - x_c|^2 / (2 s^2))``
    between samples and ``H = I - 11'/B``. Feature i is ``z[:, i]``: one value per sample, or, for images, a
    vector of all its pixels. With ``K~_i = H K_i H`` and ``S = sum_i K~_i`` all pairs come at once, in time
    O(m B^2) instead of O(m^2 B^2)::

        R = (|S|_F^2 - sum_i |K~_i|_F^2) / (2 (B - 1)^2)
        grad R at Z_ib = -2 / ((B - 1)^2 s^2) sum_c [(S - K~_i) * K_i]_bc (Z_ib - Z_ic)

    R is not convex. A batch of one sample shows no dependence: R is then zero. ``gradient`` and ``curvature``
    keep the kernel matrices of a few features at a time; differentiating ``value`` by autograd keeps all m of
    them.

    Args:
        bandwidth: s, in the units of the features. OptEq does not state one; 1 suits features of unit
            variance. For images distances grow like the root of the number of pixels, and so should s.
        features: None for the exact sum. A number D for random Fourier features: the mean over D random
            functions of each feature, an unbiased estimate whose error falls as ``1 / sqrt(D)``. It takes
            time O(D m^2 B) and holds no B x B matrix: for batches larger than D m.
        seed: Chooses the random functions. They are the same in every call and on every device: an
            equilibrium needs one fixed function.

    >>> z = torch.tensor([[0.0, 1.0], [1.0, 0.0], [3.0, 2.0]])  # three samples of two features
    >>> print(f"{HSIC().value(z).sum():.6f}")
    0.224343
    """

    bandwidth: float = 1.0
    features: int | None = None
    seed: int = 0

    name: ClassVar[str] = "hsic"
    convex: ClassVar[bool] = False
    smooth: ClassVar[bool] = True
    couples_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive(self, "bandwidth")
        if self.features is not None:
            whole(self, "features", least=1)
        whole(self, "seed", least=0)
        if self.features is None and self.seed:
            raise ValueError(f"HSIC.seed draws random features, so it needs features; got seed={self.seed}")

    def value(self, z: Tensor) -> Tensor:
        with exact_products(z):
            return batch_shares(self._form().value(_samples(z)), z)

    def gradient(self, z: Tensor) -> Tensor:
        with exact_products(z):
            return _unsamples(self._form().gradient(_samples(z)), z)

    def curvature(self, z: Tensor, v: Tensor) -> Tensor:
        check_direction(z, v)
        with exact_products(z):
            return _unsamples(self._form().curvature(_samples(z), _samples(v)), z)

    def _form(self) -> ExactSum | RandomFourier:
        if self.features is None:
            return ExactSum(self.bandwidth)
        return RandomFourier(self.bandwidth, self.features, self.seed)


@dataclass(frozen=True)
class ExactSum:
    """The sum over pairs from kernel matrices, some features at a time; ``x``, ``v`` centred, ``(m, B, P)``."""

    bandwidth: float

    def value(self, x: Tensor) -> Tensor:
        """``sum_{i<j} HSIC``, a scalar."""
        total = x.new_zeros(x.shape[1], x.shape[1])
        squares = x.new_zeros(())
        for (part,) in _chunks(x):
            kernel = _centre(self._kernel(part))
            total = total + kernel.sum(0)
            squares = squares + kernel.square().sum()
        return (total.square().sum() - squares) * self._scale(x) / 2

    def gradient(self, x: Tensor) -> Tensor:
        """Its gradient, ``(m, B, P)``."""
        total = x.new_zeros(x.shape[1], x.shape[1])
        for (part,) in _chunks(x):
            total = total + _centre(self._kernel(part)).sum(0)
        answer = []
        for (part,) in _chunks(x):
            kernel = self._kernel(part)
            answer.append(_laplacian((total - _centre(kernel)) * kernel, part))
        return torch.cat(answer) * (-2 * self._scale(x) / self.bandwidth**2)

    def curvature(self, x: Tensor, v: Tensor) -> Tensor:
        """Its Hessian times ``v``, ``(m, B, P)``."""
        # `d_...` is the derivative of the quantity of that name along v.
        total = x.new_zeros(x.shape[1], x.shape[1])
        d_total = torch.zeros_like(total)
        for part, d_part in _chunks(x, v):
            kernel = self._kernel(part)
            total = total + _centre(kernel).sum(0)
            d_total = d_total + _centre(self._d_kernel(kernel, part, d_part)).sum(0)
        answer = []
        for part, d_part in _chunks(x, v):
            kernel = self._kernel(part)
            d_kernel = self._d_kernel(kernel, part, d_part)
            others, d_others = total - _centre(kernel), d_total - _centre(d_kernel)
            d_weights = d_others * kernel + others * d_kernel
            answer.append(_laplacian(d_weights, part) + _laplacian(others * kernel, d_part))
        return torch.cat(answer) * (-2 * self._scale(x) / self.bandwidth**2)

    def _kernel(self, x: Tensor) -> Tensor:
        return torch.exp(_products_of_differences(x, x) / (-2 * self.bandwidth**2))

    def _d_kernel(self, kernel: Tensor, x: Tensor, v: Tensor) -> Tensor:
        return kernel * _products_of_differences(x, v) / -(self.bandwidth**2)

    def _scale(self, x: Tensor) -> float:
        return 1 / max(x.shape[1] - 1, 1) ** 2


def _samples(z: Tensor) -> Tensor:
    """``(B, m, ...)`` as ``(m, B, P)``, each feature with its mean over the batch taken off.

    HSIC does not depend on the mean; taking it off makes that true of the random estimate too, and keeps digits
    that distances computed from inner products would lose.
    """
    rows = working_copy(z, least_dims=2).transpose(0, 1)
    rows = rows.flatten(2) if rows.dim() > 2 else rows.unsqueeze(2)
    return rows - rows.mean(1, keepdim=True)


def _unsamples(rows: Tensor, like: Tensor) -> Tensor:
    """The adjoint of :func:`_samples`, so that it carries derivatives back; the dtype of ``like``."""
    rows = rows - rows.mean(1, keepdim=True)
    return rows.reshape(like.transpose(0, 1).shape).transpose(0, 1).to(like.dtype)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    batch = tensors[0].shape[1]
    some = chunk_size(batch * batch)
    return zip(*(torch.split(tensor, some) for tensor in tensors), strict=True)


def _products_of_differences(x: Tensor, v: Tensor) -> Tensor:
    """``<x_b - x_c, v_b - v_c>`` for all pairs of samples, ``(k, B, B)``: squared distances if ``v = x``."""
    if x.shape[2] == 1:
        return (x - x.mT) * (v - v.mT)  # numbers: subtract them, which loses no digits
    products = x @ v.mT
    own = products.diagonal(dim1=1, dim2=2)
    return own.unsqueeze(1) + own.unsqueeze(2) - products - products.mT


def _centre(kernel: Tensor) -> Tensor:
    """``H K H`` of symmetric matrices."""
    mean = kernel.mean(2, keepdim=True)
    return kernel - mean - mean.mT + mean.mean(1, keepdim=True)


def _laplacian(weights: Tensor, x: Tensor) -> Tensor:
    """``sum_c weights_bc (x_b - x_c)``."""
    return weights.sum(2, keepdim=True) * x - weights @ x
