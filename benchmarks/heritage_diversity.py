"""What heritage and diversity cost: their share of a step of MOptEq, and how it grows.

    python benchmarks/heritage_diversity.py                    # small, on the CPU
    python benchmarks/heritage_diversity.py --device cuda --size 32 --batch 128 --dtype bfloat16

Two neighbours cost one product of their channels and, for each of the two, one product with the signs of that:
``3 C^2`` multiplications a pixel. The 3x3 convolutions W and W' of a branch cost ``2 * 9 * C * width`` a pixel, so the
share falls where states are wider than features, and time grows linearly with pixels and batch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import opteq
from opteq import operators as op
from opteq.problems.branches.mopteq import BoundMOptEq, MOptEq


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of one call."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        wait()
        begun = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def bound(channels: int, batch: int, size: int, options: argparse.Namespace) -> BoundMOptEq:
    """Three branches of one size, as in the paper's single-view networks, with states as wide as the features."""
    torch.manual_seed(0)
    branches = [opteq.Branch(op.Conv2d(channels, channels, 3), nn.Conv2d(3, channels, 3, padding=1)) for _ in range(3)]
    problem = MOptEq(branches, diversity=0.01).to(options.device, options.dtype)
    return problem.bind(torch.randn(batch, 3, size, size, device=options.device, dtype=options.dtype))


@torch.no_grad()
def measure(channels: int, batch: int, size: int, options: argparse.Namespace) -> tuple[float, float, int]:
    """Seconds of a step, of its fusion, and the bytes that the fusion needs at most beside its input."""
    hidden = bound(channels, batch, size, options)
    y = hidden.step(hidden.start())
    z = hidden.features(y)
    step = seconds(lambda: hidden.step(y), options.device, options.repeats)
    fusion = seconds(lambda: hidden.coupling.negative_gradient(z), options.device, options.repeats)
    extra = 0
    if options.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        hidden.coupling.negative_gradient(z)
        extra = torch.cuda.max_memory_allocated() - before
    return step, fusion, extra


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.float32)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()

    def row(channels: int, batch: int, size: int) -> None:
        step, fusion, extra = measure(channels, batch, size, options)
        memory = f"{extra / 2**20:10.1f}" if options.device.type == "cuda" else "         -"
        print(
            f"{channels:8d} {batch:6d} {size:4d}x{size:<4d} {1e3 * step:10.3f} {1e3 * fusion:10.3f}"
            f" {100 * fusion / step:7.1f} % {memory}"
        )

    print("channels  batch    size    step ms  fusion ms   share   extra MiB")
    for channels in (32, 128, 256):
        row(channels, options.batch, options.size)
    print("growth with pixels and with the batch")
    for batch, size in ((1, 1), (1, 2), (2, 2), (4, 2)):
        row(32, options.batch * batch, options.size * size)


if __name__ == "__main__":
    main()
