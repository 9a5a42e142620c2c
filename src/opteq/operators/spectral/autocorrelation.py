"""The Gram matrices of a convolution at many frequencies, from few matrix products.

``K^(theta) K^(theta)* = sum over s of C_s e^(i s.theta)``, where ``C_s`` sums ``K_t K_{t+s}'`` over the taps ``t`` for
which ``t + s`` is a tap too: the kernel's autocorrelation. As ``C_{-s} = C_s'``, half of the shifts are enough, 13 for
a 3 x 3 kernel, and all of them together cost 45 matrix products, whatever the number of frequencies. At a frequency,

    real part  S = C_0 + sum over s of cos(s.theta) (C_s + C_s'),
    imaginary  T =       sum over s of sin(s.theta) (C_s - C_s'),

which is no matrix product at all, where forming ``K^`` and then ``K^ K^*`` takes two of them at each frequency.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Autocorrelation:
    """The Gram matrices of a kernel as functions of the frequency.

    Args:
        taps: ``(k1 * k2, groups, n, m)``.
        size: ``(k1, k2)``.
    """

    def __init__(self, taps: Tensor, size: tuple[int, int]) -> None:
        k1, k2 = size
        _, self.groups, self.n, m = taps.shape
        # Taps behind one another in a row of the matrix: one product then sums over several of them.
        rows = taps.reshape(k1, k2, self.groups, self.n, m).permute(2, 3, 0, 1, 4).contiguous()
        even, odd = [], []
        self.shifts = [(a, b) for a in range(k1) for b in range(0 if a == 0 else 1 - k2, k2)]
        for a, b in self.shifts:
            here, there = rows[:, :, : k1 - a, max(-b, 0) : k2 - max(b, 0)], rows[:, :, a:, max(b, 0) : k2 + min(b, 0)]
            if b == 0:
                product = torch.bmm(here.flatten(2), there.flatten(2).mT)
            else:
                product = torch.bmm(here[:, :, 0].flatten(2), there[:, :, 0].flatten(2).mT)
                for i in range(1, k1 - a):
                    product.baddbmm_(here[:, :, i].flatten(2), there[:, :, i].flatten(2).mT)
            if (a, b) == (0, 0):
                even.append(product)
            else:
                mirrored = product.mT.contiguous()
                even.append(product + mirrored)
                odd.append(product - mirrored)
        self.even = torch.stack(even).flatten(1)
        self.odd = torch.stack(odd).flatten(1)

    def waves(self, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``(F, shifts)`` for frequencies ``(F, 2)`` in float64; what the other methods take."""
        angles = frequencies @ torch.tensor(self.shifts, dtype=torch.float64, device=frequencies.device).mT
        return angles.cos().to(self.even), angles[:, 1:].sin().to(self.even)

    def at(self, waves: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Real and imaginary part of the Gram matrices, each ``(F * groups, n, n)``."""
        shape = (len(waves[0]) * self.groups, self.n, self.n)
        return (waves[0] @ self.even).reshape(shape), (waves[1] @ self.odd).reshape(shape)
