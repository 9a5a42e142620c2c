"""The base class of potentials: a function psi of one number, its derivative, and the exact range of its curvature."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from opteq.common.curvature.bounds import Bounds
from opteq.common.options import NamedOptions
from opteq.common.override import overridable
from opteq.common.validate import check_flag, check_positive, check_whole


class Curve(ABC):
    """A potential at unit scale with its parameters as plain tensors, for use in a bound problem.

    Entries are independent of each other. Where parameters differ by channel, channels are dimension 1 of ``u``.
    """

    @abstractmethod
    def value(self, u: Tensor) -> Tensor:
        """``psi(u)``, entry by entry."""

    @abstractmethod
    def derivative(self, u: Tensor) -> Tensor:
        """``psi'(u)``."""

    @abstractmethod
    def second(self, u: Tensor) -> Tensor:
        """``psi''(u)``; at a kink of ``psi'``, the slope to its right."""


@overridable
def scaled_derivative(u: Tensor, curve: Curve, inverse: Tensor, force: Tensor) -> Tensor:
    """``force psi'(u inverse)`` for responses ``(B, C, ...)`` and factors that broadcast to them."""
    return force * curve.derivative(u * inverse)


@overridable
def scaled_second(u: Tensor, curve: Curve, inverse: Tensor, weight: Tensor) -> Tensor:
    """``weight psi''(u inverse)``, likewise."""
    return weight * curve.second(u * inverse)


class Potential(nn.Module, metaclass=NamedOptions):
    """A function ``psi_s(t) = s^2 psi(t / s)`` of every entry of a tensor, for priors ``sum psi((A y)_i)``.

    The scale s is where the potential departs from a parabola; it does not change the range of ``psi''``.

    Args:
        scale: the scale s, a positive number.
        channels: number of channels (dimension 1) with a scale of their own; None for one scale for all.
        learned: whether the scales are parameters. They are learned as logarithms, so that they stay positive.
    """

    def __init__(self, scale: float = 1.0, channels: int | None = None, learned: bool = False) -> None:
        super().__init__()
        name = type(self).__name__
        self.channels = None if channels is None else check_whole(f"{name}.channels", channels)
        log_scale = torch.full(
            () if channels is None else (channels,), math.log(check_positive(f"{name}.scale", scale))
        )
        if check_flag(f"{name}.learned", learned):
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale)

    @abstractmethod
    def prepare(self) -> Curve:
        """The curve at unit scale, computed once for many evaluations; differentiable by the parameters."""

    @abstractmethod
    def curvature(self) -> tuple[Tensor, Tensor]:
        """The exact range of ``psi''``, least and largest value: numbers ``()``, or one per channel ``(C,)``."""

    @property
    def convex(self) -> bool:
        """Whether psi is convex for all values of its parameters."""
        return False

    @property
    def scale(self) -> Tensor:
        """The scale s, ``()`` or ``(C,)``."""
        return self.log_scale.exp()

    def forward(self, t: Tensor) -> Tensor:
        """``psi_s(t)``, entry by entry."""
        if isinstance(t, Bounds):
            low, high = (end.detach() for end in self.curvature())
            return t.bent(float(low.min()), float(high.max()))  # type: ignore[no-any-return]
        wide = t.float() if t.dtype == torch.float16 else t  # squares of its numbers do not fit
        s = self._scale_beside(wide)
        return (s.square() * self.prepare().value(wide / s)).to(t.dtype)

    def derivative(self, t: Tensor) -> Tensor:
        """``psi_s'(t)``."""
        s = self._scale_beside(t)
        return s * self.prepare().derivative(t / s)

    def second(self, t: Tensor) -> Tensor:
        """``psi_s''(t)``."""
        return self.prepare().second(t / self._scale_beside(t))

    def _scale_beside(self, t: Tensor) -> Tensor:
        if self.channels is None:
            return self.scale.to(t.dtype)
        if t.ndim < 2 or t.shape[1] != self.channels:
            raise ValueError(
                f"{type(self).__name__} has {self.channels} channels, so it expects a tensor of shape "
                f"(B, {self.channels}, ...); got {tuple(t.shape)}"
            )
        return per_channel(self.scale, t)

    def extra_repr(self) -> str:
        scale = f"scale={float(self.scale.mean()):.3g}"
        return scale if self.channels is None else f"{scale}, channels={self.channels}"


def per_channel(values: Tensor, t: Tensor) -> Tensor:
    """Numbers ``(C,)`` shaped to multiply a tensor ``(B, C, ...)``, in its dtype; ``()`` stays as it is."""
    if values.ndim == 0:
        return values.to(t.dtype)
    return values.to(t.dtype).reshape(-1, *[1] * (t.ndim - 2))
