"""Weights of a prior that look at the image: less is smoothed where there is structure."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opteq.common.options import NamedOptions


class ResponseWeights(nn.Module, metaclass=NamedOptions):
    """Weights in (0, 1) per channel and pixel, from the filter responses of the given image.

    They depend on the input x and not on the state y, so the energy stays convex in y, term by term; bounds of its
    curvature hold as they are, since no weight exceeds 1. What is lost is a bound on how fast the answer moves with x.

    Args:
        channels: number of responses.
        hidden: channels between; responses are mixed into them, averaged over a window, and mixed back.
        window: odd side of the window.
    """

    def __init__(self, channels: int, hidden: int = 16, window: int = 5) -> None:
        super().__init__()
        if window % 2 == 0:
            raise ValueError(f"ResponseWeights.window should be odd; got {window}")
        self.inward = nn.Conv2d(channels, hidden, 1)
        self.around = nn.Conv2d(hidden, hidden, window, padding=window // 2, groups=hidden)
        self.outward = nn.Conv2d(hidden, channels, 1)
        with torch.no_grad():
            self.around.weight.fill_(window**-2)
            nn.init.zeros_(self.around.bias)  # type: ignore[arg-type]
            self.outward.weight.mul_(0.1)
            nn.init.constant_(self.outward.bias, 1.5)  # type: ignore[arg-type]

    def forward(self, responses: Tensor) -> Tensor:
        """Weights ``(B, C, h, w)`` from responses in units of their scale."""
        sizes = responses.abs().clamp(max=10)
        return torch.sigmoid(self.outward(torch.relu(self.around(torch.relu(self.inward(sizes))))))
