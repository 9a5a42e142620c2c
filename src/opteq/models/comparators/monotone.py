"""monDEQ: a fixed point that exists and is unique for every weight, without an objective (Winston and Kolter 2020)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from opteq.common.validate import choice, positive, share
from opteq.problems.base import Problem
from opteq.problems.certificate import Certificate, for_finite_weights
from opteq.problems.fixed_point import FixedPoint
from opteq.states import widest_dtype

SPLITTINGS = ("peaceman-rachford", "forward-backward")


def identity(kernel: Tensor) -> Tensor:
    """The identity of the channels of a kernel.

    Made of the kernel and not by ``torch.eye``, so that it is seen to depend on weights alone: that is computed
    once a solve. (For the same reason adjoints are ``torch.adjoint(A)`` and not ``A.mH``.)
    """
    return torch.diag_embed(torch.ones_like(torch.amax(kernel, dim=(1, 2, 3))))


def scaled_weight(kernel: Tensor, gain: Tensor, height: int, width: int) -> Tensor:
    """``gain A / |A|_F`` in float32 or better, 0 for A = 0; an error where images are smaller than the kernel."""
    if max(kernel.shape[2:]) > min(height, width):
        raise ValueError(f"images of {height} x {width} are smaller than the kernels, {tuple(kernel.shape[2:])}")
    norm = torch.linalg.vector_norm(kernel, dtype=widest_dtype(kernel))
    scaled: Tensor = gain / torch.where(norm > 0, norm, 1.0) * kernel
    return scaled.to(torch.promote_types(kernel.dtype, torch.float32))


class Monotone(FixedPoint):
    """The base class of monDEQs of one tier and of several.

    Args:
        channels: of the state; one number, or one per tier.
        U: module from the input to the (first tier of the) state, with the bias.
        kernel_size: of all convolutions.
        m: strong monotonicity, in (0, 1].
        splitting: ``"peaceman-rachford"`` steps converge for every ``alpha``; ``"forward-backward"`` steps for those
            below ``2 m / L^2`` with ``L = |I - M|``.
        alpha: step length.

    A kernel A acts as ``gain_A A / |A|_F``, with a gain that is learned.
    """

    takes_tuples = False

    def __init__(
        self,
        channels: Any,
        U: nn.Module,
        kernel_size: int = 3,
        m: float = 0.1,
        splitting: str = "peaceman-rachford",
        alpha: float = 1.0,
    ) -> None:
        Problem.__init__(self)  # the map is a method here
        self.channels, self.U, self.m, self.splitting, self.alpha = channels, U, m, splitting, alpha
        share(self, "m")
        positive(self, "alpha")
        choice(self, "splitting", SPLITTINGS)
        self._make_weights(kernel_size)

    @abstractmethod
    def _make_weights(self, size: int) -> None:
        """Draw the kernels, and make the gains."""

    @for_finite_weights
    def certificate(self) -> Certificate:
        """Existence and uniqueness from m alone."""
        reason = f"I - M is {self.m:g}-strongly monotone whatever the weights are, and relu is a prox"
        none = "plain steps relu(M z + U x) need not contract; splitting converges all the same"
        moves = f"|z - z'| <= |U x - U x'| / {self.m:g}; the norm of U is not known"
        reasons = {"exists": reason, "unique": reason, "contraction": none, "lipschitz": moves}
        return Certificate(True, True, None, None, reasons)


class MonDEQ(Monotone):
    """``z = relu(M z + U x + b)`` with ``M = (1 - m) I - A'A + B - B'``, all of them circular convolutions.

    The symmetric part of ``I - M`` is at least m, whatever A and B are: there is one fixed point, and it moves by at
    most ``|U| / m`` times the change of the input. M is not symmetric, so no objective belongs to it; without B it is
    an :class:`~opteq.Inhibition`. Convolutions are computed by the Fourier transform, where the inverse that
    Peaceman-Rachford splitting needs is one small matrix per frequency.

    ``channels`` is n, of the state ``(B, n, h, w)``; the other options are those of :class:`Monotone`.

    >>> layer = MonDEQ(4, nn.Conv2d(3, 4, 3, padding=1), m=0.2)
    >>> layer.certificate().unique
    True
    """

    def _make_weights(self, size: int) -> None:
        shape = self.channels, self.channels, size, size
        self.A, self.B = (nn.Parameter(torch.empty(shape).uniform_(-1, 1)) for _ in range(2))
        self.gain_A, self.gain_B = (nn.Parameter(torch.tensor(gain)) for gain in (1.0, 1.0))

    def symbol(self, height: int, width: int) -> Tensor:
        """M at every frequency of images ``(height, width)``: ``(height, width // 2 + 1, n, n)``, complex."""
        A, B = self._spectrum(self.A, self.gain_A, height, width), self._spectrum(self.B, self.gain_B, height, width)
        symbol: Tensor = (1 - self.m) * identity(self.A) - torch.adjoint(A) @ A + B - torch.adjoint(B)
        return symbol

    def _spectrum(self, kernel: Tensor, gain: Tensor, height: int, width: int) -> Tensor:
        spectrum: Tensor = torch.fft.rfft2(scaled_weight(kernel, gain, height, width), s=(height, width))
        return spectrum.permute(2, 3, 0, 1)

    # The state is z for forward-backward, and u with z = relu(u) for Peaceman-Rachford splitting.

    def start(self, x: Any) -> Tensor:
        """Zeros."""
        return torch.zeros_like(self.U(x))

    def features(self, z: Any) -> Tensor:
        """The fixed point of ``relu(M z + U x + b)``."""
        return torch.relu(z) if self.splitting == "peaceman-rachford" else z

    def f(self, z: Any, x: Any) -> Tensor:
        """One step of the splitting."""
        given = self.U(x)
        M = self.symbol(*given.shape[2:])
        eye = identity(self.A)
        if self.splitting == "forward-backward":
            return torch.relu(z - self.alpha * (_apply(eye - M, z) - given))
        inverse = torch.linalg.inv(eye + self.alpha * (eye - M))
        half = 2 * torch.relu(z) - z
        reflected: Tensor = 2 * _apply(inverse, half + self.alpha * given) - half
        return reflected


def _apply(symbol: Tensor, z: Tensor) -> Tensor:
    """The circular convolution with ``symbol``, ``(h, w // 2 + 1, n, n)``, of ``(B, n, h, w)``."""
    spectrum = torch.fft.rfft2(z.to(symbol.real.dtype)).permute(2, 3, 1, 0)
    image: Tensor = torch.fft.irfft2((symbol @ spectrum).permute(3, 2, 0, 1), s=z.shape[2:])
    return image.to(z.dtype)
