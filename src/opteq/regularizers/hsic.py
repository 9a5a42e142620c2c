"""Independent features: the Hilbert-Schmidt independence criterion of all pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from opteq.common.validate import positive
from opteq.regularizers.base import Regularizer, batch_shares, working_copy
from opteq.states import Autocast

# Elements of the largest temporary: 64 MiB in float32, enough to keep a GPU busy and little compared with the
# activations of a network.
_CHUNK = 2**24


@dataclass(frozen=True)
class HSIC(Regularizer):
    """``R(Z) = sum_{i<j} HSIC(Z_i, Z_j)``: features that are independent, not only uncorrelated.

    ``HSIC(X, Y) = tr(K_X H K_Y H) / (B - 1)^2`` with the Gaussian kernel ``exp(-|x_b - x_c|^2 / (2 s^2 P))``
    between samples and ``H = I - 11'/B``. Feature i is ``z[:, i]``: one value per sample, or, for images, a
    vector of all its pixels; P is their number. With ``K~_i = H K_i H`` and ``S = sum_i K~_i`` all pairs come at
    once, in time O(m B^2) instead of O(m^2 B^2)::

        R = (|S|_F^2 - sum_i |K~_i|_F^2) / (2 (B - 1)^2)
        grad R at Z_ib = -2 / ((B - 1)^2 s^2 P) sum_c [(S - K~_i) * K_i]_bc (Z_ib - Z_ic)

    R is not convex. A batch of one sample shows no dependence: R is then zero. ``gradient`` keeps the kernel matrices
    of a few features at a time; autograd keeps all m of them.

    Args:
        bandwidth: s, in the units of a pixel's value. OptEq does not state one; 1 suits features of unit
            variance. (A distance between images grows like the root of P. Without it in the kernel, all images
            would be infinitely far apart, and R a constant.)

    >>> z = torch.tensor([[0.0, 1.0], [1.0, 0.0], [3.0, 2.0]])  # three samples of two features
    >>> print(f"{HSIC().value(z).sum():.6f}")
    0.224343
    """

    bandwidth: float = 1.0

    name: ClassVar[str] = "hsic"
    convex: ClassVar[bool] = False
    smooth: ClassVar[bool] = True
    couples_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive(self, "bandwidth")

    def value(self, z: Tensor) -> Tensor:
        with Autocast.current(z.device).off():
            x = _samples(z)
            total, squares = x.new_zeros(x.shape[1], x.shape[1]), x.new_zeros(())
            for part in _chunks(x):
                kernel = _centre(self._kernel(part))
                total = total + kernel.sum(0)
                squares = squares + kernel.square().sum()
            return batch_shares((total.square().sum() - squares) * self._scale(x) / 2, z)

    def gradient(self, z: Tensor) -> Tensor:
        with Autocast.current(z.device).off():
            x = _samples(z)
            total = x.new_zeros(x.shape[1], x.shape[1])
            for part in _chunks(x):
                total = total + _centre(self._kernel(part)).sum(0)
            answer = []
            for part in _chunks(x):
                kernel = self._kernel(part)
                weights = (total - _centre(kernel)) * kernel
                answer.append(weights.sum(2, keepdim=True) * part - weights @ part)
            return _unsamples(torch.cat(answer) * (-2 * self._scale(x) / (self.bandwidth**2 * x.shape[2])), z)

    def _kernel(self, x: Tensor) -> Tensor:
        return torch.exp(_squared_distances(x) / (-2 * self.bandwidth**2 * x.shape[2]))

    def _scale(self, x: Tensor) -> float:
        return 1 / max(x.shape[1] - 1, 1) ** 2


def _samples(z: Tensor) -> Tensor:
    """``(B, m, ...)`` as ``(m, B, P)``, each feature with its mean over the batch taken off.

    HSIC does not depend on the mean; taking it off keeps digits that distances from inner products would lose.
    """
    rows = working_copy(z, least_dims=2).transpose(0, 1)
    rows = rows.flatten(2) if rows.dim() > 2 else rows.unsqueeze(2)
    return rows - rows.mean(1, keepdim=True)


def _unsamples(rows: Tensor, like: Tensor) -> Tensor:
    """The adjoint of :func:`_samples`, so that it carries derivatives back; the dtype of ``like``."""
    rows = rows - rows.mean(1, keepdim=True)
    return rows.reshape(like.transpose(0, 1).shape).transpose(0, 1).to(like.dtype)


def _chunks(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, max(1, _CHUNK // max(x.shape[1] ** 2, 1)))


def _squared_distances(x: Tensor) -> Tensor:
    """``|x_b - x_c|^2`` for all pairs of samples, ``(k, B, B)``."""
    if x.shape[2] == 1:
        return (x - x.mT).square()  # numbers: subtract them, which loses no digits
    products = x @ x.mT
    own = products.diagonal(dim1=1, dim2=2)
    return own.unsqueeze(1) + own.unsqueeze(2) - products - products.mT


def _centre(kernel: Tensor) -> Tensor:
    """``H K H`` of symmetric matrices."""
    mean = kernel.mean(2, keepdim=True)
    return kernel - mean - mean.mT + mean.mean(1, keepdim=True)
