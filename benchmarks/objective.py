"""A denoiser as a user would write it, with default options: the engine beside the plain path.

    python benchmarks/objective.py

Forward and backward in milliseconds, medians of 10 calls, on a GPU.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

import opteq


class FieldOfExperts(opteq.Objective):
    """``1/2 |y - x|^2 + sum w (sqrt(1 + u^2) - 1)`` with responses u of eight filters."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Conv2d(1, 8, 5, padding=2, bias=False)
        self.weight = nn.Parameter(torch.tensor(1.0))

    def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        experts = (1 + self.filters(y).square()).sqrt() - 1
        return {
            "data": 0.5 * (y - x).square().flatten(1).sum(1),
            "experts": self.weight * experts.flatten(1).sum(1),
        }


def main() -> None:
    torch.manual_seed(0)
    layer = opteq.Equilibrium(FieldOfExperts().cuda())
    x = torch.randn(64, 1, 64, 64, device="cuda", requires_grad=True)
    captured = median_milliseconds(layer, x)
    with opteq.engine.off():
        plain = median_milliseconds(layer, x)
    assert layer.last is not None
    print(f"{captured:.1f} ms, plain path {plain:.1f} ms, {int(layer.last[0].steps.max())} steps")
    print(opteq.engine.report(layer, x))


def median_milliseconds(layer: opteq.Equilibrium, x: Tensor) -> float:
    """The median."""
    spent = []
    for _ in range(14):
        torch.cuda.synchronize()
        began = time.perf_counter()
        features = layer(x)
        assert isinstance(features, Tensor)
        features.square().sum().backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        spent.append(1000 * (time.perf_counter() - began))
    return sorted(spent[4:])[5]


if __name__ == "__main__":
    main()
