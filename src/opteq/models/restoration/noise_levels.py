"""How a prior depends on the noise level: a scale and a weight per channel, as smooth functions of sigma."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from opteq.common.options import NamedOptions


class NoiseLevels(nn.Module, metaclass=NamedOptions):
    """``sigma -> (s_c, w_c)``: where potentials bend, and how much channels weigh.

    ``log s_c`` is ``log sigma`` and ``log w_c`` is 0, plus polynomials in ``log sigma`` that are learned. An image and
    its noise that are both multiplied by a number should give an answer multiplied by it; that is exact where the
    polynomials are constant, and they learn what differs.

    Args:
        channels: number of channels.
        least, most: noise levels that are trained for; the polynomials are constant beyond.
        degree: of the polynomials (Chebyshev, on the range of ``log sigma``).
    """

    def __init__(self, channels: int, least: float = 2 / 255, most: float = 60 / 255, degree: int = 2) -> None:
        super().__init__()
        if not 0 < least < most:
            raise ValueError(f"NoiseLevels.least and most should satisfy 0 < least < most; got {least} and {most}")
        self.least, self.most, self.degree = least, most, degree
        self.log_scale = nn.Parameter(torch.zeros(degree + 1, channels))
        self.log_weight = nn.Parameter(torch.zeros(degree + 1, channels))

    def forward(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and weights ``(B, C)`` for noise levels ``(B,)``."""
        level = sigma.clamp_min(1e-6).log()
        middle, half = math.log(self.least * self.most) / 2, math.log(self.most / self.least) / 2
        angle = ((level - middle) / half).clamp(-1, 1).acos()
        waves = torch.stack([torch.cos(order * angle) for order in range(self.degree + 1)], dim=1)
        return (level[:, None] + waves @ self.log_scale).exp(), (waves @ self.log_weight).exp()

    def extra_repr(self) -> str:
        """The range."""
        return f"least={self.least:.4g}, most={self.most:.4g}, degree={self.degree}"
