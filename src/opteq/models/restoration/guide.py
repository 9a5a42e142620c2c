"""A network that reads the given image and sets the terms of a prior: how much each weighs, and what it expects."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opteq.common.options import NamedOptions


class Guide(nn.Module, metaclass=NamedOptions):
    """Weights in (0, 1) and expected filter responses, per channel and pixel, from an image and its noise level.

    They depend on the input x and not on the state y, so the energy stays convex in y, term by term; bounds of its
    curvature hold as they are, since no weight exceeds 1. What is lost is a bound on how fast the answer moves with x.

    Args:
        channels: number of filters of the prior.
        width: channels of the network, which works at half the resolution.
        depth: residual blocks of two convolutions each.
        repeats: how often the sequence of blocks is applied, with the same weights.

    Attributes:
        compute_dtype: dtype of its convolutions, such as ``torch.bfloat16``; None for that of the image.

    >>> weight, expected = Guide(8, width=16, depth=2)(torch.rand(2, 1, 21, 30), torch.tensor([0.1, 0.2]))
    >>> weight.shape, float(expected.detach().abs().max())
    (torch.Size([2, 8, 21, 30]), 0.0)
    """

    def __init__(self, channels: int, width: int = 96, depth: int = 3, repeats: int = 4) -> None:
        super().__init__()
        self.channels, self.repeats = channels, repeats
        self.compute_dtype: torch.dtype | None = None
        self.inward = nn.Conv2d(5, width, 3, padding=1)
        self.blocks = nn.Sequential(*[_Block(width) for _ in range(depth)])
        self.outward = nn.Conv2d(width, 2 * 4 * channels, 1)
        with torch.no_grad():  # it begins with equal weights of 0.8, and expects no response
            nn.init.zeros_(self.outward.weight)
            bias = self.outward.bias
            assert bias is not None
            bias.zero_()[: 4 * channels] = math.log(4)

    @property
    def reach(self) -> int:
        """How far away a pixel may be that an answer depends on, to the next even number."""
        return 2 * (1 + 2 * len(self.blocks) * self.repeats + 1)

    def forward(self, image: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and expected responses ``(B, C, h, w)`` of images ``(B, 1, h, w)`` with noise levels ``(B,)``.

        Responses are in units of the scale of their channel.
        """
        h, w = image.shape[2:]
        even = F.pad(image, (0, w % 2, 0, h % 2), mode="replicate")
        quarters = F.pixel_unshuffle(2 * even - 1, 2)
        level = sigma.to(quarters.dtype).clamp_min(1e-6).log().reshape(-1, 1, 1, 1).expand_as(quarters[:, :1])
        dtype, device = self.compute_dtype, image.device.type
        # Weights are cast anew in every call: a cache would outlive a captured graph.
        with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
            hidden = self.inward(torch.cat([quarters, level + 2], dim=1))
            for _ in range(self.repeats):
                hidden = self.blocks(hidden)
            maps = self.outward(hidden)
        maps = F.pixel_shuffle(maps.to(image.dtype), 2)[..., :h, :w]
        weight, expected = maps[:, : self.channels], maps[:, self.channels :]
        return torch.sigmoid(weight), expected.contiguous()


class _Block(nn.Module):
    """``v + B gelu(A v)`` with convolutions A and B."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inward = nn.Conv2d(width, width, 3, padding=1)
        self.outward = nn.Conv2d(width, width, 3, padding=1)
        nn.init.zeros_(self.outward.weight)  # the network begins as the identity
        nn.init.zeros_(self.outward.bias)  # type: ignore[arg-type]

    def forward(self, v: Tensor) -> Tensor:
        changed: Tensor = v + self.outward(F.gelu(self.inward(v)))
        return changed
