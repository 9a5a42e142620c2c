"""monDEQ with several tiers, each half as large as the one before (Winston and Kolter 2020)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opteq.models.comparators.monotone import Monotone, identity, scaled_weight


class TieredMonDEQ(Monotone):
    """``z = relu(M z + U x + b)`` with z on several tiers; tier i is fed by tier i - 1, the first one by x.

    ``M = (1 - m) I - A'A + S`` with a skew S. A has a circular convolution ``A_i`` for each tier and below it a strided
    one ``C_i`` from tier i to tier i + 1. S has ``B_i - B_i'`` on the diagonal and beside it what makes M block
    triangular: tier i + 1 sees ``-2 A_(i+1)' C_i z_i`` and tier i does not see tier i + 1. As with one tier
    (:class:`~opteq.models.comparators.monotone.MonDEQ`), ``I - M`` is m-strongly monotone whatever the weights are.

    The inverse of Peaceman-Rachford splitting goes from tier to tier. Strided convolutions mix four frequencies; the
    Woodbury formula takes them to one small matrix per frequency of the next tier.

    ``channels`` are those of the tiers, ``(n_1, n_2, ...)``, of a state ``((B, n_1, h, w), (B, n_2, h/2, w/2), ...)``.
    Other options are those of :class:`~opteq.models.comparators.monotone.Monotone`.

    ``features`` is the last tier.

    >>> layer = TieredMonDEQ((4, 6), nn.Conv2d(3, 4, 3, padding=1))
    >>> [tuple(part.shape) for part in layer.start(torch.zeros(1, 3, 8, 8))]
    [(1, 4, 8, 8), (1, 6, 4, 4)]
    """

    A: nn.ParameterList

    def _make_weights(self, size: int) -> None:
        channels = self.channels
        steps = list(zip(channels[1:], channels[:-1], strict=True))
        for name, shapes in (("A", [(n, n) for n in channels]), ("B", [(n, n) for n in channels]), ("C", steps)):
            kernels = [torch.empty(*shape, size, size).uniform_(-1, 1) for shape in shapes]
            setattr(self, name, nn.ParameterList(kernels))
            setattr(self, f"gain_{name}", nn.ParameterList([torch.tensor(1.0) for _ in shapes]))

    def start(self, x: Any) -> tuple[Tensor, ...]:
        """Zeros."""
        given = self.U(x)
        height, width = given.shape[2:]
        factor = 2 ** (len(self.channels) - 1)
        if height % factor or width % factor:
            raise ValueError(f"{len(self.channels)} tiers need sides that {factor} divides; got {height} x {width}")
        return tuple(
            given.new_zeros(len(given), size, height >> tier, width >> tier) for tier, size in enumerate(self.channels)
        )

    def features(self, z: Any) -> Tensor:
        """The last tier of the fixed point."""
        return torch.relu(z[-1]) if self.splitting == "peaceman-rachford" else z[-1]

    def f(self, z: Any, x: Any) -> tuple[Tensor, ...]:
        """One step of the splitting; its state is z, or u with ``z = relu(u)`` for Peaceman-Rachford."""
        given = [self.U(x), *[0.0] * (len(z) - 1)]
        if self.splitting == "forward-backward":
            moved = self._identity_minus_map(z)
            pairs = zip(z, moved, given, strict=True)
            return tuple(torch.relu(part - self.alpha * (image - its)) for part, image, its in pairs)
        half = [2 * torch.relu(part) - part for part in z]
        solved = self._inverse([part + self.alpha * its for part, its in zip(half, given, strict=True)])
        return tuple(2 * image - part for image, part in zip(solved, half, strict=True))

    # Below, spectra of images are (h, w, n, B) and those of kernels (h, w, outputs, inputs), complex.

    def _symbol(self, name: str, tier: int, height: int, width: int) -> Tensor:
        kernel, gain = getattr(self, name)[tier], getattr(self, f"gain_{name}")[tier]
        spectrum: Tensor = torch.fft.fft2(scaled_weight(kernel, gain, height, width), s=(height, width))
        return torch.permute(spectrum, (2, 3, 0, 1))

    def _diagonal(self, tier: int, height: int, width: int) -> Tensor:
        """``m I + A'A - B + B'`` of a tier: ``I - M`` without what the next tier adds."""
        A, B = (self._symbol(name, tier, height, width) for name in ("A", "B"))
        symbol: Tensor = self.m * identity(self.A[tier]) + torch.adjoint(A) @ A - B + torch.adjoint(B)
        return symbol

    def _from_tier_before(self, tier: int, above: Tensor) -> Tensor:
        """``2 A' C`` of the spectrum of the tier before."""
        height, width = above.shape[:2]
        C = self._symbol("C", tier - 1, height, width)
        A = self._symbol("A", tier, height // 2, width // 2)
        return 2 * torch.adjoint(A) @ _fold(C @ above)

    def _identity_minus_map(self, z: tuple[Tensor, ...]) -> list[Tensor]:
        """``(I - M) z``."""
        images, above = [], None
        for tier, part in enumerate(z):
            height, width = part.shape[2:]
            spectrum = _spectrum(part)
            image = self._diagonal(tier, height, width) @ spectrum
            if tier < len(z) - 1:
                C = self._symbol("C", tier, height, width)
                image = image + torch.adjoint(C) @ _tile(_fold(C @ spectrum))
            if above is not None:
                image = image + self._from_tier_before(tier, above)
            above = spectrum
            images.append(_image(image, part))
        return images

    def _inverse(self, given: list[Tensor]) -> list[Tensor]:
        """``(I + alpha (I - M))^-1``, from the first tier to the last."""
        solved, above = [], None
        for tier, part in enumerate(given):
            height, width = part.shape[2:]
            spectrum = _spectrum(part)
            if above is not None:
                spectrum = spectrum - self.alpha * self._from_tier_before(tier, above)
            P = torch.linalg.inv(identity(self.A[tier]) + self.alpha * self._diagonal(tier, height, width))
            above = P @ spectrum
            if tier < len(given) - 1:
                C = self._symbol("C", tier, height, width)
                back = P @ torch.adjoint(C)
                small = identity(self.A[tier + 1]) + self.alpha * _fold(C @ back)
                above = above - self.alpha * (back @ _tile(torch.linalg.inv(small) @ _fold(C @ above)))
            solved.append(_image(above, part))
        return solved


def _spectrum(z: Tensor) -> Tensor:
    spectrum: Tensor = torch.fft.fft2(z.to(torch.promote_types(z.dtype, torch.float32)))
    return spectrum.permute(2, 3, 1, 0)


def _image(spectrum: Tensor, like: Tensor) -> Tensor:
    image: Tensor = torch.fft.ifft2(spectrum.permute(3, 2, 0, 1))
    return image.real.to(like.dtype)


def _fold(spectrum: Tensor) -> Tensor:
    """Of every second pixel of every second row: the mean over the four frequencies that become one."""
    height, width, *rest = spectrum.shape
    return torch.mean(torch.reshape(spectrum, (2, height // 2, 2, width // 2, *rest)), dim=(0, 2))


def _tile(spectrum: Tensor) -> Tensor:
    """Of the image with zeros in between, the adjoint of keeping every second pixel."""
    return torch.tile(spectrum, (2, 2, 1, 1))
