"""The interface of regularisers, and arithmetic that they share."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from opteq.common.derivatives import gradient, pullback
from opteq.common.options import NamedOptions
from opteq.states import Autocast


class Regularizer(metaclass=NamedOptions):
    """A prior R on features z.

    A hidden problem ``phi`` becomes ``phi + weight * R`` with the layer ``T(z - weight * grad R(z))``. Where R is
    not smooth there is ``T(prox_{weight R}(z))``, which minimises a slightly different
    objective, see :class:`~opteq.regularizers.Envelope`. The weight is an option of the problem, not of R.

    ``z`` has any shape; its first dimension is the batch. Low-precision features are converted to
    float32: ``value`` is float32 or better, all other results have the dtype of ``z``.

    To write your own, give the four flags and ``value``; the derivatives then follow by automatic
    differentiation:

    >>> class Quartic(Regularizer):
    ...     name, convex, smooth, couples_batch = "quartic", True, True, False
    ...     def value(self, z):
    ...         return z.pow(4).sum(1) / 4
    >>> Quartic().gradient(torch.tensor([[1.0, 2.0]]))
    tensor([[1., 8.]])
    """

    name: ClassVar[str]
    """A short name, by which :func:`opteq.regularizers.get` finds the ones that need no arguments."""
    convex: ClassVar[bool]
    """Whether R is convex: only then is a fixed point of the regularised layer a minimiser."""
    smooth: ClassVar[bool]
    """Whether R has a gradient, so that the layer ``I - weight * grad R`` makes sense; else use ``prox``."""
    couples_batch: ClassVar[bool]
    """Whether a sample's share of R depends on the other samples of the batch (correlations do, norms do not)."""

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """One value per sample, shape ``(B,)``, whose sum is R.

        Where R is a property of the whole batch, every entry is R / B.
        """

    def gradient(self, z: Tensor) -> Tensor:
        """The gradient of ``value(z).sum()``, in the shape of ``z``; a subgradient where R is not smooth."""
        return gradient(self.value, z)

    def curvature(self, z: Tensor, v: Tensor) -> Tensor:
        """The Hessian of ``value(z).sum()`` at ``z`` times ``v``, in the shape of ``z``."""
        check_direction(z, v)
        # A Hessian is symmetric, so one reverse pass through the gradient is the product that is wanted.
        with Autocast.current(z.device).off():  # those of the reverse pass, too
            return pullback(self.gradient, z)[1](v.to(z.dtype))

    def prox(self, z: Tensor, weight: float) -> Tensor:
        """``argmin_p weight * R(p) + 1/2 |p - z|^2``, for ``weight >= 0``.

        Raises:
            NotImplementedError: R has no proximal operator that could be computed; use ``gradient``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no proximal operator that can be computed in closed form; "
            "use its gradient, z - weight * gradient(z), instead"
        )

    @property
    def gradient_lipschitz(self) -> float | None:
        """The Lipschitz constant of ``gradient``, or None where it is unknown or there is none.

        For a convex R the iteration of ``T(z - weight * grad R(z))`` converges if ``weight`` times this is
        below 2.
        """
        return None


def working_copy(z: Tensor, *, least_dims: int = 1) -> Tensor:
    """``z`` in the precision to compute with: float32 for the half types, otherwise as it is."""
    if not z.is_floating_point():
        raise TypeError(f"features should be real floating-point numbers; got {z.dtype}")
    if z.dim() < least_dims:
        wanted = "a batch dimension" if least_dims == 1 else "a batch and a feature dimension, (B, m, ...)"
        raise ValueError(f"features need {wanted}; got shape {tuple(z.shape)}")
    return z.float() if z.dtype in (torch.float16, torch.bfloat16) else z


def batch_shares(total: Tensor, z: Tensor) -> Tensor:
    """The value ``total`` of a whole batch as equal shares of its samples, shape ``(B,)``."""
    return (total / max(z.shape[0], 1)).expand(z.shape[0])


def check_direction(z: Tensor, v: Tensor) -> None:
    """Refuse a direction ``v`` that would broadcast against ``z`` instead of matching it."""
    if v.shape != z.shape:
        raise ValueError(f"v should have the shape of z, {tuple(z.shape)}; got {tuple(v.shape)}")
